"""Having a job started again by its owner's wish, by the watchdog's own ladder: asked for only while that is safe.

A requeue while an allocated node is unreachable waits for Slurm's own timeout, and with GRES it loses the job and
leaks GPUs (measured). So every node that Slurm has not given up must answer first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.job_address import ComponentError
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.view.reasons import in_words
from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.exclusion import required_without
from deeplink.scheduler.watch.observer import PROBE_DEADLINE_S, slurmd_port
from deeplink.scheduler.watch.records import ActionRecord
from deeplink.scheduler.watch.recovery_steps import ActionFacts, RecoveryStep, next_command
from deeplink.scheduler.watch.verdict import Remedy
from deeplink.types import Attempt, NodeName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.probe import Prober

PROBES = 3
TICK_S = 0.1
QUEUED_S = 2.0
"""A job that waits for so long after its hold was cleared, for a reason of the queue's, is left to the queue."""


class RequeueRefusedError(DeepLinkError):
    """The job cannot be started again now; nothing was done."""

    def __init__(self, label: str, problem: str, remedy: str) -> None:
        super().__init__(f"job {label} is not requeued: {problem}", remedy=remedy)
        self.label, self.problem = label, problem


class NodeUnreachableError(RequeueRefusedError):
    """An allocated node does not answer, and Slurm has not given it up."""

    def __init__(self, label: str, nodes: Sequence[str]) -> None:
        self.nodes = tuple(nodes)
        names = fold(nodes)
        super().__init__(
            label,
            f"{names} does not answer, and Slurm has not given it up: a requeue now would wait for Slurm's own "
            "timeout, and a job with GPUs would be lost",
            f"An operator (or `deeplink watch --act`) sets it down, then Slurm starts the job again by itself: "
            f"`scontrol update nodename={names} state=down reason=dead`. Otherwise wait for SlurmdTimeout, "
            "or cancel and submit anew.",
        )


class UnknownNodeError(DeepLinkError):
    """A name that is to be excluded is no node of the cluster."""

    exit_code = 2

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"no node of this cluster: {', '.join(names)}", remedy="`sinfo -N` lists them.")
        self.names = tuple(names)


