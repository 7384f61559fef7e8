"""Where this node's ranks are: the state of each one's process, and the stack of each of its threads.

Three ways, the best first. py-spy reads the rank's memory from outside, also of one that is stopped or holds the
GIL. faulthandler, which the rank set up at its first report, answers a signal. The kernel says in which of its
functions each thread waits. None of them disturbs a rank that works.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core import plainpickle
from deeplink.core.clock import Clock, SystemClock, wait_until
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import printable_lines
from deeplink.scheduler.node.rank_processes import (
    ASKING,
    GONE,
    ProcessTable,
    RankProcess,
    Reported,
    answer_file,
    catches,
    rank_processes,
)
from deeplink.scheduler.slurm import command as processes
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.core.types import Attempt


NEWEST = 16  # collectives that are passed on
LARGEST = 64 << 20  # A dump of more bytes is left alone
_FILE, _PIPE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's own choice
_KEPT = (
    "pg_name",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "state",
    "input_sizes",
    "retired",
)
MOST_TEXT = 64 << 10  # characters
MOST_AT_ONCE = 8
PY_SPY_S = 4.0
LOOK_S = 5.0
"""How long finding the ranks may take: reading of a process whose memory is locked, as where a file system hangs
beneath it, does not end."""
MOST_LOOKS = 4  # looks that hang; then ranks are not looked for until one ends
ANSWER_S = 1.5  # how long a rank may take to write its stacks down once it is asked
DUMP_S, SPARE_S = 3.0, 0.5
"""How long a rank may take to dump torch's flight recorder once it is asked, and how long before the deadline that
is waited for no more: its stack is told all the same."""
POLL_S = 0.02
_STOPPED = "stopped (T): it was told to by a signal, and cannot answer"
_TRACED = "held by a debugger (t): it cannot answer"
_UNINTERRUPTIBLE = "in uninterruptible sleep (D): it waits for a device or a file system, and cannot answer"
WHY = {"T": _STOPPED, "t": _TRACED, "D": _UNINTERRUPTIBLE, "Z": "has ended, and nobody has asked how"}


def flight_file(environment: Mapping[str, str], rank: int) -> Path:
    """Return where a rank of this environment dumps."""
    return Path(f"{environment.get(_FILE) or _DEFAULT}{rank}")


def ask_for_dump(environment: Mapping[str, str], rank: int) -> bool:
    """Ask a rank for a dump, where it listens for that (TORCH_NCCL_DEBUG_INFO_PIPE_FILE); never waits."""
    prefix = environment.get(_PIPE)
    if not prefix:
        return False
    with contextlib.suppress(OSError):
        pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)
        return True
    return False


def newest_collectives(path: Path, *, since_unix: float) -> str:
    """Return the newest collectives of a dump, as JSON; empty where there is none since then, or it is damaged."""
    try:
        seen = path.stat()
        if seen.st_mtime < since_unix or seen.st_size > LARGEST or seen.st_uid != os.getuid():
            return ""
        dump = plainpickle.loaded(path.read_bytes(), {})
        entries = dump["entries"][-NEWEST:]
        return json.dumps([_kept(entry) for entry in entries], default=str)
    except Exception:  # noqa: BLE001 - a foreign pickle may raise anything
        return ""


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in _KEPT if name in entry}


def found_py_spy() -> str:
    """Return the path of py-spy, beside this Python or on PATH; empty where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""


