"""The planner's loop: a question for the queue and one for the nodes, changes, and the record of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.planner.cluster_state import PlannerCluster, wishes_nodes
from deeplink.scheduler.planner.queue import Row, arguments, parse_queue
from deeplink.scheduler.planner.reconcile import Deed, HintChange, Memory, Mine, plan
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.separator import fresh_separator
from deeplink.scheduler.wish import record
from deeplink.scheduler.wish.decision import Decision, HintKind, Recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
SOON_S = 3.0
"""After a wish for nodes: Slurm's main scheduler has come by then (measured: within 2.6 s with its defaults)."""
SLOW_S = 60.0
"""While nothing waits."""
LONGEST_AWAY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round came to.

    Attributes:
        moves: about jobs that wait.
        problems: changes that Slurm refused, by job.
    """

    moves: tuple[HintChange, ...] = ()
    problems: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Planner:
    """Looks after the waiting jobs of one user. One thread only.

    Args:
        slurm: Slurm's commands.
        user: whose jobs.
        state: the folder with the jobs' records.
        ground: surveys the cluster for jobs; asked in rounds only in which one of ours waits.
        clock: where time comes from.
        say: told one line for each change.
        act: whether to change jobs, or only to say what would be changed.
        only: the one job to look after; None for all.
        interval_s: between two rounds while jobs wait.
        wished: told of nodes that were wished for a job with data.
    """

    slurm: Slurm
    user: str
    state: Path
    ground: Callable[[Sequence[Mine]], PlannerCluster]
    clock: Clock
    say: Callable[[str], None]
    act: bool = True
    only: int | None = None
    interval_s: float = INTERVAL_S
    wished: Callable[[int, tuple[str, ...], Sequence[NodeName]], None] = lambda _job, _data, _nodes: None
    _memories: dict[str, Memory] = field(default_factory=dict)
    _failures: int = 0
    _idle_rounds: int = 0
    _over: bool = False

    def look(self) -> Round:
        """Go round once.

        Raises:
            CommandError, CommandTimeoutError, CommandMissingError: Slurm does not answer.
            SlurmTextError, SurveyTextError, UnknownStateError: what it said cannot be read.
        """
        queue = read_queue(self.slurm.run)
        waiting = [job for row in queue if row.waits and (job := self._mine(row))]
        if not waiting:
            self._memories.clear()
            return Round()
        moves = plan(waiting, queue, self.ground(waiting), self.clock.unix())
        self._memories = {move.job.row.label: move.memory for move in moves}
        problems: dict[int, str] = {}
        for move in moves:
            problem = self._carry_out(move)
            if problem:
                problems[move.job.row.id] = problem
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
        return self._pause_after(done)

    @property
    def idle(self) -> bool:
        """Whether the last two rounds found no job to look after."""
        return self._idle_rounds > 1

    @property
    def over(self) -> bool:
        """Whether the last round found none of the jobs waiting."""
        return self._over

    def needed(self) -> bool:
        """Whether a job of ours waits at this moment, as far as Slurm tells."""
        try:
            return any(row.waits and self._mine(row) for row in read_queue(self.slurm.run))
        except DeepLinkError:
            return False

    def _pause_after(self, done: Round) -> float:
        self._over = not done.moves
        self._idle_rounds = 0 if done.moves else self._idle_rounds + 1
        if any(wishes_nodes(move.decision) for move in done.moves):
            return min(SOON_S, self.interval_s)
        return self.interval_s if done.moves else max(SLOW_S, self.interval_s)

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
        if wishes_nodes(wish) and not row.required:
            wish = replace(wish, kind=HintKind.NOTHING, nodes=())  # somebody took it back
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
            self._note(move)
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

    def _note(self, move: HintChange) -> None:
        """Write down that a wish stays as it is, when that is so for another reason than before."""
        before = move.job.memory.told or _key(move.job.wish)
        if _key(move.decision) != before:
            self._append(move, move.decision, ())

    def _append(self, move: HintChange, decision: Decision, done: tuple[str, ...]) -> None:
        job = move.job
        line = Recorded(unix=self.clock.unix(), by="plan", ask=job.ask, decision=decision, done=done)
        try:
            record.append(record.job_folder(self.state, job.row.record_id), line)
        except OSError as problem:
            log.warning("what was decided for job %s cannot be written down: %s", job.row.label, problem)


def read_queue(run: command.Runner, *options: str) -> list[Row]:
    """Return all jobs that have not ended, of all users, in one question; with options of squeue fewer.

    Raises:
        SlurmTextError, UnknownStateError: it cannot be read.
        CommandError, CommandMissingError, CommandTimeoutError: see `command.run`.
    """
    separator = fresh_separator()
    return parse_queue(run(arguments(separator, *options)), separator)


def _key(decision: Decision) -> str:
    return f"{decision.why}|{decision.words}"


def _said(move: HintChange) -> str:
    verb = {Deed.PIN: "wish for", Deed.DROP: "no wish any more", Deed.LEAVE: "left as it is"}[move.deed]
    about = f" {move.fields['ReqNodeList']}" if move.deed is Deed.PIN else ""
    return f"{verb}{about}: {move.decision.words}"
