"""`deeplink.report` and `deeplink.section`: the training loop reports its progress, in microseconds.

It does so whether or not the agent answers. A rank's own work of a step is timed (`timing.py`): from the end of
`deeplink.report` to the end of the forward pass, for in the backward pass ranks wait for the slowest one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from deeplink.core import process_metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, FencedError
from deeplink.rpc.plain import PlainCallError, PlainConnection
from deeplink.scheduler.node.rank_processes import ASKING, answer_file, catches
from deeplink.training import step_split
from deeplink.v1 import common_pb2, node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

log = logging.getLogger(__name__)

SEND_EVERY_S = 0.3
"""Reports are sent no more often; the newest wins. 0.5 ms of this process's time each; launchers look twice a
second.
"""
CALL_TIMEOUT_S = 2.0
RETRY_AFTER_S = 1.0
FLUSH_S = 1.0
"""How long the end of the process may wait for the last report to leave."""
MOST_METRICS = 96
SETUP = "setup"
"""The section of a rank until its first step, unless it says otherwise."""
_METHOD = "/deeplink.v1.Node/Report"
LONGEST_NAME = 64
_kept: dict[int, IO[bytes]] = {}  # faulthandler writes to its descriptor for as long as the process lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The agent that reports go to, and the rank that sends them."""

    agent: str  # `host:port` of this node's
    token_file: Path
    attempt: Attempt
    rank: int


def destination(env: Mapping[str, str]) -> Destination | None:
    """Return where the environment says reports go; None outside of a job."""
    if not env.get("DEEPLINK_AGENT") or not env.get("DEEPLINK_TOKEN_FILE"):
        return None
    return Destination(
        agent=env["DEEPLINK_AGENT"],
        token_file=Path(env["DEEPLINK_TOKEN_FILE"]),
        attempt=Attempt.parse(env.get("DEEPLINK_ATTEMPT") or "0.0.0"),
        rank=int(env.get("RANK") or env.get("SLURM_PROCID") or 0),
    )


class _Report(NamedTuple):
    step: int
    unix: float
    metrics: Mapping[str, float]
    section: str = ""
    work_s: float = 0.0


