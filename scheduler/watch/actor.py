"""Carries out verdicts: writes the intent, runs one command at a time, writes the result.

`recovery_steps` says what the next command is, from facts that are read here again each time. Every method returns
soon: waiting is done by coming back.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.liveness.watchdog_client import BINDINGS, bindings_of
from deeplink.scheduler.placement.hint.cluster_survey import is_due, read_queue, taking_back
from deeplink.scheduler.recovery.evidence import TAG, Remedy
from deeplink.scheduler.recovery.records import Action, ActionRecord, IncidentKind, Phase
from deeplink.scheduler.recovery.recovery_steps import (
    RELAX_S,
    ActionFacts,
    RecoveryStep,
    bounded,
    comment_of,
    next_command,
    release_changes,
    required_without,
    still_suspected,
)
from deeplink.scheduler.slurm.client import JobVanishedError, NodeOrder
from deeplink.scheduler.slurm.command import CommandError, CommandMissingError, is_unanswered
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.settings import NO_ACCOUNTING, parse_settings
from deeplink.scheduler.slurm.states import LAUNCH_FAILED, JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.placement.hint.cluster_survey import Row
    from deeplink.scheduler.recovery.evidence import Verdict
    from deeplink.scheduler.recovery.records import Incident
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.observer import Observer

log = logging.getLogger(__name__)

MOST_TRIES = 3  # an action that was given up is begun again so often for one verdict of one attempt
MOST_STEPS = 6  # commands for one action before the loop looks at the world again
GAVE_UP = "gave up"
REFUSED = f"{GAVE_UP}: Slurm refused"  # and would again

_ACTIONS = {
    Remedy.COMMENT: Action.COMMENT,
    Remedy.DRAIN: Action.DRAIN,
    Remedy.DRAIN_DOWN: Action.DRAIN_DOWN,
    Remedy.RESTART: Action.REQUEUE_EXCLUDE,
}
_OF_NODES = frozenset({RecoveryStep.COMMENT, RecoveryStep.DRAIN, RecoveryStep.DOWN, RecoveryStep.RESUME})
_NOT_AGAIN = frozenset({RecoveryStep.COMMENT, RecoveryStep.DROP_NODES})
"""Refused for whatever reason, there is another way, or it is not worth a second try."""
_NO_RIGHTS = ("denied", "invalid user", "disabled", "not permitted")
_HELPLESS = frozenset({Phase.STRANDED, Phase.SUCCEEDED, Phase.FAILED})  # a launcher that says so does not go on


def _reason(verdict: Verdict, incident: str) -> str:
    """Return what stands beside a node or job for people: of a comment it is all they see."""
    if verdict.remedy is Remedy.COMMENT:
        return comment_of(f"{TAG}{incident}: {'; '.join(verdict.reasons)}")
    return f"{TAG}{incident}: {verdict.kind}" if verdict.ends else f"{TAG}{incident}"


@dataclass(slots=True)
class _Progress:
    """What we know of an open action since we began it, or took it up."""

    since: float | None  # None: to be taken up again
    began: bool  # by us, on what we saw then
    sent: dict[RecoveryStep, float] = field(default_factory=dict)
    refused: set[RecoveryStep] = field(default_factory=set)
    waits_since: float | None = None  # its job waits in the queue


@dataclass(slots=True, kw_only=True)
class Actor:
    """Runs the commands that verdicts ask for. One thread only."""

    slurm: Slurm
    journal: Journal
    observer: Observer
    clock: Clock
    metrics: WatchMetrics
    say: Callable[[str], None]
    _progress: dict[str, _Progress] = field(default_factory=dict)

    def begin(self, verdict: Verdict, incident: Incident | None) -> bool:
        """Write down what is to be done about a verdict; False if that is under way, or done, already."""
        key = self._free_key(verdict, incident.id if incident else verdict.incident)
        if key is None or self.restarting(verdict):
            return False
        named = incident.id if incident else verdict.node or verdict.incident
        action = ActionRecord(
            key=key,
            incident=named,
            remedy=verdict.remedy,
            attempt=verdict.attempt,
            node=verdict.node,
            exclude=verdict.exclude,
            reason=_reason(verdict, named),
            began_unix=self.clock.unix(),
        )
        begun = self.journal.begin_action(action)
        if begun:
            self._progress[key] = _Progress(self.clock.monotonic(), began=True)
        return begun

    def restarting(self, verdict: Verdict) -> bool:
        """Whether the verdict asks something of a job that is being restarted, or held, already."""
        return verdict.remedy == Remedy.RESTART and any(
            action.remedy == Remedy.RESTART and action.attempt == verdict.attempt
            for action in self.journal.actions(only_open=True)
        )

    def _free_key(self, verdict: Verdict, incident: str) -> str | None:
        base = f"{incident}/{verdict.order}"
        if verdict.remedy is Remedy.RESUME and verdict.node:
            base += f"@{self.journal.drained().get(verdict.node, 0.0):.0f}"
        for key in (base, *(f"{base}#{tries}" for tries in range(2, MOST_TRIES + 1))):
            known = self.journal.action(key)
            if known is None:
                return key
            if not known.result.startswith(GAVE_UP) or known.result.startswith(REFUSED):
                return None
        return None

    def forgive(self) -> None:
        """It was we who were away: what is under way is taken up again, on what is heard from now on."""
        for progress in self._progress.values():
            progress.since, progress.began, progress.waits_since = None, False, None

    def take_over(self, since_unix: float) -> None:
        """Go on with what was begun since then as if we had begun it: nothing was missed meanwhile."""
        offset = self.clock.unix() - self.clock.monotonic()
        for action in self.journal.actions(only_open=True):
            if action.began_unix >= since_unix:
                self._progress[action.key] = _Progress(action.began_unix - offset, began=True)

    def work(self) -> bool:
        """Take every open action as far as it goes now; return whether any is left."""
        before = self.journal.actions(only_open=True)
        for action in before:
            try:
                self._advance(action)
            except JournalError:
                raise  # nothing is done that cannot be written down, and it is said
            except DeepLinkError as problem:
                log.warning("action %s: %s", action.key, problem)
        left = self.journal.actions(only_open=True) if before else ()
        if len(left) < len(before):
            self.observer.ask()  # what was true before the action would be judged again
        return bool(left)

    def _advance(self, action: ActionRecord) -> None:
        for _ in range(MOST_STEPS):
            facts = self._facts(action)
            step = next_command(action, facts)
            log.debug("action %s: %s %s", action.key, step.step, step.why)
            if step.step in {RecoveryStep.DONE, RecoveryStep.GIVE_UP}:
                self._end(action, step.why, done=step.step is RecoveryStep.DONE)
                return
            if step.step is RecoveryStep.WAIT:
                return
            self._send(action, step.step, facts)

    def _send(self, action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> None:
        progress = self._progress[action.key]
        try:
            self._command(action, step, facts)
        except CommandError as refused:
            self.say(f"{action.incident}: {step.value} refused: {refused.stderr.strip()}")
            final = step in _NOT_AGAIN or any(word in refused.stderr.lower() for word in _NO_RIGHTS)
            if final and not is_unanswered(refused):
                progress.refused.add(step)
        except OSError as problem:
            self.say(f"{action.incident}: {step.value}: {problem}")
            if (
                step is RecoveryStep.DROP_NODES
            ):  # there is another way; else it was no word of Slurm's, and may pass
                progress.refused.add(step)
        else:
            self.say(f"{action.incident}: {step.value} {self._object(action, step, facts)}")
        finally:
            # Also where no answer came in time: it may have been heard.
            progress.sent[step] = self.clock.monotonic()

    @staticmethod
    def _object(action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> str:
        if step in _OF_NODES:
            return f"node {action.node}"
        without = f" without {fold(action.exclude)}" if step is RecoveryStep.RELEASE and action.exclude else ""
        known = facts.job.label if facts.job else action.attempt.job if action.attempt else "-"
        return f"job {known}{without}"

    def _command(self, action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> None:
        slurm, job, node = self.slurm, facts.job, action.node
        match step:
            case RecoveryStep.COMMENT if node:
                slurm.comment_node(node, action.reason)
            case RecoveryStep.DRAIN if node:
                slurm.update_node(node, NodeOrder.DRAIN, action.reason)
            case RecoveryStep.DOWN if node:
                # An operator's own reason, if he drained the node before us, stays.
                kept = facts.node.reason if facts.node and facts.node.drained else ""
                slurm.update_node(node, NodeOrder.DOWN, kept or action.reason)
            case RecoveryStep.RESUME if node:
                slurm.update_node(node, NodeOrder.RESUME)
            case RecoveryStep.DROP_NODES if job:
                slurm.keep_only(job.address, [name for name in job.nodes if name not in facts.unreachable])
            case RecoveryStep.REQUEUE if job:
                slurm.requeue(job.address)
            case RecoveryStep.RELEASE if job:
                self.release(job, action.exclude)
            case RecoveryStep.RELAX if job:
                self.release(job, (), carry=False)
            case _:
                raise ValueError(f"{step} is no command for {action.key}")

    def release(self, row: JobRow, exclude: tuple[NodeName, ...], *, carry: bool = True) -> None:
        """Clear the hold of a waiting job; its own exclusions stay, ours are as few as there is reason for."""
        job = row.id
        place, before, now_unix = self.slurm.place(job), self.journal.excluded(job), self.clock.unix()
        users = {*place.excluded} - before.keys()
        older = (
            still_suspected(before, {node.name: node for node in self.journal.nodes()}, now_unix) if carry else ()
        )
        known = self.journal.job(job)
        size = len(known.newest.nodes) + len(known.newest.spares) if known else 0
        asks = replace(place, nodes=max(place.nodes, size), excluded=tuple(users))
        partition = self.slurm.partition_nodes(place.partitions) if exclude or older else frozenset()
        silent = self.observer.silent((*exclude, *older))
        ours = bounded((*exclude, *older), asks, partition, self.observer.cluster.nodes, silent)
        since = {name: now_unix if name in exclude else before[name] for name in ours if name not in users}
        # Before the command both, after it what is true: killed in between, ours are never taken for the user's.
        self.journal.set_excluded(job, {**before, **since})
        wanted = users | {*ours}
        changes = release_changes(place, wanted, required_without(asks, {*ours}))
        self.slurm.update_job(row.address, **changes, StartTime="now")
        if row.reason == LAUNCH_FAILED:
            self.slurm.release(row.address)
        self.journal.set_excluded(job, since)

    def _end(self, action: ActionRecord, why: str, *, done: bool) -> None:
        now = self.clock.unix()
        incident, acted = self.journal.incident(action.incident), None
        if done and incident:
            word = _ACTIONS.get(Remedy(action.remedy), Action.NONE)
            acted = replace(incident, action=word, acted_unix=now)
        self.journal.end_action(action.key, why if done else f"{GAVE_UP}: {why}", now, acted)
        self._progress.pop(action.key, None)
        self.metrics.actions.labels(action.remedy, "done" if done else GAVE_UP).inc()
        took = f" ({now - action.began_unix:.1f} s after the verdict)" if done else ""
        self.say(f"{action.incident}: {action.remedy} {'done' if done else GAVE_UP}: {why}{took}")

    # The facts that decide an action's next command.

    def _facts(self, action: ActionRecord) -> ActionFacts:
        now = self.clock.monotonic()
        progress = self._progress.setdefault(action.key, _Progress(now, began=False))
        facts = ActionFacts(
            age_s=self.clock.unix() - action.began_unix,
            sent={step: now - at for step, at in progress.sent.items()},
            refused=frozenset(progress.refused),
        )
        if progress.since is None:
            progress.since = now
        if not progress.began:
            facts = replace(facts, returned_s=now - progress.since)
        if action.attempt and action.remedy == Remedy.RESTART:
            return self._with_job(facts, action, action.attempt, progress)
        if not action.node or action.remedy == Remedy.RESTART:
            return facts
        found = self.slurm.nodes([action.node])
        asked = action.remedy != Remedy.COMMENT  # slurmd logs each probe
        answers = self._answers(action.node) if asked else None
        return replace(facts, node=found[0] if found else None, answers=answers)

    def _with_job(
        self, facts: ActionFacts, action: ActionRecord, attempt: Attempt, progress: _Progress
    ) -> ActionFacts:
        try:
            job = self.slurm.job(attempt.job)
        except JobVanishedError:
            return facts
        pending = job.state is JobState.PENDING
        if pending and RecoveryStep.RELEASE not in facts.sent:
            # It is not let go in this second: time for what would hold its release up, a dead node's silence.
            self.observer.silent(action.exclude)
        away = self._unreachable(job) if job.state is JobState.RUNNING else ()
        opened = self.journal.actions(only_open=True) if away else ()
        return replace(
            facts,
            job=job,
            unreachable=away,
            excluded_is_silent=pending and self._excluded_is_silent(action, facts),
            waits_s=self._waits_s(progress, job),
            kept_off=pending and bool(self.journal.excluded(job.id)),
            goes_on=job.state is JobState.RUNNING and self._goes_on(action, attempt, progress),
            given_up=bool(action.node)
            and {*away} <= {*action.exclude, action.node}
            and all(map(self.observer.lost, away)),
            being_downed=any(each.node in away and each.remedy == Remedy.DRAIN_DOWN for each in opened),
        )

    def _goes_on(self, action: ActionRecord, attempt: Attempt, progress: _Progress) -> bool:
        """Whether the launcher, heard since the action was begun, or taken up, reports that it needs no help."""
        heard = self.observer.heartbeats.of(attempt.job)
        if heard is None or progress.since is None:
            return False
        if not heard.ourselves or heard.heard_at <= progress.since or heard.beat.phase in _HELPLESS:
            return False
        if heard.beat.attempt != attempt:
            return heard.beat.attempt > attempt
        # Of a job that lost a node the ranks that are left may make steps still.
        return f"/{IncidentKind.LAUNCHER_LOST}/" in action.key

    def _excluded_is_silent(self, action: ActionRecord, facts: ActionFacts) -> bool:
        """Whether a node that we keep the job off is dead and Slurm does not know: before it may be used again."""
        if facts.sent.get(RecoveryStep.RELEASE, 0.0) < RELAX_S:
            return False
        rows = [self.observer.cluster.nodes.get(name) for name in action.exclude]
        return bool(self.observer.silent([row.name for row in rows if row and not row.down and row.responding]))

    def _waits_s(self, progress: _Progress, job: JobRow) -> float:
        """Return for how long we have seen it wait; a run that began meanwhile restarts the count."""
        if job.state is not JobState.PENDING:
            progress.waits_since = None
            return 0.0
        now = self.clock.monotonic()
        if progress.waits_since is None:
            progress.waits_since = now
        return now - progress.waits_since

    def _answers(self, name: NodeName) -> bool | None:
        """Return whether a node answers; None where that is not known, or its silence has not lasted yet."""
        if not self.observer.lost(name):
            self.observer.probe_suspects((name,))
        return False if self.observer.lost(name) else self.observer.reach(name) or None

    def _unreachable(self, job: JobRow) -> tuple[NodeName, ...]:
        up = tuple([row.name for row in self.slurm.nodes(job.nodes) if not row.down])
        self.observer.probe_suspects(up)
        return tuple([name for name in up if not self.observer.reach(name)])


# Nodes hinted by name are taken off jobs that wait for them, whoever named them and whatever became of him.

LOOK_S = 2.0  # how often the waiting jobs are asked for
AGAIN_S = 10.0
"""How long after a look that failed the next one comes: each may hold the watchdog's verdicts for some seconds."""
ACCOUNTING_S = 2.0  # bound on `sacctmgr`, which waits for slurmdbd
ROUND_S = 1.0
"""How long one look may change jobs: the watchdog's verdicts wait for it. The rest come in the next one."""
MOST_REFUSALS = 3
_OPERATORS = ("operator", "administrator")


