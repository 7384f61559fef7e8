"""The next command of an action, from what Slurm says now. Pure.

An action is not a script with a place in it: after each command, and after a restart of the watchdog, what comes
next follows from what is true. So a watchdog killed between two commands finishes on return, and none is sent
twice once Slurm shows that it has worked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.job_address import OF_A_WHOLE
from deeplink.scheduler.slurm.states import HELD, LAUNCH_FAILED, JobState
from deeplink.scheduler.watch.evidence import TAG
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.resubmission import left_for
from deeplink.scheduler.watch.slurm_comment import ours_in_comment, with_our_comment
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.watch.records import ActionRecord
    from deeplink.types import Attempt, NodeName

SETTLE_S = 10.0
"""A command that shows no effect for so long is sent again (it was lost, or its sender was killed)."""
NEXT_SECOND_S = 1.1
"""A job that is started again in the second in which its last run was ended, on a node of that run, is lost:
slurmd has revoked what was signed up to that second ("Killing non-startable batch job: Job credential revoked",
measured with 22.05)."""
RESUBMITTED = "resubmitted as job"
"""So begins the result of an action that ended in another job."""
RELAX_S = 15.0
"""A job that waits in the queue for so long after its release may use the nodes we excluded again."""
LONGEST_S = 600.0
"""An action that has not ended after so long is given up; the next verdict may begin another."""
LISTEN_S = 3.0
"""Whoever takes up the intent of a watchdog that was killed, or stopped, first hears the launcher for so long: it
may have helped itself meanwhile."""
WELL_S = 30.0
"""That a node is well again is true for so long; then it is to be seen anew."""


class RecoveryStep(Enum):
    """One command, or none."""

    COMMENT = "comment"
    DRAIN = "drain"
    DOWN = "down"
    RESUME = "resume"
    EXPLAIN = "explain"  # in the job's own comment
    HOLD = "hold"
    REQUEUE_HOLD = "requeue and hold"
    SHED = "shed"  # what is dead, out of the job's allocation
    REQUEUE = "requeue"
    RELEASE = "release"
    RELAX = "relax"
    SUBMIT = "submit anew"  # held, in place of the job
    BEQUEATH = "bequeath"  # to its heir: from here on the job is to be cancelled
    CANCEL = "cancel"
    SET_FREE = "set free"  # the heir
    DISMISS = "dismiss"  # the heir
    WAIT = "wait"
    DONE = "done"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFacts:
    """What is true about an action's job or node now.

    Attributes:
        node: the node as Slurm tells it; None when the action is about none, or Slurm does not know it.
        job: the job; None when the action is about none, or Slurm does not know it any more.
        answers: whether the node's slurmd answers our probes; None when unknown, or not silent for long enough.
        unreachable: allocated nodes that neither answer nor are down by Slurm's word.
        age_s: since the intent was written.
        sent: commands sent, and for how long they have had time to work.
        refused: commands that Slurm refused, and would refuse again.
        returned_s: since we took the action up: a watchdog that was killed began it, or we were stopped meanwhile.
        goes_on: the launcher has told us since that its job goes on: it needs no help any more.
        comment: of the job, as it is; None when it was not asked for.
        given_up: the unreachable nodes are those that the verdict calls dead, and silent for long enough.
        being_downed: an action of ours is about to set one of them down.
        anew: the job may be submitted anew, which helps it sooner than Slurm does.
        heir: the job that was submitted in place of this one.
        untrue: an excluded node does not answer, and Slurm would start the job on it all the same.
        kept_off: nodes that we exclude are on record, of this restart or of an earlier one.
        waits_s: for how long we have seen the job wait in the queue, at least.
    """

    node: NodeRow | None = None
    job: JobRow | None = None
    answers: bool | None = None
    unreachable: tuple[NodeName, ...] = ()
    age_s: float = 0.0
    sent: dict[RecoveryStep, float]
    refused: frozenset[RecoveryStep] = frozenset()
    returned_s: float = math.inf
    goes_on: bool = False
    comment: str | None = None
    given_up: bool = False
    being_downed: bool = False
    anew: bool = False
    heir: JobRow | None = None
    untrue: bool = False
    kept_off: bool = False
    waits_s: float = math.inf

    def lately(self, step: RecoveryStep) -> bool:
        """Whether a command was sent and may still be working."""
        return self.sent.get(step, SETTLE_S) < SETTLE_S


@dataclass(frozen=True, slots=True)
class NextCommand:
    """What to do next, and why."""

    step: RecoveryStep
    why: str = ""


def _give(step: RecoveryStep, facts: ActionFacts, why: str = "") -> NextCommand:
    """Return a command as what comes next, or that one given lately is waited for."""
    return NextCommand(RecoveryStep.WAIT if facts.lately(step) else step, why)


def next_command(action: ActionRecord, facts: ActionFacts) -> NextCommand:  # noqa: PLR0911 - one return for each remedy
    """Return the next step of an action; WAIT when only time can help."""
    remedy = Remedy(action.remedy)
    if remedy is Remedy.RESTART and (promised := _heir_step(action, facts)):
        return promised
    if facts.age_s > LONGEST_S:
        return NextCommand(RecoveryStep.GIVE_UP, f"not done after {LONGEST_S:.0f} s")
    match remedy:
        case Remedy.DRAIN | Remedy.DRAIN_DOWN:
            sick = f"-{IncidentKind.NODE_SICK}-" in action.incident
            return _node_step(facts, down=remedy is Remedy.DRAIN_DOWN, dead=not sick)
        case Remedy.RESUME:
            return _resume_step(facts)
        case Remedy.RESTART:
            return _job_step(action, facts)
        case Remedy.COMMENT:
            return _comment_step(action, facts)
        case Remedy.HOLD:
            return _hold_step(action, facts)
        case Remedy.NOTHING:
            return NextCommand(RecoveryStep.DONE, "nothing to do")


def _comment_step(action: ActionRecord, facts: ActionFacts) -> NextCommand:
    if facts.node is None:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm does not know the node")
    if with_our_comment(facts.node.comment, action.reason) == facts.node.comment:
        return NextCommand(RecoveryStep.DONE, "the node's comment says it")
    if facts.node.comment != ours_in_comment(facts.node.comment):
        return NextCommand(RecoveryStep.DONE, "told only: the node has a comment of an administrator's")
    if RecoveryStep.COMMENT in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused: the watchdog lacks an operator's rights")
    return _give(RecoveryStep.COMMENT, facts)


def _beyond_help(job: JobRow) -> NextCommand | None:
    """Return the end of an action whose job is over, or cannot be started again alone."""
    if job.state.final:
        return NextCommand(RecoveryStep.DONE, f"the job ended: {job.state.value}")
    return NextCommand(RecoveryStep.GIVE_UP, OF_A_WHOLE) if job.address.is_component else None


def _hold_step(action: ActionRecord, facts: ActionFacts) -> NextCommand:  # noqa: PLR0911 - a ladder: one return for each rung
    job = facts.job
    if job is None or action.attempt is None:
        return NextCommand(RecoveryStep.DONE, "Slurm does not know the job any more")
    if end := _beyond_help(job):
        return end
    # The reason comes first: whoever finds the job held finds it there.
    said = facts.comment is None or with_our_comment(facts.comment, action.reason) == facts.comment
    if not said and RecoveryStep.EXPLAIN not in facts.refused and RecoveryStep.EXPLAIN not in facts.sent:
        return NextCommand(RecoveryStep.EXPLAIN)
    if job.held:
        return NextCommand(RecoveryStep.DONE, f"held; `scontrol release {job.label}` lets it go")
    if RecoveryStep.HOLD in facts.refused or RecoveryStep.REQUEUE_HOLD in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused to hold the job")
    if job.state is JobState.PENDING:
        return _give(RecoveryStep.HOLD, facts)
    if job.state is not JobState.RUNNING:
        return NextCommand(RecoveryStep.WAIT, job.state.value.lower())
    return _end_held(facts, started_again=job.restarts > action.attempt.restart)


def _end_held(facts: ActionFacts, *, started_again: bool) -> NextCommand:
    if started_again:
        # By its user's `scontrol release`, maybe. Should it fail again, that is another verdict.
        return NextCommand(RecoveryStep.GIVE_UP, "the job was started again meanwhile")
    if unneeded := _unneeded(facts, RecoveryStep.REQUEUE_HOLD):
        return unneeded
    if facts.unreachable:
        return NextCommand(RecoveryStep.WAIT, f"until {', '.join(facts.unreachable)} is down")
    return _give(RecoveryStep.REQUEUE_HOLD, facts)


def _unneeded(facts: ActionFacts, step: RecoveryStep) -> NextCommand | None:
    """Return what comes in place of ending a job's run by this step; None where that is needed, or under way."""
    if facts.lately(step):
        return None
    if facts.goes_on:
        return NextCommand(RecoveryStep.GIVE_UP, "the job goes on by itself")
    if facts.returned_s < LISTEN_S:
        return NextCommand(RecoveryStep.WAIT, "for a word of its launcher")
    return None


