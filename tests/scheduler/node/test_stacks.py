"""Where a node's ranks are: real processes, asked in every way there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt
from deeplink.scheduler.node import stacks
from deeplink.scheduler.node.rank_processes import Process, ProcessTable, Reported, catches, rank_processes
from deeplink.scheduler.node.stacks import NEWEST, Stacks, found_py_spy, newest_collectives
from tests.pickled import pickled
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.slow

ATTEMPT = Attempt(77, 0, 3)
RANK = """
import sys, threading, time
from pathlib import Path
from deeplink.training.progress import answer_in

if sys.argv[1] != "-":
    assert answer_in(Path(sys.argv[1]))

def wait_for_the_others():
    print("ready", flush=True)  # and not before: who asks at once is to find this function
    threading.Event().wait()

def work():
    print("ready", flush=True)
    while True:
        sum(range(100_000))

work() if sys.argv[2:] else wait_for_the_others()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    begun: list[subprocess.Popen[str]] = []

    def rank(number: int, *words: str, answers: bool = True, **env: str) -> subprocess.Popen[str]:
        folder = str(tmp_path) if answers else "-"
        settings = {
            "DEEPLINK_ATTEMPT": str(ATTEMPT),
            "DEEPLINK_NODE": "n0",
            "DEEPLINK_TOKEN_FILE": str(tmp_path / "token"),
            "RANK": str(number),
        }
        argv = [sys.executable, str(script), folder, *words]
        process = subprocess.Popen(argv, env={**os.environ, **settings, **env}, stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if not words:  # it said so a moment before it waits
            stat = Path(f"/proc/{process.pid}/stat")
            until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
        return process

    yield rank
    for process in begun:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_a_process_that_cannot_be_read_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "LOOK_S", 0.2)
    (tmp_path / "uptime").write_text("10.0 10.0")
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "stat").write_text("17 (python) S " + " ".join(["1"] * 40))
    os.mkfifo(tmp_path / "17" / "environ")  # as one whose memory is locked
    ask = Stacks("n0", py_spy="", table=ProcessTable(tmp_path))
    for _ in range(stacks.MOST_LOOKS + 3):
        assert ask(ATTEMPT, {}, 1.0, states_only=True) == []
    assert len(ask._looks) == stacks.MOST_LOOKS
    while any(one.is_alive() for one in ask._looks):
        os.close(os.open(tmp_path / "17" / "environ", os.O_RDWR | os.O_NONBLOCK))
        time.sleep(0.01)
    (tmp_path / "17" / "environ").unlink()
    (tmp_path / "17" / "environ").write_bytes(b"DEEPLINK_ATTEMPT=77.0.3\0DEEPLINK_NODE=n0\0RANK=2\0")
    assert [one.rank for one in ask(ATTEMPT, {}, 1.0, states_only=True)] == [2]


def said(process: subprocess.Popen[str]) -> Reported:
    return Reported(pid=process.pid, unix=time.time())