class RequeueUnfinishedError(DeepLinkError):
    """The job was requeued, and the time was up before the rest was done."""

    def __init__(self, label: str, state: str, left: Sequence[str], waited_s: float) -> None:
        commands = "; ".join(left)
        super().__init__(
            f"job {label} was requeued and is still {state} after {waited_s:g} s",
            remedy=f"Once it is PENDING: {commands}" if left else f"`deeplink status {label}` tells more.",
        )
        self.label, self.state, self.left = label, state, tuple(left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """How it ended.

    Attributes:
        running: whether the job runs again; else it waits in the queue.
        nodes: where it runs.
        reason: why it waits, in words.
        took_s: from the first command on.
    """

    running: bool
    nodes: tuple[NodeName, ...]
    reason: str
    took_s: float


@dataclass(slots=True, kw_only=True)
class Requeuer:
    """Requeues one job. Not by shared answers: each step follows from what is true now.

    Args:
        say: told each command and each end.
        wait_s: how long to wait for Slurm, once the job is requeued.
    """

    slurm: Slurm
    prober: Prober
    clock: Clock
    say: Callable[[str], None]
    wait_s: float = 30.0
    _sent: dict[RecoveryStep, float] = field(default_factory=dict)

    def check(self, row: JobRow, exclude: Sequence[NodeName]) -> None:
        """Return if the job may be requeued now.

        Raises:
            RequeueRefusedError: it may not.
            ComponentError: it is a component of a heterogeneous job.
            UnknownNodeError: a node to exclude does not exist.
        """
        if row.state.final:
            raise RequeueRefusedError(row.label, f"it has ended ({row.state.value})", "Submit it again.")
        if row.address.is_component:
            raise ComponentError(row.address, "requeue")
        if not row.requeueable:
            remedy = f"`scontrol update jobid={row.label} requeue=1` allows it; `deeplink sbatch` asks for it."
            raise RequeueRefusedError(row.label, "it may not be (--no-requeue)", remedy)
        known = {node.name for node in self.slurm.nodes()} if exclude else set()
        if strangers := [name for name in exclude if name not in known]:
            raise UnknownNodeError(strangers)
        if row.state is JobState.PENDING:
            return
        if away := self.unreachable(row):
            raise NodeUnreachableError(row.label, away)

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
        changes = self._release(row, exclude)
        fields = [f"{key}={value}" for key, value in changes.items()]
        release = ["scontrol", "update", f"jobid={row.address}", *fields]
        first = [] if row.state is JobState.PENDING else [["scontrol", "requeue", str(row.address)]]
        return [*first, release]

    def _release(self, row: JobRow, exclude: Sequence[NodeName]) -> dict[str, str]:
        """Return the changes that let a requeued job start, on other nodes than those to exclude."""
        if not exclude:
            return {"StartTime": "now"}
        place = self.slurm.place(row.id)
        wanted = {*place.excluded, *exclude}
        changes = {"ExcNodeList": fold(wanted)} if wanted > {*place.excluded} else {}
        # Nodes that were wished for it bind it still: it starts nowhere if it must run where it must not run.
        required = required_without(replace(place, nodes=max(place.nodes, len(row.nodes))), {*exclude})
        if required is not None:
            changes["ReqNodeList"] = fold(required) if required else ""
        return {**changes, "StartTime": "now"}

    def requeue(self, row: JobRow, exclude: Sequence[NodeName]) -> Requeued:
        """Requeue the job, wait until it is PENDING, exclude nodes, clear the hold, and see what becomes of it.

        Raises:
            RequeueRefusedError: a node fell silent, or Slurm refused.
            RequeueUnfinishedError: it takes too long.
        """
        began = self.clock.monotonic()
        action = ActionRecord(
            key=f"requeue-{row.id}",
            incident="",
            remedy=Remedy.RESTART,
            attempt=Attempt(row.id, row.restarts, 0),
            node=None,
            exclude=tuple(exclude),
            began_unix=self.clock.unix(),
        )
        now = row
        while self.clock.monotonic() - began < self.wait_s:
            try:
                now = self.slurm.job(row.address)
            except JobVanishedError:
                raise RequeueRefusedError(
                    row.label, "Slurm does not know it any more", "Submit it again."
                ) from None
            step = next_command(action, self._facts(now, row.restarts))
            if done := self._done(now, row, step.step, self.clock.monotonic() - began):
                return done
            if step.step is RecoveryStep.GIVE_UP or now.state.final:
                raise RequeueRefusedError(row.label, step.why, "Nothing more was done.")
            if step.step in {RecoveryStep.REQUEUE, RecoveryStep.RELEASE}:
                self._send(step.step, row, exclude)
            else:
                self.clock.sleep(TICK_S)
        left = [] if RecoveryStep.RELEASE in self._sent else [" ".join(self.commands(now, exclude)[-1])]
        raise RequeueUnfinishedError(row.label, now.state.value, left, self.wait_s)

    def _facts(self, now: JobRow, restarts: int) -> ActionFacts:
        facts = ActionFacts(job=now, sent={step: self.clock.monotonic() - at for step, at in self._sent.items()})
        # Also before one that shows no effect is sent again.
        ready = (
            now.state is JobState.RUNNING and now.restarts == restarts and not facts.lately(RecoveryStep.REQUEUE)
        )
        if ready and (away := self.unreachable(now)):
            raise NodeUnreachableError(now.label, away)
        return facts

    def _done(self, now: JobRow, before: JobRow, step: RecoveryStep, took_s: float) -> Requeued | None:
        released = self._sent.get(RecoveryStep.RELEASE)
        if step is RecoveryStep.DONE and now.restarts > before.restarts and not now.state.final:
            return Requeued(running=True, nodes=now.nodes, reason="", took_s=took_s)
        if now.state is JobState.RUNNING and before.state is JobState.PENDING and released is not None:
            return Requeued(running=True, nodes=now.nodes, reason="", took_s=took_s)
        if now.state is not JobState.PENDING or released is None:
            return None
        waited = self.clock.monotonic() - released
        if step in {RecoveryStep.RELAX, RecoveryStep.DONE} or (
            waited >= QUEUED_S and now.reason not in {"", "BeginTime"}
        ):
            return Requeued(running=False, nodes=(), reason=in_words(now.reason), took_s=took_s)
        return None

    def _send(self, step: RecoveryStep, row: JobRow, exclude: Sequence[NodeName]) -> None:
        if step is RecoveryStep.REQUEUE:
            self.say(f"scontrol requeue {row.address}")
            self.slurm.requeue(row.address)
        else:
            fields = self._release(row, exclude)
            said = " ".join(f"{key}={value}" for key, value in fields.items())
            self.say(f"scontrol update jobid={row.address} {said}")
            self.slurm.update_job(row.address, **fields)
        self._sent[step] = self.clock.monotonic()
