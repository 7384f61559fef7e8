"""`deeplink calibrate`: its options; on real ranks, over loopback, with torch.distributed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deeplink.cli import cli
from deeplink.core.errors import DeepLinkError
from deeplink.ops import calibration
from deeplink.scheduler.placement.model import constants_from
from deeplink.scheduler.placement.sweep import AllReduceTiming, RankLocation, Reach, ReadSweep, Sweep
from tests.waiting import LIMIT_S


def calibrate(*words: str) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *words], standalone_mode=False)


def test_outside_of_a_launch_the_way_to_start_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    refused = calibrate().exception
    assert isinstance(refused, DeepLinkError)
    assert refused.exit_code == 2
    assert refused.exit_code == 2
    assert "deeplink run" in refused.remedy


@pytest.mark.parametrize(
    "words",
    [
        ["--largest", "8192"],
        ["--smallest", "2"],
        ["--backend", "mpi"],
        ["--repeats", "0"],
        ["--data-bytes", "0"],
        ["--data-seconds", "0"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["calibrate", *words]).exit_code == 2


def launched(
    folder: Path, nodes: int, per_node: int, *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    own = {"DEEPLINK_STATE": str(folder / "own"), "DEEPLINK_STORE": str(folder / "store"), "HOME": str(folder)}
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "deeplink", "run", "--local", str(nodes), "--nproc-per-node", str(per_node)),
            *("--", sys.executable, "-m", "deeplink", "calibrate", *words),
        ],
        env={**outside, **own, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
        cwd=folder,
    )


@pytest.mark.slow
def test_ranks_over_loopback_become_constants(tmp_path: Path) -> None:
    out = tmp_path / "constants.json"
    # Up to 64 MiB: on a busy machine small ones take milliseconds, as long as 4 MiB do.
    done = launched(tmp_path, 3, 2, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    (told,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert told["backend"] == "gloo"
    assert [(sweep["reach"], sweep["ranks"]) for sweep in told["sweeps"]] == [("gpu", 2), ("nic", 2), ("nodes", 3)]
    for sweep in told["sweeps"]:
        assert [timing["bytes"] for timing in sweep["timings"]] == [1 << power for power in range(10, 27, 2)]
        first, *_, last = (timing["seconds"] for timing in sweep["timings"])
        assert 0 < first < last
    known = constants_from(out.read_text(), str(out))
    assert known == constants_from(json.dumps(told["constants"]), "output")
    assert 1e7 < known.path_bandwidth <= known.nic.bandwidth <= 2 * known.path_bandwidth
    assert 1e-7 < known.nic.latency_s < 0.1


def test_a_file_that_cannot_be_written_does_not_cost_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*_: object, **__: object) -> tuple[list[Sweep], list[ReadSweep]]:
        timings = [AllReduceTiming(size, 2e-4 + size / 1e9) for size in (1 << 10, 1 << 15, 1 << 20)]
        return [Sweep(Reach.NIC, 2, tuple(timings))], []

    monkeypatch.setattr(calibration, "location_here", lambda _env: RankLocation(0, 0))
    monkeypatch.setattr(calibration, "timed_between", timed)
    (tmp_path / "file").touch()
    refused = calibrate("--backend", "gloo", "--out", str(tmp_path / "file" / "constants.json"))
    assert isinstance(refused.exception, DeepLinkError)
    assert "cannot write" in str(refused.exception)
    assert "constants of the cost model" in refused.output
    assert "written" not in refused.output


@pytest.mark.slow
def test_one_rank_alone_is_an_error(tmp_path: Path) -> None:
    done = launched(tmp_path, 1, 1)
    assert done.returncode == 2
    assert "one rank alone sends nothing" in done.stdout + done.stderr


@pytest.mark.slow
def test_reading_is_timed_from_each_place(tmp_path: Path) -> None:
    files = {f"{number % 3}/{number}": bytes([number % 251]) * 5_000 for number in range(600)}
    for name, data in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    # One copy of each shard, several on each node: there is something to read from either.
    own = {"DEEPLINK_STORE": str(tmp_path / "store"), "DEEPLINK_CATALOG": str(tmp_path / "catalog")}
    env = {**os.environ, **own, "DEEPLINK_STATE": str(tmp_path / "own"), "HOME": str(tmp_path)}
    words = [*("pack", str(tmp_path / "source"), "images", "--local", "2"), *("--replicas", "1")]
    pack = subprocess.run(
        [sys.executable, "-m", "deeplink", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert pack.returncode == 0, pack.stderr
    out = tmp_path / "constants.json"
    few = ("--largest", "1048576", "--repeats", "3", "--data", "images", "--data-seconds", "20")
    done = launched(tmp_path, 2, 1, *few, "--out", str(out), "--json", DEEPLINK_CATALOG=str(tmp_path / "catalog"))
    assert done.returncode == 0, done.stderr
    (told,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(read["place"], read["problem"]) for read in told["reads"]] == [
        ("local", ""),
        ("peer", ""),
        ("source", ""),
        ("source, all nodes", ""),
    ]
    local, peer, source, together = told["reads"]
    # A rank reads an eighth of the samples from each place, one node alone from the source; each at most once.
    for read, ranks in ((local, 2), (peer, 2), (source, 1), (together, 2)):
        assert len(read["ranks"]) == ranks
        assert all(0 < rank["bytes"] <= 600 // 8 * 5_000 for rank in read["ranks"])
        assert all(rank["seconds"] > 0 for rank in read["ranks"])
    known = constants_from(out.read_text(), str(out))
    assert known.reads.local == pytest.approx(min(rank["bytes"] / rank["seconds"] for rank in local["ranks"]))
    assert known.reads.peer
    assert known.reads.source