def stop(process: subprocess.Popen[str]) -> None:
    """Return once it has stopped: the signal alone is only on its way."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_py_spy_tells_of_a_stopped_rank_where_it_is(start: Start) -> None:
    assert found_py_spy(), "py-spy is among the tools of the tests"
    process = start(0, answers=False)
    stop(process)
    (found,) = Stacks("n0")(ATTEMPT, {0: said(process)}, 8.0, states_only=False)
    assert (found.rank, found.pid, found.state, found.source) == (0, process.pid, "T", "py-spy")
    assert found.text.startswith("stopped (T)")
    assert "wait_for_the_others (rank.py" in found.text


def test_a_stack_with_names_that_are_no_utf_8_is_told(start: Start, tmp_path: Path) -> None:
    process = start(0, answers=False)
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nprintf 'Thread 1: caf\\351.py\\n'\n")
    spy.chmod(0o755)
    (found,) = Stacks("n0", py_spy=str(spy))(ATTEMPT, {0: said(process)}, 8.0, states_only=False)
    assert (found.source, found.text) == ("py-spy", "Thread 1: caf\\xe9.py\n")


def test_without_py_spy_a_rank_is_asked_and_goes_on(start: Start) -> None:
    process = start(3)
    for _ in range(2):
        (found,) = Stacks("n0", py_spy="")(ATTEMPT, {3: said(process)}, 8.0, states_only=False)
        assert (found.source, found.state) == ("faulthandler", "S")
        assert found.text.count("in wait_for_the_others") == 1
    assert process.poll() is None


def test_one_that_has_not_said_that_it_answers_is_not_sent_a_signal(start: Start) -> None:
    process = start(0, answers=False)
    (found,) = Stacks("n0", py_spy="")(ATTEMPT, {0: said(process)}, 8.0, states_only=False)
    assert found.source == "kernel"
    assert f"thread {process.pid} (python" in found.text
    assert process.poll() is None


def test_a_stopped_one_is_not_sent_a_signal_either(start: Start) -> None:
    process = start(0)
    stop(process)
    (found,) = Stacks("n0", py_spy="")(ATTEMPT, {0: said(process)}, 8.0, states_only=False)
    assert (found.source, found.state) == ("kernel", "T")
    assert "cannot answer" in found.text


def test_ranks_that_reported_nothing_are_found_by_their_environment(start: Start) -> None:
    ranks = {number: start(number) for number in (1, 0)}
    start(2, DEEPLINK_NODE="n1")
    start(3, DEEPLINK_ATTEMPT="77.0.2")
    found = rank_processes(ProcessTable(), ATTEMPT, "n0", {})
    assert [(one.rank, one.pid) for one in found] == [(0, ranks[0].pid), (1, ranks[1].pid)]


@pytest.mark.parametrize(("node_rank", "found"), [(0, [(0, 12), (1, 13)]), (1, [(2, 12), (3, 13)])])
def test_torchrun_is_no_rank_though_it_was_given_the_number_of_one(
    tmp_path: Path, node_rank: int, found: list[tuple[int, int]]
) -> None:
    """On the second of two nodes it bears the number of a rank of the first."""
    (tmp_path / "uptime").write_text("10.0 10.0")
    first = 2 * node_rank
    shell, torchrun, worker = (10, 1, node_rank), (11, 10, node_rank), (14, 12, first)
    for pid, parent, rank in (shell, torchrun, (12, 11, first), (13, 11, first + 1), worker):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S {parent} " + " ".join(["1"] * 40))
        (folder / "environ").write_bytes(f"DEEPLINK_ATTEMPT={ATTEMPT}\0DEEPLINK_NODE=n0\0RANK={rank}\0".encode())
    seen = rank_processes(ProcessTable(tmp_path), ATTEMPT, "n0", {})
    assert [(one.rank, one.pid) for one in seen] == found


def test_a_number_that_somebody_else_has_by_now_is_not_believed(start: Start) -> None:
    rank, other = start(0), start(1, DEEPLINK_ATTEMPT="78.0.0")
    younger = Reported(pid=rank.pid, unix=time.time() - 3600)
    reported = {0: younger, 4: said(other), 5: Reported(pid=os.getpid(), unix=time.time())}
    found = {one.rank: one for one in rank_processes(ProcessTable(), ATTEMPT, "n0", reported)}
    assert found[0].pid == rank.pid, "by its environment"
    assert found[4].state == found[5].state == ""


def test_states_alone_tell_who_works(start: Start) -> None:
    working, waiting = start(0, "work"), start(1)
    ask = Stacks("n0")
    reported = {0: said(working), 1: said(waiting)}
    before = ask(ATTEMPT, reported, LIMIT_S, states_only=True)

    def used() -> list[float]:
        now = ask(ATTEMPT, reported, LIMIT_S, states_only=True)
        assert not any(one.text for one in now)
        return [two.cpu_s - one.cpu_s for one, two in zip(before, now, strict=True)]

    until(lambda: used()[0] > 0.05)
    assert used()[1] <= 0.01


def test_a_rank_that_has_ended_is_named_so(start: Start) -> None:
    process = start(0)
    reported = {0: said(process)}
    process.kill()
    process.wait(LIMIT_S)
    (found,) = Stacks("n0")(ATTEMPT, reported, 8.0, states_only=False)
    assert (found.state, found.source, found.text) == ("", "", "there is no such process")


def test_nobody_is_waited_for_longer_than_is_left(start: Start) -> None:
    process = start(0)
    began = time.monotonic()
    (found,) = Stacks("n0")(ATTEMPT, {0: said(process)}, 0.0, states_only=False)
    assert time.monotonic() - began < 5
    assert found.state == "S"


def test_torchs_flight_recorder_is_read_where_it_dumped(start: Start, tmp_path: Path) -> None:
    process = start(5, TORCH_NCCL_DEBUG_INFO_TEMP_FILE=str(tmp_path / "trace_"))
    entries = [
        {"collective_seq_id": number, "profiling_name": "nccl:all_reduce", "state": "started", "frames": [{}]}
        for number in range(40)
    ]
    (tmp_path / "trace_5").write_bytes(pickled({"version": "2.9", "entries": entries}))
    (found,) = Stacks("n0")(ATTEMPT, {5: said(process)}, 8.0, states_only=False)
    assert found.flight.count("nccl:all_reduce") == NEWEST
    assert '"collective_seq_id": 39' in found.flight
    assert "frames" not in found.flight


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_is_asked_for_a_dump_and_makes_none_keeps_its_stack(
    start: Start, tmp_path: Path, is_stopped: bool
) -> None:
    os.mkfifo(tmp_path / "ask_0.pipe")
    listening = os.open(tmp_path / "ask_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    process = start(0, answers=False, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "ask_"))
    if is_stopped:
        stop(process)
    (found,) = Stacks("n0")(ATTEMPT, {0: said(process)}, 4.0, states_only=False)
    assert os.read(listening, 8) == b"1\n"
    os.close(listening)
    assert "wait_for_the_others (rank.py" in found.text


def test_what_it_took_to_find_the_ranks_is_none_of_the_time_that_is_left(start: Start) -> None:
    process, clock = start(0, answers=False), ManualClock(now=1_000.0)

    class Slow(ProcessTable):
        @override
        def all(self) -> dict[int, Process]:
            clock.now = 1_005.0
            return super().all()

    ask = Stacks("n0", table=Slow(), clock=clock)
    (found,) = ask(ATTEMPT, {0: said(process)}, 4.0, states_only=False)
    assert found.state == "S"
    assert found.source in {"", "kernel"}, "for py-spy no time is left"


class Evil:
    @override
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/deeplink-evil",)


@pytest.mark.parametrize("dump", [pickled({"entries": [Evil()]}), b"", b"not a pickle", pickled([1])])
def test_a_dump_that_is_none_does_nothing(tmp_path: Path, dump: bytes) -> None:
    (tmp_path / "dump").write_bytes(dump)
    assert not newest_collectives(tmp_path / "dump", since_unix=0.0)
    assert not newest_collectives(tmp_path / "none", since_unix=0.0)
    assert not Path("/tmp/deeplink-evil").exists()


def test_what_is_no_mask_catches_nothing() -> None:
    assert not catches([], 5)
    assert not catches(["SigCgt:\t0000000000000010"], 4)
    assert catches(["SigCgt:\t0000000000000010"], 5)
