"""Having a job started again by its owner's wish, by the watchdog's own ladder: asked for only while that is safe.

A requeue while an allocated node is unreachable waits for Slurm's own timeout, and with GRES it loses the job and
leaks GPUs (measured). So every node that Slurm has not given up must answer first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.picture import in_words
from deeplink.scheduler.liveness.probe import PROBE_DEADLINE_S, slurmd_port
from deeplink.scheduler.recovery.evidence import ProbeResult, Remedy
from deeplink.scheduler.recovery.records import ActionRecord
from deeplink.scheduler.recovery.recovery_steps import (
    ActionFacts,
    RecoveryStep,
    next_command,
    release_changes,
    required_without,
)
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.liveness.probe import Prober
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow

PROBES = 3
TICK_S = 0.1
QUEUED_S = 2.0
"""A job that waits for so long after its hold was cleared, for a reason of the queue's, is left to the queue."""


class RequeueError(DeepLinkError):
    """A job cannot be started again now, or was not within its time."""

    def __init__(self, problem: str, remedy: str, *, begun: bool = False, exit_code: int = 1) -> None:
        super().__init__(problem, remedy=remedy, exit_code=exit_code)
        self.begun = begun


def _refused(label: str, problem: str, remedy: str) -> RequeueError:
    return RequeueError(f"job {label} is not requeued: {problem}", remedy)


