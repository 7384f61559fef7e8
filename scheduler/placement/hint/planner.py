"""Keeps the hints of one user's waiting jobs fresh: the loop, its lock, and its start behind a submission."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.descriptors import LockHeldError, opened, try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.cluster_survey import Row, read_queue
from deeplink.scheduler.placement.hint.decision import Decision, HintKind, Recorded
from deeplink.scheduler.placement.hint.reconcile import Deed, HintChange, Memory, Mine, SurveyedCluster, plan
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.client import Slurm

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
SOON_S = 3.0
"""After nodes were named: Slurm's main scheduler has come by then (measured: within 2.6 s with its defaults)."""
SLOW_S = 60.0
"""While nothing waits."""
LONGEST_AWAY_S = 120.0
LEAST_S = 1.0
"""From one round to the next, however many jobs are submitted: each asks Slurm for its whole queue."""
_SLICE_S = 0.5
"""How often a planner that waits looks whether it is to end, or a job was submitted (a stat of a folder)."""
_SETTLED_S = 0.2
"""A job's folder is there before its record is."""
MOST_LOG = 1 << 20
"""A longer log is begun again; what was decided is on the jobs' own records."""
VARIABLE = "DEEPLINK_PLAN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round came to."""

    moves: tuple[HintChange, ...] = ()  # about jobs that wait
    problems: Mapping[int, str] = field(default_factory=dict)  # changes that Slurm refused, by job