@dataclass(slots=True)
class Reporter:
    """Sends the newest report to the agent from a thread of its own, which the first report starts.

    `tell` never waits and never fails but for a fence. A report that finds its predecessor unsent replaces it.
    """

    to: Destination
    clock: Clock = field(default_factory=SystemClock)
    work_s: float = 0.0
    _waiting: tuple[int, float, Mapping[str, float], str, float] | None = None  # of a `_Report`
    _step: int | None = None
    _counted: int | None = None  # the step that was reported for a loop that reports none
    _metrics: Mapping[str, float] = field(default_factory=dict)
    _sections: list[Section] = field(default_factory=list)
    _fenced_by: Attempt | None = None
    _save_at: int = 0
    _saved_at: int = 0
    _sending: bool = False
    _hungry: bool = True
    _closing: bool = False
    _thread: threading.Thread | None = None
    _odd: set[str] = field(default_factory=set)
    _silent: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a signal's handler may report, too
    _changed: threading.Condition = field(init=False)
    _now: Callable[[], float] = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)
        self._now = time.time if isinstance(self.clock, SystemClock) else self.clock.unix  # a call less

    # A step of training has thrown this code out of the processor's caches: what a report costs is how much of it
    # there is. Hence no more objects and calls than it takes.

    def tell(self, step: int, metrics: Mapping[str, object]) -> None:
        """Hand over a report; microseconds. The metrics must not be changed afterwards."""
        if self._fenced_by is not None:
            raise FencedError(self.to.attempt, self._fenced_by, f"job {self.to.attempt.job}")
        for value in metrics.values():
            if type(value) is not float:
                metrics = self._numbers(metrics)
                break
        with self._lock:
            self._step, self._metrics = int(step), metrics  # type: ignore[assignment] # all floats by now
            self._hand_over()

    def takes_count(self, step: int) -> bool:
        """Tell whether to report a step for the loop: not once it has reported one itself."""
        with self._lock:
            if self._step != self._counted:
                return False
            self._counted = step
            return True

    def enter(self, section: Section) -> None:
        """Hand over that a section begins; microseconds."""
        with self._lock:
            self._sections.append(section)
            self._hand_over()

    def leave(self, section: Section) -> None:
        """Hand over that a section ends, wherever it stands among those entered since."""
        with self._lock:
            if self._sections and self._sections[-1] is section:
                self._sections.pop()
            else:
                self._sections = [one for one in self._sections if one is not section]
            self._hand_over()

    @property
    def innermost(self) -> str:
        """The section that counts; empty outside of any."""
        sections = self._sections
        return sections[-1].name if sections else ""

    def _hand_over(self) -> None:
        # A rank that has reported no step is still being set up, whatever sections it has left.
        outside = SETUP if self._step is None else ""
        section = self.innermost or outside
        self._waiting = (self._step or 0, self._now(), self._metrics, section, self.work_s)
        if self._hungry:  # a sender at rest is not woken a hundred times a second: that cost more than the report
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="deeplink-report", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def is_save_due(self, step: int) -> bool:
        """Tell whether a checkpoint is wanted at this step; true once for each wish."""
        wanted = self._save_at
        if not wanted or wanted == self._saved_at or step < wanted:
            return False
        self._saved_at = wanted
        return True

    def _numbers(self, metrics: Mapping[str, object]) -> dict[str, float]:
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)  # type: ignore[arg-type] # whatever knows how to be a number: tensors too
            except (TypeError, ValueError, RuntimeError) as problem:
                if name not in self._odd:
                    self._odd.add(name)
                    log.warning("metric %r is not reported: %s", name, problem)
        return numbers

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Send what waits, without the pause between reports; tell whether it left in time. Ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                return self._waiting is None
            return self._changed.wait_for(lambda: self._waiting is None and not self._sending, timeout_s)

    def _run(self) -> None:
        channel: PlainConnection | None = None
        while (said := self._next()) is not None:
            try:
                if channel is None:
                    token = self.to.token_file.read_text(encoding="ascii").strip()
                    channel = PlainConnection(self.to.agent, token, self.clock)
                self._take(channel.call(_METHOD, self._message(said), self.clock.monotonic() + CALL_TIMEOUT_S))
                pause = SEND_EVERY_S
            except (PlainCallError, OSError, ValueError) as problem:  # the last: no message takes such a step
                stale = channel is not None and channel.is_used and isinstance(problem, PlainCallError)
                if channel is not None:
                    channel.close()
                channel = None
                if stale:  # the agent may have been started again since: this report is worth another connection
                    pause = 0.0
                    self._put_back(said)
                else:
                    pause = RETRY_AFTER_S
                    self._complain(problem)
            self._rest(pause)
        if channel is not None:
            channel.close()

    def _next(self) -> _Report | None:
        """Wait for a report and take it; None when there will be no more."""
        with self._changed:
            while self._waiting is None and not self._closing:
                self._hungry = True
                self._changed.wait()
            self._hungry = False
            said, self._waiting = self._waiting, None
            self._sending = said is not None
            return said and _Report(*said)

    def _put_back(self, said: _Report) -> None:
        with self._changed:
            self._waiting = self._waiting or said

    def _rest(self, pause_s: float) -> None:
        with self._changed:
            self._sending = False
            self._changed.notify_all()
            if not self._closing and pause_s:
                self._changed.wait(pause_s)

    def _message(self, said: _Report) -> bytes:
        attempt = self.to.attempt
        progress = common_pb2.Progress(
            rank=self.to.rank,
            attempt=common_pb2.Attempt(job=attempt.job, restart=attempt.restart, relaunch=attempt.relaunch),
            step=said.step,
            unix=said.unix,
            metrics=self._with_vitals(said.metrics),
            pid=os.getpid(),
            section=said.section,
            work_s=said.work_s,
        )
        return node_pb2.ReportRequest(progress=progress).SerializeToString()

    @staticmethod
    def _with_vitals(metrics: Mapping[str, float]) -> dict[str, float]:
        # Here, in the sender's thread: the training loop does not pay for it. The agent takes no more in all.
        ours = process_metrics.of_process.numbers()
        return {**ours, **metrics} if len(ours) + len(metrics) <= MOST_METRICS else dict(metrics)

    def _take(self, reply: bytes) -> None:
        answer = node_pb2.ReportReply.FromString(reply)
        self._save_at = answer.save_at or self._save_at
        if answer.fenced:
            newest = answer.newest
            self._fenced_by = Attempt(job=newest.job, restart=newest.restart, relaunch=newest.relaunch)
            log.error("fenced: attempt %s has begun, this is %s", self._fenced_by, self.to.attempt)
        if self._silent:
            self._silent = False
            log.warning("agent %s answers again", self.to.agent)

    def _complain(self, problem: Exception) -> None:
        if not self._silent:  # once per silence, not once per report
            self._silent = True
            log.warning("progress cannot be reported, training goes on: %s", problem)


