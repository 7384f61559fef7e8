"""Collects the facts that decide an action's next command: Slurm's state, probe results, commands sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.client import JobVanishedError
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.records import IncidentKind, Phase
from deeplink.scheduler.watch.recovery_steps import RELAX_S, ActionFacts, RecoveryStep
from deeplink.scheduler.watch.resubmission import left_for, token_of
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.records import ActionRecord
    from deeplink.scheduler.watch.release import Releaser
    from deeplink.scheduler.watch.resubmit import Resubmitter
    from deeplink.types import NodeName

OF_JOBS = frozenset({Remedy.RESTART, Remedy.HOLD})
"""Remedies that change a job."""
_HELPLESS = frozenset({Phase.STRANDED, Phase.SUCCEEDED, Phase.FAILED})
"""A launcher that says so does not go on."""


def token(action: ActionRecord) -> str:
    """Return what a job that is submitted anew for an action carries."""
    return token_of(action.attempt, action.began_unix)


@dataclass(slots=True, kw_only=True)
class ActionFactsReader:
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
    heirs: Resubmitter | None = None
    _began: dict[str, float] = field(default_factory=dict)
    _taken_up: dict[str, float] = field(default_factory=dict)
    _waiting: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def begin(self, action: ActionRecord) -> None:
        """The action is begun by us, on what we see now."""
        self._began[action.key] = self.clock.monotonic()

    def forget(self, action: ActionRecord) -> None:
        """The action has ended."""
        self._began.pop(action.key, None)
        self._taken_up.pop(action.key, None)
        self._waiting.pop(action.key, None)
        self._told.discard(action.key)

    def forgive(self) -> None:
        """It was we who were away: what is under way is taken up anew, on what is heard from now on."""
        self._began.clear()
        self._taken_up.clear()
        self._waiting.clear()

    def facts(
        self, action: ActionRecord, sent: dict[RecoveryStep, float], refused: frozenset[RecoveryStep]
    ) -> ActionFacts:
        """Return what is true about an action now.

        Args:
            action: it.
            sent: its commands, and for how long they have had time to work.
            refused: those that Slurm refused, and would refuse again.
        """
        now = self.clock.monotonic()
        facts = ActionFacts(age_s=self.clock.unix() - action.began_unix, sent=sent, refused=refused)
        if action.key not in self._began:
            facts = replace(facts, returned_s=now - self._taken_up.setdefault(action.key, now))
        if action.remedy in OF_JOBS:
            return self._with_job(facts, action) if action.attempt else facts
        if not action.node:
            return facts
        asked = action.remedy != Remedy.COMMENT  # slurmd logs each probe
        answers = self._answers(action.node) if asked else None
        return replace(facts, node=self._node(action.node), answers=answers)

    def _with_job(self, facts: ActionFacts, action: ActionRecord) -> ActionFacts:
        job = self._job(action)
        if job is None:
            return self._with_orphan(facts, action)
        away = self._unreachable(job) if job.state is JobState.RUNNING else ()
        if (
            job.state is JobState.PENDING
            and action.remedy == Remedy.RESTART
            and RecoveryStep.RELEASE not in facts.sent
        ):
            # It is not let go in this second: time for what would hold its release up.
            self.releaser.look_ahead(action.exclude)
        facts = replace(
            facts,
            job=job,
            unreachable=away,
            comment=self.slurm.comment(job.id) if action.remedy == Remedy.HOLD else None,
            untrue=self._untrue(action, job, facts),
            waits_s=self._waits_s(action, job),
            kept_off=job.state is JobState.PENDING and bool(self.journal.excluded(job.id)),
            goes_on=job.state is JobState.RUNNING and self._goes_on(action),
            given_up=bool(action.node)
            and {*away} <= {*action.exclude, action.node}
            and all(map(self.observer.lost, away)),
            being_downed=any(
                other.node in away and other.remedy == Remedy.DRAIN_DOWN
                for other in self.journal.actions(only_open=True)
            ),
        )
        return self._with_heir(facts, action, job) if action.remedy == Remedy.RESTART else facts

    def _goes_on(self, action: ActionRecord) -> bool:
        """Whether the launcher, heard since the action was begun, or taken up, tells that it needs no help."""
        heard = self.observer.book.of(action.attempt.job) if action.attempt else None
        since = self._began.get(action.key, self._taken_up.get(action.key))
        if action.attempt is None or heard is None or since is None:
            return False
        if not heard.ourselves or heard.heard_at <= since or heard.beat.phase in _HELPLESS:
            return False
        if heard.beat.attempt != action.attempt:
            return heard.beat.attempt > action.attempt
        if f"/{IncidentKind.LAUNCHER_LOST}/" in action.key:
            return True
        # Of a job that lost a node the ranks that are left may make steps still.
        stood_still = any(
            f"/{kind}/" in action.key for kind in (IncidentKind.RANKS_HUNG, IncidentKind.APPLICATION_FAILED)
        )
        return stood_still and heard.progressed_at > since

    def _with_orphan(self, facts: ActionFacts, action: ActionRecord) -> ActionFacts:
        """Of a job that Slurm has forgotten its folder tells whether it was left to its heir."""
        if self.heirs is None or action.attempt is None or action.remedy != Remedy.RESTART:
            return facts
        found = self.heirs.find(token(action))
        if not found:
            return facts
        left = self.heirs.is_left_to(action.attempt.job, found[0].id)
        return replace(facts, heir=found[0], comment=left_for(found[0].id) if left else "")

    def _with_heir(self, facts: ActionFacts, action: ActionRecord, job: JobRow) -> ActionFacts:
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
            self.say(f"{action.incident}: job {job.label} is not submitted anew: {why}")
        return replace(facts, anew=not why)

    def _untrue(self, action: ActionRecord, job: JobRow, facts: ActionFacts) -> bool:
        """Whether a node that we keep the job off is dead and Slurm does not know: before it may be used again."""
        if job.state is not JobState.PENDING or facts.sent.get(RecoveryStep.RELEASE, 0.0) < RELAX_S:
            return False
        rows = self.observer.cluster.nodes
        serving = (
            name for name in action.exclude if name in rows and not rows[name].down and rows[name].responding
        )
        return bool(self.observer.silent(serving))

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

    def _answers(self, name: NodeName) -> bool | None:
        """Return whether a node answers; None where that is not known, or its silence has not lasted yet."""
        if not self.observer.lost(name):
            self.observer.probe_suspects((name,))
        return False if self.observer.lost(name) else self.observer.reach(name) or None

    def _unreachable(self, job: JobRow) -> tuple[NodeName, ...]:
        up = tuple(row.name for row in self.slurm.nodes(job.nodes) if not row.down)
        self.observer.probe_suspects(up)
        return tuple(name for name in up if not self.observer.reach(name))