def _unreachable(label: str, nodes: Sequence[NodeName]) -> RequeueError:
    names = fold(nodes)
    return _refused(
        label,
        f"{names} does not answer, and Slurm has not given it up: a requeue now would wait for Slurm's own "
        "timeout, and a job with GPUs would be lost",
        f"An operator (or `deeplink watch --act`) sets it down, then Slurm starts the job again by itself: "
        f"`scontrol update nodename={names} state=down reason=dead`. Otherwise wait for SlurmdTimeout, "
        "or cancel and submit anew.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """How it ended."""

    running: bool  # whether the job runs again; else it waits in the queue
    nodes: tuple[NodeName, ...]  # where it runs
    reason: str  # why it waits, in words
    took_s: float  # from the first command on


@dataclass(slots=True, kw_only=True)
class Requeuer:
    """Requeues one job. Not by shared answers: each step follows from what is true now."""

    slurm: Slurm
    prober: Prober
    clock: Clock
    say: Callable[[str], None]
    wait_s: float = 30.0
    _sent: dict[RecoveryStep, float] = field(default_factory=dict)

    def check(self, row: JobRow, exclude: Sequence[NodeName]) -> None:
        """Return if the job may be requeued now."""
        if row.state.final:
            raise _refused(row.label, f"it has ended ({row.state.value})", "Submit it again.")
        row.address.alone("requeue")
        if not row.requeueable:
            remedy = f"`scontrol update jobid={row.label} requeue=1` allows it; `deeplink sbatch` asks for it."
            raise _refused(row.label, "it may not be (--no-requeue)", remedy)
        known = {node.name for node in self.slurm.nodes()} if exclude else set()
        if strangers := [name for name in exclude if name not in known]:
            problem = f"no node of this cluster: {', '.join(strangers)}"
            raise RequeueError(problem, "`sinfo -N` lists them.", exit_code=2)
        if row.state is JobState.PENDING:
            return
        if away := self.unreachable(row):
            raise _unreachable(row.label, away)

    def unreachable(self, row: JobRow) -> tuple[NodeName, ...]:
        """Return the allocated nodes that do not answer several probes and that Slurm has not given up."""
        if not row.nodes:
            return ()
        up = {node.name: node for node in self.slurm.nodes(row.nodes) if not node.down}
        port = slurmd_port(self.slurm) if any(node.port is None for node in up.values()) else 0
        silent = dict(up)
        for _ in range(PROBES):
            targets = {name: (node.address, node.port or port) for name, node in silent.items()}
            answers = self.prober.probe(targets, PROBE_DEADLINE_S) if targets else {}
            silent = {name: up[name] for name, answer in answers.items() if answer is not ProbeResult.ANSWERS}
        return tuple(name for name in up if name in silent or not up[name].responding)

    def commands(self, row: JobRow, exclude: Sequence[NodeName]) -> list[list[str]]:
        """Return the commands that will be executed, as far as can be said beforehand."""
        changes: dict[str, str] = {}
        if exclude:
            place = self.slurm.place(row.id)
            required = required_without(replace(place, nodes=max(place.nodes, len(row.nodes))), {*exclude})
            changes = release_changes(place, {*place.excluded, *exclude}, required)
        fields = [f"{key}={value}" for key, value in {**changes, "StartTime": "now"}.items()]
        release = ["scontrol", "update", f"jobid={row.address}", *fields]
        first = [] if row.state is JobState.PENDING else [["scontrol", "requeue", str(row.address)]]
        return [*first, release]

    def requeue(self, row: JobRow, exclude: Sequence[NodeName]) -> Requeued:
        """Requeue the job, wait until it is PENDING, exclude nodes, clear the hold, and see what becomes of it."""
        began, now = self.clock.monotonic(), row
        attempt = Attempt(row.id, row.restarts, 0)
        action = ActionRecord(
            key="", incident="", remedy=Remedy.RESTART, attempt=attempt, node=None, exclude=tuple(exclude)
        )
        while self.clock.monotonic() - began < self.wait_s:
            try:
                now = self.slurm.job(row.address)
            except JobVanishedError:
                raise _refused(row.label, "Slurm does not know it any more", "Submit it again.") from None
            next_ = next_command(action, self._facts(now, row.restarts))
            if done := self._done(now, row, next_.step, self.clock.monotonic() - began):
                return done
            if next_.step is RecoveryStep.GIVE_UP or now.state.final:
                raise _refused(row.label, next_.why, "Nothing more was done.")
            if next_.step in {RecoveryStep.REQUEUE, RecoveryStep.RELEASE}:
                self._send(next_.step, row, exclude)
            else:
                self.clock.sleep(TICK_S)
        remedy = f"`deeplink status {row.label}` tells more."
        if RecoveryStep.RELEASE not in self._sent:
            remedy = f"Once it is PENDING: {' '.join(self.commands(now, exclude)[-1])}"
        problem = f"job {row.label} was requeued and is still {now.state.value} after {self.wait_s:g} s"
        raise RequeueError(problem, remedy, begun=True)

    def _facts(self, now: JobRow, restarts: int) -> ActionFacts:
        facts = ActionFacts(job=now, sent={step: self.clock.monotonic() - at for step, at in self._sent.items()})
        # Also before one that shows no effect is sent again.
        ready = (
            now.state is JobState.RUNNING and now.restarts == restarts and not facts.lately(RecoveryStep.REQUEUE)
        )
        if ready and (away := self.unreachable(now)):
            raise _unreachable(now.label, away)
        return facts

    def _done(self, now: JobRow, before: JobRow, step: RecoveryStep, took_s: float) -> Requeued | None:
        released = self._sent.get(RecoveryStep.RELEASE)
        again = step is RecoveryStep.DONE and now.restarts > before.restarts and not now.state.final
        let_go = now.state is JobState.RUNNING and before.state is JobState.PENDING and released is not None
        if again or let_go:
            return Requeued(running=True, nodes=now.nodes, reason="", took_s=took_s)
        if now.state is not JobState.PENDING or released is None:
            return None
        queued = self.clock.monotonic() - released >= QUEUED_S and now.reason not in {"", "BeginTime"}
        if queued or step in {RecoveryStep.RELAX, RecoveryStep.DONE}:
            return Requeued(running=False, nodes=(), reason=in_words(now.reason), took_s=took_s)
        return None

    def _send(self, step: RecoveryStep, row: JobRow, exclude: Sequence[NodeName]) -> None:
        if step is RecoveryStep.REQUEUE:
            self.say(f"scontrol requeue {row.address}")
            self.slurm.requeue(row.address)
        else:
            release = self.commands(row, exclude)[-1]
            self.say(" ".join(release))
            self.slurm.run(release)
        self._sent[step] = self.clock.monotonic()
