"""`deeplink sandbox` without a cluster; with one: tests/cluster/test_sandbox.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplink.cli.sandbox import command
from deeplink.scheduler.testbed import programs
from deeplink.scheduler.testbed.errors import SlurmMissingError
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep away from sandboxes that are up on this machine."""
    folder = tmp_path_factory.mktemp("r") / "s"  # short: it is to hold sockets
    monkeypatch.setenv("DEEPLINK_SANDBOX_ROOT", str(folder))
    return folder


def deeplink(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deeplink", "sandbox", *argv],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("verb", ["up", "down", "status", "exec", "crash", "boot", "cut", "heal"])
def test_every_verb_explains_itself(verb: str) -> None:
    done = CliRunner().invoke(command, [verb, "--help"])
    assert done.exit_code == 0
    assert "--name" in done.output
    assert "deeplink sandbox" in done.output


@pytest.mark.parametrize(
    "argv",
    [("status",), ("exec", "n0", "true"), ("crash", "n0"), ("boot", "n0"), ("cut", "n0"), ("heal", "n0")],
)
def test_without_a_cluster_it_says_how_to_get_one(argv: tuple[str, ...], root: Path) -> None:
    done = deeplink(*argv)
    assert done.returncode == 1
    assert "no sandbox 'default' is up" in done.stderr
    assert "deeplink sandbox up" in done.stderr
    assert "Traceback" not in done.stderr
    assert not root.exists()


def test_down_without_a_cluster_is_no_error(root: Path) -> None:
    done = deeplink("down", "--name", "none")
    assert (done.returncode, done.stdout) == (0, "sandbox 'none' was not up\n")
    assert deeplink("down", "--name", "none", "--dry-run").stdout == ""
    assert not root.exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("up", "--shape", "8"), "1x2x4"),
        (("up", "--shape", "1x1x1", "--nodes", "2"), "room for 1"),
        (("up", "--name", "../x"), "small letters"),
        (("up", "--gpus", "-1"), "gpus"),
        (("up", "--frobnicate"), "frobnicate"),
        (("exec", "n0"), "COMMAND"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(argv: tuple[str, ...], why: str) -> None:
    done = deeplink(*argv)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_shows_every_file_and_starts_nothing(root: Path) -> None:
    done = deeplink("up", "--loopback", "--nodes", "3", "--extra", "RequeueExit=17", "--dry-run")
    assert done.returncode == 0, done.stderr
    for file in ("slurm.conf", "topology.conf", "gres.conf", "cgroup.conf"):
        assert f"{root}/default/etc/{file}" in done.stdout
    assert "RequeueExit=17" in done.stdout
    assert "NodeName=n2 " in done.stdout
    assert not root.exists()


def test_without_slurm_the_remedy_is_a_line_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(programs, "SYSTEM_PATH", str(tmp_path))
    assert programs.installed() is None
    assert programs.missing(["slurmctld"]) == ["slurmctld"]
    with pytest.raises(SlurmMissingError, match="not installed: apt-get") as refused:
        programs.unpacked(tmp_path)
    assert refused.value.exit_code == 127
    assert "apt-get install" in SlurmMissingError(["slurmd"]).remedy