class Section:
    """A section to be entered, as a context manager."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        ours = reporter()
        if ours is not None:
            ours.enter(self)
            step_split.of_process.section(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ours = reporter()
        if ours is not None:
            ours.leave(self)
            step_split.of_process.section(ours.innermost)


class _Process:
    """The one reporter of this process, made at the first report; a forked child starts without one."""

    def __init__(self) -> None:
        self.made = False
        self.reporter: Reporter | None = None
        self.step_ended: Callable[[], float] | None = None  # seconds of own work in a step; 0 where unknown
        self.has_looked = False  # for a model to time, and DataLoaders

    def forget(self) -> None:
        self.made, self.reporter = False, None

    def get(self) -> Reporter | None:
        if not self.made:
            self.made = True
            try:
                to = destination(os.environ)
            except (DeepLinkError, ValueError) as problem:
                log.warning("progress is not reported: %s", problem)
            else:
                if to is not None:
                    self.reporter = Reporter(to)
                    process_metrics.of_process.count_in(step_split.of_process)
                    step_split.time_loaders(step_split.of_process)
                    answer_in(to.token_file.parent)
        return self.reporter

    def look_for_model(self) -> None:
        self.has_looked = True
        step_split.time_loaders(step_split.of_process)
        if self.step_ended is None and "torch" in sys.modules:
            from deeplink.training.timing import time_ddp  # noqa: PLC0415 - it imports this module

            time_ddp()

    def flush(self) -> None:
        if self.reporter is not None and not self.reporter.flush():
            log.warning("the last report did not reach the agent within %g s", FLUSH_S)


_process = _Process()


def reporter() -> Reporter | None:
    """Return this process's reporter; None outside of a job."""
    return _process.reporter if _process.made else _process.get()


os.register_at_fork(after_in_child=_process.forget)
atexit.register(_process.flush)


def report(*, step: int, work_s: float | None = None, **metrics: float) -> None:
    """Tell this node's agent how far training is, and numbers worth a curve; microseconds, never waits.

    Call it after each step. The newest report is sent a few times a second from a thread; those in between are
    dropped. Outside of a job, or when the agent cannot be reached, nothing happens but one warning in the log.
    A metric is what `float()` takes; that fetches a GPU tensor from the GPU and waits for it: hand over numbers.

    Args:
        step: number of optimizer steps done since training began, across restarts.
        work_s: seconds of this rank's own work in this step, waiting for other ranks left out, where the loop
            measures it itself. A model in torch's DistributedDataParallel is timed without, from the first report
            on, and any that `deeplink.timed` was given. A rank much slower than the others is told.
        metrics: loss, learning rate, samples ...

    Raises:
        FencedError: a newer attempt of this job has begun; let it end this process.
    """
    ours = _process.reporter if _process.made else _process.get()
    if ours is None:
        return
    if not _process.has_looked:
        _process.look_for_model()
    if _process.step_ended is not None:  # always: it tells what the step's parts are, too
        ours.work_s = _process.step_ended()
    if work_s is not None:
        ours.work_s = float(work_s)
    step_split.of_process.step_ended(step)
    ours.tell(step, metrics)


def count_step(step: int) -> None:
    """Report a step for a loop that calls no `report` itself.

    Raises:
        FencedError: as `report`.
    """
    ours = reporter()
    if ours is not None and ours.takes_count(step):
        report(step=step)


def measure_with(step_ended: Callable[[], float] | None) -> None:
    """Ask at each report how long the rank's own work in a step took; None: no more."""
    _process.step_ended = step_ended


def should_save(*, step: int) -> bool:
    """Tell whether a checkpoint is wanted now, besides those the loop saves anyway; microseconds, never waits.

    True once, at the same step on every rank, when the job is about to lose its nodes: its time limit comes. The
    loop must `report` its steps to be told. `Checkpoints.over` and the callbacks do both by themselves.

    Args:
        step: as of `report`.
    """
    reporter = _process.get()
    return reporter is not None and reporter.is_save_due(step)


def section(name: str) -> Section:
    """Return a context manager for what takes another time than a step: `with deeplink.section("evaluation"):`.

    How long each section may take without news is learned apart. Outside of any it is training steps, and before
    the first of these "setup". Of nested ones the innermost counts; an error leaves it. Microseconds, never waits,
    nothing outside of a job. `deeplink.Checkpoints` enters "checkpoint" by itself.

    Args:
        name: setup, evaluation, checkpoint, or a word of your own.

    Raises:
        ValueError: the name is empty, or has over 64 characters.
    """
    if not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"a section's name has 1 to {LONGEST_NAME} characters")
    return Section(name)


def answer_in(folder: Path) -> bool:
    """Write the stack of each thread to a file of this folder when the node's agent sends a signal.

    faulthandler does that without the interpreter, also for a rank whose main thread waits in C and holds the GIL.
    Return False where that cannot be, or the process has a handler for the signal.
    """
    pid = os.getpid()
    if pid in _kept:
        return True
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if not _kept and catches(status.splitlines(), ASKING):  # a forked child answers in a file of its own
            return False
        file = answer_file(folder, pid).open("ab", buffering=0)
        faulthandler.register(ASKING, file=file, all_threads=True, chain=False)
        _kept[pid] = file
        return True
    return False