@dataclass(slots=True, kw_only=True)
class Planner:
    """Looks after the waiting jobs of one user. One thread only."""

    slurm: Slurm
    user: str
    state: Path
    survey: Callable[[Sequence[Mine]], SurveyedCluster]
    clock: Clock
    say: Callable[[str], None]
    act: bool = True
    only: int | None = None  # this job alone
    interval_s: float = INTERVAL_S
    wished: Callable[[int, tuple[str, ...], Sequence[NodeName]], None] = lambda _job, _data, _nodes: None
    _memories: dict[str, Memory] = field(default_factory=dict)
    _failures: int = 0
    _idle_rounds: int = 0

    def look(self) -> Round:
        """Go round once: a question for the queue and one for the nodes, changes, and the record of them."""
        queue = read_queue(self.slurm.run)
        waiting = [job for row in queue if row.waits and (job := self._mine(row))]
        if not waiting:
            self._memories.clear()
            return Round()
        moves = plan(waiting, queue, self.survey(waiting), self.clock.unix())
        self._memories = {move.job.row.label: move.memory for move in moves}
        problems = {int(move.job.row.id): problem for move in moves if (problem := self._carry_out(move))}
        return Round(moves=tuple(moves), problems=problems)

    def tick(self) -> float:
        """Go round once, whatever Slurm does; return how long to wait before the next."""
        try:
            done = self.look()
        except DeepLinkError as problem:
            self._failures += 1
            wait = min(self.interval_s * (1 << min(self._failures, 10)), LONGEST_AWAY_S)
            if self._failures == 1:
                self.say(f"nothing is changed for now: {problem}")
            log.info("round failed (%d in a row), next in %.0f s: %s", self._failures, wait, problem)
            return wait
        if self._failures:
            self.say(f"Slurm answers again, after {self._failures} rounds without")
            self._failures = 0
        self._idle_rounds = 0 if done.moves else self._idle_rounds + 1
        if any(move.decision.names_nodes for move in done.moves):
            return min(SOON_S, self.interval_s)
        return self.interval_s if done.moves else max(SLOW_S, self.interval_s)

    @property
    def idle(self) -> bool:
        """Whether the last two rounds found no job to look after."""
        return self._idle_rounds > 1

    @property
    def over(self) -> bool:
        """Whether the last round found none of the jobs waiting."""
        return self._idle_rounds > 0

    def needed(self) -> bool:
        """Whether a job of ours waits at this moment, as far as Slurm tells."""
        try:
            return any(row.waits and self._mine(row) for row in read_queue(self.slurm.run))
        except DeepLinkError:
            return False

    def _mine(self, row: Row) -> Mine | None:
        """Return a job of ours with what was decided for it; None for one that is not ours."""
        if row.user != self.user or (self.only is not None and str(self.only) not in (str(row.id), row.record_id)):
            return None
        try:
            known = record.read(record.job_folder(self.state, row.record_id))
        except OSError as problem:
            log.warning("the record of job %s cannot be read: %s", row.label, problem)
            return None
        if not known:
            return None
        last, memory = known[-1], self._memories.get(row.label, Memory())
        wish = last.decision
        if wish.names_nodes and not row.required:
            wish = replace(wish, kind=HintKind.NOTHING, nodes=())  # they were taken off it
            memory = replace(memory, named=True)
        return Mine(row=row, ask=last.ask, wish=wish, wished_at=last.unix, memory=memory)

    def _carry_out(self, move: HintChange) -> str:
        """Change the job and write it down; return why Slurm refused, if it did."""
        job, fields = move.job, move.fields
        what = f"job {job.row.label}: {_said(move)}"
        if not self.act:
            if _key(move.decision) != job.memory.told:
                self.say(what)
            return self._done(move)
        if not fields:
            # Also "as it is" is written down when that is so for another reason than before.
            if _key(move.decision) != (job.memory.told or _key(job.wish)):
                self._append(move, move.decision, ())
            if job.pinned and not job.memory.told:  # as it was submitted
                self._tell_wished(move)
            return self._done(move)
        changes = (f"{key}={value}" for key, value in fields.items())
        argv = ("scontrol", "update", f"jobid={job.row.address}", *changes)
        try:
            self.slurm.update_job(job.row.address, **fields)
        except command.CommandError as refused:
            memory = replace(job.memory, refusals=job.memory.refusals + 1)
            self._memories[job.row.label] = memory
            problem = refused.stderr.strip().splitlines()[-1] if refused.stderr.strip() else f"exit {refused.code}"
            if memory.refusals == 1:
                self.say(f"{what}: refused: {problem}")
                words = f"{move.decision.words}; Slurm refused the change: {problem}"
                self._append(move, replace(job.wish, words=words), argv)
            return problem
        self.say(what)
        self._append(move, move.decision, argv)
        if move.deed is Deed.PIN:
            self._tell_wished(move)
        return self._done(move)

    def _tell_wished(self, move: HintChange) -> None:
        if move.job.ask.data:
            self.wished(int(move.job.row.id), move.job.ask.data, move.decision.nodes)

    def _done(self, move: HintChange) -> str:
        self._memories[move.job.row.label] = replace(move.memory, told=_key(move.decision))
        return ""

    def _append(self, move: HintChange, decision: Decision, done: tuple[str, ...]) -> None:
        job = move.job
        line = Recorded(unix=self.clock.unix(), by="plan", ask=job.ask, decision=decision, done=done)
        try:
            record.append(record.job_folder(self.state, job.row.record_id), line)
        except OSError as problem:
            log.warning("what was decided for job %s cannot be written down: %s", job.row.label, problem)


def _key(decision: Decision) -> str:
    return f"{decision.why}|{decision.words}"


def _said(move: HintChange) -> str:
    verb = {Deed.PIN: "hint at", Deed.DROP: "no hint any more", Deed.LEAVE: "left as it is"}[move.deed]
    about = f" {move.fields['ReqNodeList']}" if move.deed is Deed.PIN else ""
    return f"{verb}{about}: {move.decision.words}"


def planner_file(state: Path, env: Mapping[str, str], kind: str) -> Path:
    """Return the `lock` or the `log` of this user's planner: one for each cluster, which SLURM_CONF names."""
    cluster = zlib.crc32(env.get("SLURM_CONF", "").encode(errors="surrogateescape"))
    return state / "plan" / f"{cluster:08x}.{kind}"


@contextlib.contextmanager
def alone(planner: Planner) -> Iterator[None]:
    """Be this user's only planner for this cluster; a killed one's place is free at once."""
    with holding(planner_file(planner.state, os.environ, "lock"), planner.clock.unix()):
        yield