def _node_step(facts: ActionFacts, *, down: bool, dead: bool) -> NextCommand:  # noqa: PLR0911 - a ladder: one return for each rung
    node = facts.node
    if node is None:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm does not know the node")
    if dead and facts.answers:
        return NextCommand(RecoveryStep.GIVE_UP, "the node answers again")
    if node.down:
        return NextCommand(RecoveryStep.DONE, "down")
    if not node.drained and RecoveryStep.DRAIN not in facts.refused:
        if dead and facts.answers is None:
            return NextCommand(RecoveryStep.WAIT, "not probed yet")
        return _give(RecoveryStep.DRAIN, facts)
    if not down and node.drained:
        return NextCommand(RecoveryStep.DONE, "drained")
    if RecoveryStep.DRAIN in facts.refused or RecoveryStep.DOWN in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused: the watchdog lacks an operator's rights")
    if facts.answers is None:
        return NextCommand(RecoveryStep.WAIT, "not probed yet")
    return _give(RecoveryStep.DOWN, facts)


def _resume_step(facts: ActionFacts) -> NextCommand:  # noqa: PLR0911 - a ladder: one return for each rung
    if facts.node is None:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm does not know the node")
    if not facts.node.drained and not facts.node.down:
        return NextCommand(RecoveryStep.DONE, "in service")
    if RecoveryStep.RESUME in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused")
    if not facts.node.reason.startswith(TAG):
        return NextCommand(RecoveryStep.GIVE_UP, "somebody else has taken it out of service since")
    if facts.answers is False or facts.age_s > WELL_S:
        return NextCommand(RecoveryStep.GIVE_UP, "it may not be well any more")
    if facts.answers is None:
        return NextCommand(RecoveryStep.WAIT, "not probed yet")
    return _give(RecoveryStep.RESUME, facts)


