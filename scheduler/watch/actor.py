"""Carries out verdicts: writes the intent, runs one command at a time, writes the result.

`recovery_steps` says what the next command is; this module runs it. Every method returns soon: waiting is done by
coming back.
"""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.client import NodeOrder
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.silence import is_unanswered
from deeplink.scheduler.slurm.states import LAUNCH_FAILED
from deeplink.scheduler.watch.action_facts import OF_JOBS, ActionFactsReader, token
from deeplink.scheduler.watch.evidence import TAG
from deeplink.scheduler.watch.journal import JournalError
from deeplink.scheduler.watch.records import Action, ActionRecord, IncidentOutcome
from deeplink.scheduler.watch.recovery_steps import RESUBMITTED, ActionFacts, RecoveryStep, next_command
from deeplink.scheduler.watch.release import Releaser
from deeplink.scheduler.watch.slurm_comment import comment_of, with_our_comment
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.records import Incident
    from deeplink.scheduler.watch.requeue_placement import RequeueHints
    from deeplink.scheduler.watch.resubmit import Resubmitter
    from deeplink.scheduler.watch.verdict import Verdict
    from deeplink.types import NodeName

log = logging.getLogger(__name__)

MOST_TRIES = 3
"""An action that was given up is begun anew at most so often for one verdict of one attempt."""
MOST_STEPS = 6
"""Commands for one action before the loop looks at the world again."""
GAVE_UP = "gave up"

_DONE = frozenset({RecoveryStep.DONE, RecoveryStep.GIVE_UP})
_WORDS = {
    Remedy.NOTHING: Action.NONE,
    Remedy.COMMENT: Action.COMMENT,
    Remedy.HOLD: Action.HOLD,
    Remedy.DRAIN: Action.DRAIN,
    Remedy.DRAIN_DOWN: Action.DRAIN_DOWN,
    Remedy.RESTART: Action.REQUEUE_EXCLUDE,
    Remedy.RESUME: Action.NONE,
}
_OF_NODES = frozenset({RecoveryStep.COMMENT, RecoveryStep.DRAIN, RecoveryStep.DOWN, RecoveryStep.RESUME})
_SUCCESSION = frozenset(
    {RecoveryStep.SUBMIT, RecoveryStep.BEQUEATH, RecoveryStep.CANCEL, RecoveryStep.SET_FREE, RecoveryStep.DISMISS}
)
_NOT_AGAIN = frozenset({RecoveryStep.COMMENT, RecoveryStep.EXPLAIN, RecoveryStep.SHED, RecoveryStep.SUBMIT})
"""Refused for whatever reason, there is another way, or it is not worth a second try."""
_NO_RIGHTS = ("denied", "invalid user", "disabled", "not permitted")


def action_word(remedy: Remedy) -> Action:
    """Return the word for a remedy in an incident's record."""
    return _WORDS[remedy]


def _reason(verdict: Verdict, incident: str) -> str:
    """Return what stands beside a node or job for people: of a comment it is all they see."""
    if verdict.remedy in {Remedy.COMMENT, Remedy.HOLD}:
        return comment_of(f"{TAG}{incident}: {'; '.join(verdict.reasons)}")
    return f"{TAG}{incident}"


