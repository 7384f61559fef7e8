"""The emulation's table, on the recorded answers; starting 1,024 slurmd is left to whoever runs the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.scheduler import emulation
from benchmarks.scheduler.choices import read_record
from benchmarks.scheduler.manyslurmd import Names, Shape
from deeplink.scheduler.topology.sources.assemble import Format, read

RECORDED = Path(__file__).parents[1] / "data" / "slurm" / "22.05.8" / "5-tree" / "choices.json.gz"


@pytest.mark.slow
def test_the_table_of_recorded_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "BENCH", tmp_path)
    again = tmp_path / "again.gz"
    asked = ["--from", str(RECORDED), "--states", "6", "--record", str(again), "--json"]
    assert emulation.main(asked) == 0
    of = "1,024 slurmd, 6 states, names dealt over leaves: "
    found = {row["row"].removeprefix(of): row["value"] for row in json.loads(capsys.readouterr().out)}
    agreement = {name: value for name, value in found.items() if "same nodes emulated" in name}
    assert len(agreement) == 3
    assert set(agreement.values()) == {100.0}
    assert (
        found["ring crossings of a job: deeplink"]
        <= found["ring crossings of a job: stock's nodes, our rank order"]
    )
    assert (
        found["ring crossings of a job: stock's nodes, our rank order"] < found["ring crossings of a job: stock"]
    )
    assert found["leaves of a job: deeplink"] <= found["leaves of a job: stock"]
    assert read_record(again).states == read_record(RECORDED).states[:6]


@pytest.mark.parametrize(
    ("names", "leaf", "path"),
    [
        (Names.DEALT, "e[0,2,4,6]", ("core", "spine1", "leaf3")),
        (Names.FOLLOW, "e[0-3]", ("core", "spine1", "leaf2")),
    ],
)
def test_the_conf_says_where_the_paths_are(names: Names, leaf: str, path: tuple[str, ...]) -> None:
    shape = Shape(nodes=16, names=names, per_leaf=4, leaves=2)
    lines = shape.conf().splitlines()
    assert lines[0] == f"SwitchName=leaf0 Nodes={leaf}"
    assert lines[-2:] == ["SwitchName=spine1 Switches=leaf[2-3]", "SwitchName=core Switches=spine[0-1]"]
    assert shape.path(9) == path


def test_an_uneven_conf_is_the_tree_of_its_paths() -> None:
    shape = Shape(nodes=128, names=Names.UNEVEN)
    conf = read(shape.conf(), "topology.conf", Format.SLURM)
    assert conf.network.nodes.keys() == {f"e{number}" for number in range(128)}
    assert not conf.findings
    assert {len(shape.path(number)) for number in range(128)} == {2, 4}