@dataclass(slots=True)
class Stacks:
    """Answers where an attempt's ranks on this node are."""

    node: str
    py_spy: str = field(default_factory=found_py_spy)
    table: ProcessTable = field(default_factory=ProcessTable)
    clock: Clock = field(default_factory=SystemClock)
    _looks: list[threading.Thread] = field(default_factory=list)

    def __call__(
        self, attempt: Attempt, reported: Mapping[int, Reported], deadline_s: float, *, states_only: bool
    ) -> list[node_pb2.RankStack]:
        """Return a record for each rank of the attempt here, in their order, within the time given.

        None where even their processes cannot be looked at.
        """
        deadline = self.clock.monotonic() + deadline_s
        ranks = self._found(lambda: rank_processes(self.table, attempt, self.node, reported))
        records = {
            one.rank: node_pb2.RankStack(rank=one.rank, pid=one.pid, state=one.state, cpu_s=one.cpu_s)
            for one in ranks
        }
        if not states_only:
            self._fill(ranks, records, deadline)
        return list(records.values())

    def _found(self, look: Callable[[], list[RankProcess]]) -> list[RankProcess]:
        self._looks = [one for one in self._looks if one.is_alive()]
        if len(self._looks) >= MOST_LOOKS:
            return []
        found: list[list[RankProcess]] = []
        looking = threading.Thread(target=lambda: found.append(look()), name="deeplink-ranks", daemon=True)
        self._looks.append(looking)
        looking.start()
        looking.join(LOOK_S)
        return found[0] if found else []

    def _fill(self, ranks: list[RankProcess], records: Mapping[int, node_pb2.RankStack], deadline: float) -> None:
        pool = ThreadPoolExecutor(MOST_AT_ONCE, "deeplink-stacks")
        asked = {pool.submit(self._stack, one, deadline): one.rank for one in ranks}
        done, late = wait(asked, timeout=max(0.0, deadline - self.clock.monotonic()))
        for answer in late:
            records[asked[answer]].text = "it took too long to find out"
        for answer in done:
            source, text, flight = answer.result()
            record = records[asked[answer]]
            record.source, record.text, record.flight = source, printable_lines(text[:MOST_TEXT]), flight
        pool.shutdown(wait=False, cancel_futures=True)

    def _stack(self, one: RankProcess, deadline: float) -> tuple[str, str, str]:
        if one.state in GONE:
            return "", WHY.get(one.state, "there is no such process"), ""
        environment = self.table.environment(one.pid)
        asked_unix = self.clock.unix()
        dump = flight_file(environment, one.rank)
        is_asked = ask_for_dump(environment, one.rank)
        source, text = self._text(one, environment, deadline)
        if is_asked and one.state not in WHY:
            patience_s = min(deadline - SPARE_S - self.clock.monotonic(), DUMP_S)
            wait_until(
                lambda: bool(newest_collectives(dump, since_unix=asked_unix)), self.clock, patience_s, POLL_S
            )
        started = self.table.all().get(one.pid)
        flight = newest_collectives(dump, since_unix=started.started_unix) if started else ""
        why = WHY.get(one.state, "")
        return source, f"{why}\n{text}" if why else text, flight

    def _text(self, one: RankProcess, environment: Mapping[str, str], deadline: float) -> tuple[str, str]:
        reasons = []
        for source, way in (("py-spy", self._by_py_spy), ("faulthandler", self._by_faulthandler)):
            try:
                return source, way(one, environment, deadline)
            except (DeepLinkError, OSError) as problem:
                reasons.append(f"no {source}: {problem}")
        text = self._by_kernel(one)
        return ("kernel" if text else ""), "\n".join([*filter(None, [text]), *reasons])

    def _by_py_spy(self, one: RankProcess, _environment: Mapping[str, str], deadline: float) -> str:
        if not self.py_spy:
            raise DeepLinkError("it is not installed")
        # Nonblocking: it reads memory, and stops no process. A rank that hangs does not change what is read.
        argv = [self.py_spy, "dump", "--nonblocking", "--pid", str(one.pid)]
        left = min(PY_SPY_S, deadline - self.clock.monotonic())
        if left <= 0:
            raise DeepLinkError("no time is left")
        done = processes.finish(argv, timeout_s=left)
        if done.code or "Thread" not in done.stdout:
            lines = done.stderr.strip().splitlines()
            raise DeepLinkError(lines[0] if lines else f"it exited {done.code}")
        return done.stdout

    def _by_faulthandler(self, one: RankProcess, environment: Mapping[str, str], deadline: float) -> str:
        if one.state in WHY:
            raise DeepLinkError("it cannot answer a signal now")
        if not environment.get("DEEPLINK_TOKEN_FILE"):
            raise DeepLinkError("where it answers is not known")
        status = (self.table.proc / str(one.pid) / "status").read_text(encoding="utf-8", errors="replace")
        lines = status.splitlines()
        numbers = next((line.split() for line in lines if line.startswith("NSpid:")), ["", str(one.pid)])
        answer = answer_file(Path(environment["DEEPLINK_TOKEN_FILE"]).parent, int(numbers[-1]))
        # Who does not mind the signal would be ended by it.
        if not catches(lines, ASKING) or answer.stat().st_uid != os.getuid():
            raise DeepLinkError("it has not said that it would answer")
        os.truncate(answer, 0)
        handle = os.pidfd_open(one.pid)
        try:
            signal.pidfd_send_signal(handle, ASKING)
        finally:
            os.close(handle)
        sizes = [-1]

        def is_written() -> bool:
            sizes.append(answer.stat().st_size)
            return sizes[-1] > 0 and sizes[-1] == sizes[-2]

        wait_until(is_written, self.clock, min(deadline - self.clock.monotonic(), ANSWER_S), POLL_S)
        text = answer.read_text(encoding="utf-8", errors="replace")
        if not text:
            raise DeepLinkError(f"it did not answer within {ANSWER_S:g} s")
        return text

    def _by_kernel(self, one: RankProcess) -> str:
        lines = []
        tasks = self.table.proc / str(one.pid) / "task"
        with contextlib.suppress(OSError):
            for task in sorted(tasks.iterdir(), key=lambda path: int(path.name)):
                with contextlib.suppress(OSError, IndexError):
                    text = (task / "stat").read_text(encoding="utf-8", errors="replace")
                    name, _, rest = text.partition("(")[2].rpartition(")")
                    waits = (task / "wchan").read_text(encoding="utf-8").strip("0\n ")
                    stack = _or_empty(task / "stack")
                    where = f" in {waits}" if waits else ""
                    lines.append(f"thread {task.name} ({name}): {rest.split()[0]}{where}")
                    lines += [f"    {line}" for line in stack.splitlines()]
        return "\n".join(lines)


def _or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # root alone may read it
        return ""