_COMING = frozenset({JobState.CONFIGURING, JobState.RUNNING})


def _job_step(action: ActionRecord, facts: ActionFacts) -> NextCommand:  # noqa: PLR0911 - a ladder: one return for each rung
    job, attempt = facts.job, action.attempt
    if job is None or attempt is None:
        return NextCommand(RecoveryStep.DONE, "Slurm does not know the job any more")
    if end := _beyond_help(job):
        return end
    if job.held:
        return NextCommand(RecoveryStep.GIVE_UP, f"the job is held; `scontrol release {job.label}` lets it go")
    if job.state is JobState.PENDING:
        return _waiting_step(action, facts, job)
    if job.restarts > attempt.restart:
        return (
            NextCommand(RecoveryStep.DONE, "running again")
            if job.state in _COMING
            else NextCommand(RecoveryStep.WAIT)
        )
    if job.state is not JobState.RUNNING:
        return NextCommand(RecoveryStep.WAIT, job.state.value.lower())
    if RecoveryStep.REQUEUE in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused to requeue the job")
    if unneeded := _unneeded(facts, RecoveryStep.REQUEUE):
        return unneeded
    if facts.unreachable:
        # A requeue now would hang in COMPLETING until Slurm's own timeout, and with GRES lose the job.
        return _unreachable_step(facts, job)
    return _give(RecoveryStep.REQUEUE, facts)