@dataclass(slots=True, kw_only=True)
class Bindings:
    """Takes nodes hinted by name off waiting jobs. One thread only."""

    slurm: Slurm
    clock: Clock
    say: Callable[[str], None]
    serves: Callable[[str, bool], None] = lambda _service, _well: None
    _user: str | None = None
    _rights: bool = False
    _next: float = float("-inf")
    _since: dict[str, float] = field(default_factory=dict)
    _refusals: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Look at the waiting jobs, where it is time to. Slurm's silence is waited out."""
        now = self.clock.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        try:
            self._learn_rights()
            self._take_back(read_queue(self.slurm.run), now)
        except DeepLinkError as problem:
            log.info("nodes hinted by name are not looked after in this round: %s", problem)
            self._next = self.clock.monotonic() + AGAIN_S
            self._tell(well=False)
        else:
            self._tell(well=True)

    def _learn_rights(self) -> None:
        if self._user is None:
            self._rights = changes_all_jobs(self.slurm)
            self._user = me()

    def unable(self) -> None:
        """Say that nothing is looked after now."""
        self._tell(well=False)

    def _tell(self, *, well: bool) -> None:
        if self._user is not None:
            self.serves(BINDINGS if self._rights else bindings_of(self._user), well)

    def _take_back(self, queue: list[Row], now: float) -> None:
        bound = {row.label: row for row in queue if row.wished and (self._rights or row.user == self._user)}
        self._since = {label: self._since.get(label, now) for label in bound}
        self._refusals = {label: count for label, count in self._refusals.items() if label in bound}
        ends = self.clock.monotonic() + ROUND_S
        for label, row in bound.items():
            if self.clock.monotonic() >= ends:
                break
            if is_due(row.reason, now - self._since[label]) and self._refusals.get(label, 0) < MOST_REFUSALS:
                self._release(row)

    def _release(self, row: Row) -> None:
        try:
            self.slurm.update_job(row.address, **taking_back(row.comment))
        except DeepLinkError as refused:
            if is_unanswered(refused):
                raise
            self._refusals[row.label] = self._refusals.get(row.label, 0) + 1
            self.say(
                f"job {row.label} waits for the nodes hinted for it, and they cannot be taken off it: {refused}"
            )
        else:
            self.say(
                f"job {row.label} may start on any nodes: those hinted for it hold it ({row.reason or 'unseen'})"
            )


def changes_all_jobs(slurm: Slurm) -> bool:
    """Whether Slurm lets us change the jobs of all users."""
    if os.getuid() == 0:
        return True
    said = slurm.run(["scontrol", "show", "config"])
    if re.search(rf"^SlurmUser\s*=.*\({os.getuid()}\)\s*$", said, re.MULTILINE):
        return True
    if parse_settings(said).text("AccountingStorageType") in NO_ACCOUNTING:
        return False  # no one else has rights
    asked = ["sacctmgr", "-n", "-P", "show", "user", me(), "format=AdminLevel"]
    try:
        level = slurm.run(asked, timeout_s=ACCOUNTING_S)
    except CommandMissingError:
        return False
    return level.strip().lower().startswith(_OPERATORS)