@contextlib.contextmanager
def holding(path: Path, since_unix: float) -> Iterator[None]:
    """Hold a planner's lock, which tells who holds it and ends with its process."""
    try:
        private_folder(path.parent)
        opened = path.open("a+", encoding="utf-8")
    except OSError as problem:
        remedy = "The state folder (DEEPLINK_STATE) must be one that you can write."
        raise DeepLinkError(f"{path}: {problem.strerror or problem}", remedy=remedy) from problem
    with opened as lock:
        if not try_lock(lock.fileno()):
            remedy = "One is enough: it looks after all your jobs. `deeplink plan --dry-run` shows what it sees."
            raise LockHeldError(f"a planner runs already: {_holder(path)}", remedy=remedy)
        lock.truncate(0)
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since_unix": since_unix}))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def runs(path: Path) -> bool:
    """Whether a planner holds the lock at this moment."""
    try:
        with opened(path, os.O_RDWR) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # two that ask at once do not see each other
    except BlockingIOError:
        return True
    except OSError:  # no file, or storage without locks: then no planner holds one
        return False
    return False


def _holder(path: Path) -> str:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(said['pid'])} on {said['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it has not said which process it is"


def ensure_planner(state: Path, env: Mapping[str, str] | None = None) -> int | None:
    """Have a planner run for this user and cluster; call it after the job's record was written.

    It looks after all jobs of the user that wait, takes notice of new ones by itself, and ends a minute or two
    after the last one that needs it. Nothing is waited for here, and nothing here can fail a submission.
    """
    env = os.environ if env is None else env
    if env.get(VARIABLE, "").lower() in {"off", "0", "no", "false"} or runs(planner_file(state, env, "lock")):
        return None
    file = planner_file(state, env, "log")
    with contextlib.suppress(OSError):
        private_folder(file.parent)
        if file.exists() and file.stat().st_size > MOST_LOG:
            os.truncate(file, 0)
        more = ("--prefetch",) if env.get(VARIABLE) == "prefetch" else ()
        return command.detach(
            (sys.executable, "-P", "-m", "deeplink", "plan", "--until-idle", *more), file, env=env
        )
    return None


def live(planner: Planner, *, until_idle: bool) -> None:
    """Go round until a signal ends it, its one job waits no more, or no job has needed it for a minute."""
    stop = _Stop()
    if not planner.act:  # it changes nothing, and may run beside another one
        _rounds(planner, stop, until_idle=until_idle)
        return
    while True:
        try:
            with alone(planner):
                _rounds(planner, stop, until_idle=until_idle)
        except LockHeldError:
            if until_idle:
                return  # that one does what this one was started for
            raise
        # A job may have come between the last round and now, whose submission found us still there.
        if stop.told or not until_idle or not planner.needed():
            return


def _rounds(planner: Planner, stop: _Stop, *, until_idle: bool) -> None:
    while not stop.told:
        seen, began = _changed(planner.state / "jobs"), planner.clock.monotonic()
        pause = planner.tick()
        if planner.only is not None and planner.over:
            planner.say(f"job {planner.only} waits no more")
            return
        if until_idle and planner.idle:
            return
        stop.wait(pause, planner, seen, began + LEAST_S)


class _Stop:
    """Becomes true at SIGTERM or SIGINT."""

    def __init__(self) -> None:
        from deeplink.rpc.daemon import ending_signals  # noqa: PLC0415 - a submission needs none of it

        self.told = False
        for number in ending_signals():
            signal.signal(number, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True

    def wait(self, seconds: float, planner: Planner, seen: int, earliest: float) -> None:
        """Wait so long; less where it is time to end, or a job was submitted since the jobs were `seen` so."""
        jobs, clock = planner.state / "jobs", planner.clock
        until = clock.monotonic() + seconds
        while not self.told and _changed(jobs) == seen:
            left = until - clock.monotonic()
            if left <= 0:
                return
            clock.sleep(min(left, _SLICE_S))
        if not self.told:
            clock.sleep(max(_SETTLED_S, earliest - clock.monotonic()))


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
