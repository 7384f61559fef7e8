"""A command run as if it were ourselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.scheduler.slurm import job_environment
from deeplink.scheduler.slurm.command import CommandMissingError
from deeplink.scheduler.slurm.job_environment import run_passing_on
from tests.waiting import LIMIT_S

ENV = dict(os.environ)


@pytest.fixture(params=["terminal", "pipe"])
def channel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pipe":
        monkeypatch.setattr(job_environment, "_channel", os.pipe)


@pytest.mark.usefixtures("channel")
def test_what_it_writes_and_its_exit_code_come_back() -> None:
    said: list[bytes] = []
    code = run_passing_on(
        ["sh", "-c", "printf 'a\\nb\\377'; head -c 200000 /dev/zero; exit 7"], env=ENV, write=said.append
    )
    assert (code, b"".join(said)) == (7, b"a\nb\xff" + bytes(200_000))


def test_a_line_comes_while_the_command_goes_on(tmp_path: Path) -> None:
    """A program that asks whether it writes to a terminal, as the C library does, holds nothing back."""
    go = tmp_path / "go"
    waiting = f"import os, time\nprint('job 7')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    said: list[bytes] = []

    def write(data: bytes) -> None:
        said.append(data)
        go.touch()  # only now may it end

    env = {key: value for key, value in ENV.items() if key != "PYTHONUNBUFFERED"}
    assert run_passing_on([sys.executable, "-c", waiting], env=env, write=write) == 0
    assert said == [b"job 7\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_command_and_ends_us_alike(number: signal.Signals) -> None:
    code = (
        "import os, sys\n"
        "from deeplink.scheduler.slurm.job_environment import end_as, run_passing_on\n"
        "def write(data):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "argv = ['sh', '-c', 'echo up; exec sleep 50']\n"
        "sys.exit(end_as(run_passing_on(argv, env=dict(os.environ), write=write)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == -number, done.stderr


def test_the_commands_own_answer_to_a_signal_counts() -> None:
    script = "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"
    before = signal.getsignal(signal.SIGTERM)
    assert run_passing_on(["sh", "-c", script], env=ENV, write=lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_such_program() -> None:
    with pytest.raises(CommandMissingError):
        run_passing_on(["no-such-program-here"], env=ENV, write=lambda _: None)
