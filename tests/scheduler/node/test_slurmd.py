"""A process by the name of slurmd that really dies, and is really started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import GOOD
from deeplink.scheduler.node.settings import SlurmdSettings
from deeplink.scheduler.node.slurmd import (
    PROBE_S,
    STARTED_AGAIN,
    SlurmdCheck,
    SlurmdState,
    is_slurmd,
    probe_port,
    processes_of_slurmd,
)
from tests.waiting import LIMIT_S

NODE = f"test{os.getpid()}"


@pytest.fixture
def slurmd(tmp_path: Path) -> Iterator[Path]:
    """A program that is called slurmd and does nothing; those that run at the end are ended.

    It waits without a child: one that is forked and not yet another program would be a second slurmd.
    """
    path, never = tmp_path / "slurmd", tmp_path / "never"
    os.mkfifo(never)
    path.write_text(f"#!/bin/sh\nexec < {never}\n")
    path.chmod(0o755)
    yield path
    for pid in processes_of_slurmd(Path("/proc"), NODE):
        os.kill(pid, signal.SIGKILL)


def begun(slurmd: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([slurmd, "-N", NODE])
    deadline = time.monotonic() + LIMIT_S
    while not is_slurmd(Path(f"/proc/{process.pid}"), NODE):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def check(port: int, **more: str | bool) -> SlurmdCheck:
    return SlurmdCheck(SlurmdSettings(port=port), SystemClock(), NODE, **more)  # type: ignore[arg-type]


def test_one_that_dies_is_told_and_where_nothing_says_how_not_started(slurmd: Path, closed_port: int) -> None:
    here = check(closed_port)
    with begun(slurmd) as process:
        assert here.look() == GOOD
        process.kill()
    (told,) = here.look().complaints
    assert told.problem == "slurmd is gone"
    with begun(slurmd) as process:
        assert here.look() == GOOD
        process.kill()


def test_one_that_dies_is_started_anew_at_the_second_look(slurmd: Path, closed_port: int, tmp_path: Path) -> None:
    # Like slurmd itself, it goes into the background.
    starts = tmp_path / "start"
    up = "until grep -q slurmd /proc/$!/comm; do sleep 0.01; done"
    starts.write_text(f"#!/bin/sh\n{slurmd} -N {NODE} >/dev/null 2>&1 &\n{up}\n")
    starts.chmod(0o755)
    here = check(closed_port, restart=str(starts))
    with begun(slurmd) as process:
        assert here.look() == GOOD
        process.kill()
    assert here.look().complaints
    assert list(processes_of_slurmd(Path("/proc"), NODE)) == []
    (told,) = here.look().complaints
    assert (told.severity, told.certain, told.problem) == (Severity.NOTE, True, STARTED_AGAIN)
    assert len(list(processes_of_slurmd(Path("/proc"), NODE))) == 1
    assert here.look() == GOOD
    here.close()


def test_a_command_that_does_not_help_is_told(slurmd: Path, closed_port: int) -> None:
    here = check(closed_port, restart="sh -c 'echo no such unit >&2; exit 5'")
    with begun(slurmd) as process:
        here.look()
        process.kill()
    here.look()
    (told,) = here.look().complaints
    assert told.problem == "slurmd is gone, being started again (try 1: sh exited 5: no such unit)"


def test_one_that_was_never_seen_is_neither_missed_nor_started(closed_port: int, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    here = check(closed_port, restart=f"touch {touched}")
    for _ in range(3):
        assert here.look() == GOOD
    expected = check(closed_port, restart=f"touch {touched}", expected=True)
    for _ in range(3):
        assert [one.problem for one in expected.look().complaints] == ["slurmd is gone"]
    assert not touched.exists()


def test_one_that_listens_lives_though_its_process_is_not_seen(closed_port: int, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert probe_port(port) is SlurmdState.ALIVE
        here = SlurmdCheck(SlurmdSettings(port=port), SystemClock(), NODE, proc=tmp_path)
        assert here.look() == GOOD
        assert here.expected
    assert probe_port(closed_port) is SlurmdState.DEAD


def test_what_a_port_said_before_its_process_was_seen_counts_no_more(slurmd: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = check(listener.getsockname()[1])
        assert here.look() == GOOD  # its port alone: it is still coming up
        with begun(slurmd) as process:
            assert here.look() == GOOD
            listener.close()
            process.kill()
        (told,) = here.look().complaints
        assert told.problem == "slurmd is gone"


def test_where_its_process_is_hidden_and_its_port_unknown_it_cannot_tell(closed_port: int, tmp_path: Path) -> None:
    here = SlurmdCheck(SlurmdSettings(port=closed_port), SystemClock(), NODE, expected=True, proc=tmp_path)
    look = here.look()
    assert not look.complaints
    assert look.unknown


def test_a_port_that_answers_is_tried_seldom(tmp_path: Path) -> None:
    clock = ManualClock()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.0)
        here = SlurmdCheck(SlurmdSettings(port=listener.getsockname()[1]), clock, NODE, proc=tmp_path)
        for _ in range(2):
            for _ in range(10):
                assert here.look() == GOOD
                clock.sleep(2.0)
            listener.accept()[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()
            clock.sleep(PROBE_S)
    assert [one.problem for one in here.look().complaints] == ["slurmd is gone"]


def test_another_nodes_slurmd_on_this_host_and_slurmstepd_are_not_ours(tmp_path: Path) -> None:
    def process(comm: str, *words: str) -> bool:
        (tmp_path / "comm").write_text(f"{comm}\n")
        (tmp_path / "cmdline").write_bytes(b"\0".join(word.encode() for word in [*words, ""]))
        return is_slurmd(tmp_path, "n1")

    assert process("slurmd", "/usr/sbin/slurmd", "-D")
    assert process("slurmd-wlm", "slurmd", "-b", "-N", "n1", "-f", "x")
    assert process("slurmd", "slurmd", "-Nn1")
    assert not process("slurmd", "slurmd", "-N", "n10")
    assert not process("slurmstepd", "slurmstepd: [3.0]")
    assert not process("slurmd")  # a zombie has no command line