def _heir_step(action: ActionRecord, facts: ActionFacts) -> NextCommand | None:  # noqa: PLR0911 - one return for each rung
    """What follows once a job was submitted in place of this one; None where none was, or it came to nothing."""
    job, heir, attempt = facts.job, facts.heir, action.attempt
    if heir is None or attempt is None:
        return None
    bequeathed = ours_in_comment(facts.comment or "") == left_for(heir.id)
    if not _is_held(heir, facts, bequeathed=bequeathed):
        if heir.state.final and not bequeathed:
            return None  # dismissed
        return NextCommand(RecoveryStep.DONE, f"{RESUBMITTED} {heir.id}")
    # However long whoever began this was away: what was promised to the old job's user is done.
    late = min(facts.age_s, facts.returned_s) > LONGEST_S
    if RecoveryStep.SET_FREE in facts.refused or (
        late and (bequeathed or facts.sent.get(RecoveryStep.DISMISS, 0.0) >= SETTLE_S)
    ):
        release = f"`scontrol release {heir.label}` lets it go"
        return NextCommand(RecoveryStep.GIVE_UP, f"job {heir.id}, submitted in its place, is held; {release}")
    if bequeathed:
        over = job is None or job.state.final or job.state is JobState.COMPLETING
        return _give(RecoveryStep.SET_FREE if over else RecoveryStep.CANCEL, facts)
    if late or not _needs_heir(job, attempt, facts):
        return _give(RecoveryStep.DISMISS, facts)
    if not facts.given_up:
        return NextCommand(RecoveryStep.WAIT, "not probed long enough")
    return _give(RecoveryStep.BEQUEATH, facts)


def _is_held(heir: JobRow, facts: ActionFacts, *, bequeathed: bool) -> bool:
    """Whether the heir waits to be let go, as it was submitted; a time to begin hides that for a moment."""
    hidden = not bequeathed or (heir.reason == "BeginTime" and RecoveryStep.SET_FREE not in facts.sent)
    return heir.state is JobState.PENDING and (heir.reason.startswith(HELD) or hidden)


def _needs_heir(job: JobRow | None, attempt: Attempt, facts: ActionFacts) -> bool:
    """Whether nothing else helps the job: its user has not cancelled it, nor was Slurm, or its host, quicker."""
    if job is None or job.state is not JobState.RUNNING or job.restarts > attempt.restart:
        return False
    return job.batch_host in facts.unreachable


def _unreachable_step(facts: ActionFacts, job: JobRow) -> NextCommand:
    """What can be done while an allocated node is unreachable and Slurm has not given it up."""
    wait = NextCommand(RecoveryStep.WAIT, f"until {', '.join(facts.unreachable)} is down")
    if facts.being_downed or not facts.given_up:
        return wait
    # Slurm takes the batch host out of no job (measured).
    if job.batch_host not in facts.unreachable and RecoveryStep.SHED not in facts.refused:
        return wait if facts.lately(RecoveryStep.SHED) else NextCommand(RecoveryStep.SHED)
    if not facts.anew or RecoveryStep.SUBMIT in facts.refused or facts.lately(RecoveryStep.SUBMIT):
        return wait
    return NextCommand(RecoveryStep.SUBMIT)


def _waiting_step(action: ActionRecord, facts: ActionFacts, job: JobRow) -> NextCommand:  # noqa: PLR0911 - one for each rung
    if RecoveryStep.RELEASE in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused to clear the hold")
    released = facts.sent.get(RecoveryStep.RELEASE)
    if released is None and min(facts.waits_s, facts.sent.get(RecoveryStep.REQUEUE, math.inf)) < NEXT_SECOND_S:
        return NextCommand(RecoveryStep.WAIT, "for the second after its end")
    if released is None or (job.reason in {"BeginTime", LAUNCH_FAILED} and released >= SETTLE_S):
        return NextCommand(RecoveryStep.RELEASE)
    if RecoveryStep.RELAX in facts.sent and facts.kept_off and RecoveryStep.RELAX not in facts.refused:
        return _give(RecoveryStep.RELAX, facts, "it showed no effect")
    if RecoveryStep.RELAX not in facts.sent:
        if released < RELAX_S:
            return NextCommand(RecoveryStep.WAIT, "released")
        if facts.untrue:
            return NextCommand(RecoveryStep.WAIT, "until Slurm knows that the node is dead")
        if action.exclude or facts.kept_off:
            return NextCommand(RecoveryStep.RELAX, "no other nodes are free")
    return NextCommand(RecoveryStep.DONE, f"waits in the queue: {job.reason or 'no reason given'}")
