"""What is true about an action now: its job and node as Slurm tells them, who answers, what was sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.ladder import RELAX_S, Facts, Step
from deeplink.scheduler.watch.succession import token_of
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.watch.heirs import Heirs
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.records import ActionRecord
    from deeplink.scheduler.watch.release import Releaser
    from deeplink.types import NodeName

OF_JOBS = frozenset({Remedy.RESTART, Remedy.HOLD})
"""Remedies that change a job."""


def token(action: ActionRecord) -> str:
    """Return what a job that is submitted anew for an action carries."""
    return token_of(action.attempt, action.began_unix)


@dataclass(slots=True, kw_only=True)
class Footing:
    """Finds out what is true. One thread only.

    Args:
        say: told once why a job that agreed to it is not submitted anew.
    """

    slurm: Slurm
    journal: Journal
    observer: Observer
    clock: Clock
    say: Callable[[str], None]
    releaser: Releaser
    heirs: Heirs | None = None
    _waiting: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def forget(self, action: ActionRecord) -> None:
        """The action has ended."""
        self._waiting.pop(action.key, None)
        self._told.discard(action.key)

    def facts(self, action: ActionRecord, sent: dict[Step, float], refused: frozenset[Step]) -> Facts:
        """Return what is true about an action now.

        Args:
            action: it.
            sent: its commands, and for how long they have had time to work.
            refused: those that Slurm refused, and would refuse again.
        """
        facts = Facts(age_s=self.clock.unix() - action.began_unix, sent=sent, refused=refused)
        if action.remedy in OF_JOBS:
            return self._with_job(facts, action) if action.attempt else facts
        return (
            replace(facts, node=self._node(action.node), answers=self._reach(action.node))
            if action.node
            else facts
        )

    def _with_job(self, facts: Facts, action: ActionRecord) -> Facts:
        job = self._job(action)
        if job is None:
            found = self.heirs.find(token(action)) if self.heirs and action.remedy == Remedy.RESTART else ()
            return replace(facts, heir=found[0]) if found else facts
        away = self._unreachable(job) if job.state is JobState.RUNNING else ()
        if job.state is JobState.PENDING and action.remedy == Remedy.RESTART and Step.RELEASE not in facts.sent:
            # It is not let go in this second: time for what would hold its release up.
            self.releaser.look_ahead(action.exclude)
        facts = replace(
            facts,
            job=job,
            unreachable=away,
            comment=self.slurm.comment(job.id) if action.remedy == Remedy.HOLD else None,
            wished=self.releaser.wished(job.id),
            untrue=self._untrue(action, job, facts),
            waits_s=self._waits_s(action, job),
            given_up=bool(action.node) and {*away} <= {*action.exclude, action.node},
            being_downed=any(
                other.node in away and other.remedy == Remedy.DRAIN_DOWN
                for other in self.journal.actions(only_open=True)
            ),
        )
        return self._with_heir(facts, action, job) if action.remedy == Remedy.RESTART else facts

    def _with_heir(self, facts: Facts, action: ActionRecord, job: JobRow) -> Facts:
        submitted = self.heirs.agreed(job) if self.heirs else None
        if self.heirs is None or submitted is None:
            return facts
        found = self.heirs.find(token(action))
        if found:
            return replace(facts, heir=found[0], comment=self.slurm.comment(job.id))
        if not facts.unreachable or not facts.given_up or facts.being_downed:
            return facts
        why = self.heirs.obstacle(job, submitted, {*facts.unreachable}, facts.age_s)
        if why and action.key not in self._told:
            self._told.add(action.key)
            self.say(f"{action.incident}: job {job.id} is not submitted anew: {why}")
        return replace(facts, anew=not why)

    def _untrue(self, action: ActionRecord, job: JobRow, facts: Facts) -> bool:
        """Whether a node that we keep the job off is dead and Slurm does not know: before it may be used again."""
        if job.state is not JobState.PENDING or facts.sent.get(Step.RELEASE, 0.0) < RELAX_S:
            return False
        rows = self.observer.cluster.nodes
        serving = [
            name for name in action.exclude if name in rows and not rows[name].down and rows[name].responding
        ]
        return any(self._reach(name) is False for name in serving)

    def _waits_s(self, action: ActionRecord, job: JobRow) -> float:
        """Return for how long we have seen it wait; a run that began meanwhile begins the count anew."""
        now = self.clock.monotonic()
        if job.state is not JobState.PENDING:
            self._waiting.pop(action.key, None)
            return 0.0
        return now - self._waiting.setdefault(action.key, now)

    def _job(self, action: ActionRecord) -> JobRow | None:
        try:
            return self.slurm.job(action.attempt.job) if action.attempt else None
        except JobVanishedError:
            return None

    def _node(self, name: NodeName) -> NodeRow | None:
        found = self.slurm.nodes([name])
        return found[0] if found else None

    def _reach(self, name: NodeName) -> bool | None:
        if self.observer.reach(name) is None:
            self.observer.probe_now((name,))
        return self.observer.reach(name)

    def _unreachable(self, job: JobRow) -> tuple[NodeName, ...]:
        up = tuple(row.name for row in self.slurm.nodes(job.nodes) if not row.down)
        self.observer.probe_now(up)
        return tuple(name for name in up if not self.observer.reach(name))