@dataclass(slots=True, kw_only=True)
class Actor:
    """The watchdog's hands. One thread only.

    Args:
        say: told one line for each command and each end.
        wishes: says on which nodes a job that starts again should run; None: Slurm alone says it.
        heirs: submits jobs anew that cannot be helped otherwise; None: no job is.
    """

    slurm: Slurm
    journal: Journal
    observer: Observer
    clock: Clock
    metrics: WatchMetrics
    say: Callable[[str], None]
    wishes: InitVar[RequeueHints | None] = None
    heirs: Resubmitter | None = None
    _sent: dict[str, dict[RecoveryStep, float]] = field(default_factory=dict)
    _refused: dict[str, set[RecoveryStep]] = field(default_factory=dict)
    _releaser: Releaser = field(init=False)
    _footing: ActionFactsReader = field(init=False)

    def __post_init__(self, wishes: RequeueHints | None) -> None:
        """Begin with nothing sent."""
        self._releaser = Releaser(
            slurm=self.slurm,
            journal=self.journal,
            observer=self.observer,
            clock=self.clock,
            say=self.say,
            wishes=wishes,
        )
        self._footing = ActionFactsReader(
            slurm=self.slurm,
            journal=self.journal,
            observer=self.observer,
            clock=self.clock,
            say=self.say,
            releaser=self._releaser,
            heirs=self.heirs,
        )

    def begin(self, verdict: Verdict, incident: Incident | None) -> bool:
        """Write down what is to be done about a verdict; False if that is under way, or done, already."""
        key = self._free_key(verdict)
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
            self._footing.begin(action)
        return begun

    def restarting(self, verdict: Verdict) -> bool:
        """Whether the verdict asks something of a job that is being restarted, or held, already."""
        return verdict.remedy in OF_JOBS and any(
            action.remedy in OF_JOBS and action.attempt == verdict.attempt
            for action in self.journal.actions(only_open=True)
        )

    def _free_key(self, verdict: Verdict) -> str | None:
        base = verdict.key
        if verdict.remedy is Remedy.RESUME and verdict.node:
            base += f"@{self.journal.drained().get(verdict.node, 0.0):.0f}"
        for tries in range(MOST_TRIES):
            key = f"{base}#{tries + 1}" if tries else base
            known = self.journal.action(key)
            if known is None:
                return key
            if not known.done_unix or not known.result.startswith(GAVE_UP):
                return None
        return None

    def forgive(self) -> None:
        """It was we who were away: jobs may have helped themselves, and have time to say so."""
        self._footing.forgive()

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
            facts = self._footing.facts(action, *self._done_so_far(action))
            step = next_command(action, facts)
            log.debug("action %s: %s %s", action.key, step.step, step.why)
            if step.step in _DONE:
                self._end(action, step.step, step.why)
                return
            if step.step is RecoveryStep.WAIT:
                return
            self._send(action, step.step, facts)

    def _done_so_far(self, action: ActionRecord) -> tuple[dict[RecoveryStep, float], frozenset[RecoveryStep]]:
        now = self.clock.monotonic()
        sent = {step: now - at for step, at in self._sent.get(action.key, {}).items()}
        return sent, frozenset(self._refused.get(action.key, set()))

    def _send(self, action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> None:
        try:
            self._command(action, step, facts)
        except CommandError as refused:
            self.say(f"{action.incident}: {step.value} refused: {refused.stderr.strip()}")
            final = step in _NOT_AGAIN or any(word in refused.stderr.lower() for word in _NO_RIGHTS)
            if final and not is_unanswered(refused):
                self._refused.setdefault(action.key, set()).add(step)
        except OSError as problem:
            self.say(f"{action.incident}: {step.value}: {problem}")
            if step in _NOT_AGAIN:  # else it was no word of Slurm's, and may pass
                self._refused.setdefault(action.key, set()).add(step)
        else:
            self.say(f"{action.incident}: {step.value} {self._object(action, step, facts)}")
        finally:
            # Also where no answer came in time: it may have been heard.
            self._sent.setdefault(action.key, {})[step] = self.clock.monotonic()

    @staticmethod
    def _object(action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> str:
        if step in _OF_NODES:
            return f"node {action.node}"
        without = f" without {fold(action.exclude)}" if step is RecoveryStep.RELEASE and action.exclude else ""
        known = facts.job.label if facts.job else action.attempt.job if action.attempt else "-"
        return f"job {known}{without}"

    def _command(self, action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> None:
        if step in _OF_NODES and action.node:
            self._tell_node(action, action.node, step, facts)
        elif step not in _OF_NODES and action.attempt:
            self._tell_job(action, step, facts)
        else:
            raise ValueError(f"{step} is no command for {action.key}")

    def _tell_node(self, action: ActionRecord, node: NodeName, step: RecoveryStep, facts: ActionFacts) -> None:
        if step is RecoveryStep.COMMENT:
            self.slurm.comment_node(node, action.reason)
        elif step is RecoveryStep.DOWN:
            # An operator's own reason, if he drained the node before us, stays.
            kept = facts.node.reason if facts.node and facts.node.drained else ""
            self.slurm.update_node(node, NodeOrder.DOWN, kept or action.reason)
        elif step is RecoveryStep.DRAIN:
            self.slurm.update_node(node, NodeOrder.DRAIN, action.reason)
        else:
            self.slurm.update_node(node, NodeOrder.RESUME)

    def _tell_job(self, action: ActionRecord, step: RecoveryStep, facts: ActionFacts) -> None:
        job = facts.job
        if step in _SUCCESSION and self.heirs:
            self._succeed(action, self.heirs, step, facts)
            return
        match step:
            case RecoveryStep.EXPLAIN if job:
                self.slurm.comment_job(job.address, with_our_comment(facts.comment or "", action.reason))
            case RecoveryStep.HOLD if job:
                self.slurm.hold_waiting(job.address)
            case RecoveryStep.REQUEUE_HOLD if job:
                self.slurm.hold(job.address)
            case RecoveryStep.SHED if job:
                kept = [name for name in job.nodes if name not in facts.unreachable]
                self.slurm.keep_only(job.address, kept)
            case RecoveryStep.REQUEUE if job:
                self.slurm.requeue(job.address)
            case RecoveryStep.RELEASE if job:
                self._releaser.release(job, action.exclude, held=job.reason == LAUNCH_FAILED)
            case RecoveryStep.RELAX if job:
                self._releaser.release(job, (), carry=False)
            case _:
                raise ValueError(f"{step} is no command for {action.key}")

    def _succeed(self, action: ActionRecord, heirs: Resubmitter, step: RecoveryStep, facts: ActionFacts) -> None:
        job, heir = facts.job, facts.heir
        match step:
            case RecoveryStep.SUBMIT if job:
                heirs.submit_anew(job, token(action), {*facts.unreachable, *action.exclude})
            case RecoveryStep.BEQUEATH if job and heir:
                self._hand_down(action, job.id, heir.id)
                heirs.hand_over(job, heir)
            case RecoveryStep.CANCEL if job and heir:
                heirs.supersede(job, heir)
            case RecoveryStep.SET_FREE if action.attempt:
                heirs.release_hold(action.attempt.job, token(action))
            case RecoveryStep.DISMISS if heir:
                self.slurm.cancel(heir.address)
            case _:
                raise ValueError(f"{step} is no command for {action.key}")

    def _hand_down(self, action: ActionRecord, job: int, heir: int) -> None:
        """Note which of the exclusions that the heir was submitted with are ours, and end as ours do."""
        ours = self.journal.excluded(job)
        users = {*self.slurm.excluded_nodes(job)} - ours.keys()
        lost = {*action.exclude, *filter(None, [action.node])} - users
        self.journal.set_excluded(heir, {**ours, **dict.fromkeys(lost, action.began_unix)})

    def _end(self, action: ActionRecord, step: RecoveryStep, why: str) -> None:
        done = step is RecoveryStep.DONE
        now = self.clock.unix()
        incident, acted = self.journal.incident(action.incident), None
        if done and incident:
            word = Action.RESUBMIT if why.startswith(RESUBMITTED) else action_word(Remedy(action.remedy))
            acted = replace(incident, action=word, acted_unix=now)
            if word == Action.RESUBMIT:
                # Its own id ends here: what comes of the other job is told there.
                acted = replace(acted, evidence=why, outcome=IncidentOutcome.RECOVERED, recovered_unix=now)
        self.journal.end_action(action.key, why if done else f"{GAVE_UP}: {why}", now, acted)
        self._sent.pop(action.key, None)
        self._refused.pop(action.key, None)
        self._footing.forget(action)
        self.metrics.actions.labels(action.remedy, "done" if done else GAVE_UP).inc()
        took = f" ({now - action.began_unix:.1f} s after the verdict)" if done else ""
        self.say(f"{action.incident}: {action.remedy} {'done' if done else GAVE_UP}: {why}{took}")
