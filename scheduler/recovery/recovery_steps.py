"""The next command of an action, from what Slurm says now. Pure.

An action is not a script with a place in it: after each command, and after a restart of the watchdog, what comes
next follows from what is true. So a watchdog killed between two commands finishes on return, and none is sent
twice once Slurm shows that it has worked.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.core.finding import Severity
from deeplink.core.text import printable
from deeplink.scheduler.recovery.evidence import TAG, Remedy
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.parse import OF_A_WHOLE
from deeplink.scheduler.slurm.states import LAUNCH_FAILED, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.records import ActionRecord, NodeRecord
    from deeplink.scheduler.slurm.parse import JobPlace, JobRow, NodeRow

SETTLE_S = 10.0  # a command that shows no effect for so long is sent again (it was lost, or its sender was killed)
NEXT_SECOND_S = 1.1
"""A job that is started again in the second in which its last run was ended, on a node of that run, is lost:
slurmd has revoked what was signed up to that second ("Killing non-startable batch job: Job credential revoked",
measured with 22.05)."""
RELAX_S = 15.0  # a job that waits in the queue for so long after its release may use the nodes we excluded again
LONGEST_S = 600.0  # an action that has not ended after so long is given up; the next verdict may begin another
LISTEN_S = 3.0
"""Whoever takes up the intent of a watchdog that was killed, or stopped, first hears the launcher for so long: it
may have helped itself meanwhile."""
WELL_S = 30.0  # that a node is well again is true for so long; then it is to be seen again


# Our part of a comment in Slurm: on a job, on a node.

LONGEST_COMMENT = 200  # characters of ours: squeue and sinfo print a comment on one line
_JOINT = " | "
_OURS = re.compile(rf"(?:^|{re.escape(_JOINT)}){re.escape(TAG)}.*\Z", re.DOTALL)


def comment_of(text: str) -> str:
    r"""Return a text as it can stand in a comment: one line, not too long.

    >>> comment_of("two\nlines")
    'two lines'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST_COMMENT else f"{line[: LONGEST_COMMENT - 3]}..."


def ours_in_comment(comment: str) -> str:
    """Return what of a comment is ours; empty where nothing is.

    >>> ours_in_comment("mine | deeplink: held"), ours_in_comment("of deeplink: I know nothing")
    ('deeplink: held', '')
    """
    found = _OURS.search(comment)
    return found[0].removeprefix(_JOINT) if found else ""


def with_our_comment(comment: str, ours: str) -> str:
    """Return a comment with our words behind those of others, in place of what we said before.

    >>> with_our_comment("mine | deeplink: old", "deeplink: new"), with_our_comment("", "deeplink: new")
    ('mine | deeplink: new', 'deeplink: new')
    """
    theirs = _OURS.sub("", comment)
    return _JOINT.join(filter(None, (theirs, ours)))


class RecoveryStep(Enum):
    """One command, or none."""

    COMMENT = "comment"
    DRAIN = "drain"
    DOWN = "down"
    RESUME = "resume"
    DROP_NODES = "drop nodes"  # what is dead, out of the job's allocation
    REQUEUE = "requeue"
    RELEASE = "release"
    RELAX = "relax"
    WAIT = "wait"
    DONE = "done"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFacts:
    """What is true about an action's job or node now."""

    node: NodeRow | None = None  # as Slurm tells it; None: it is about none, or Slurm does not know it
    job: JobRow | None = None  # the job; None when the action is about none, or Slurm does not know it any more
    answers: bool | None = None  # the node's slurmd, our probes; None: unknown, or not silent for long
    unreachable: tuple[NodeName, ...] = ()  # allocated nodes that neither answer nor are down by Slurm's word
    age_s: float = 0.0  # since the intent was written
    sent: dict[RecoveryStep, float]  # commands sent, and for how long they have had time to work
    refused: frozenset[RecoveryStep] = frozenset()  # commands that Slurm refused, and would refuse again
    returned_s: float = math.inf  # since we took the action up; inf: we began it, and were there all the time
    goes_on: bool = False  # the launcher has told us since that its job goes on: it needs no help any more
    given_up: bool = False  # the unreachable nodes are those that the verdict calls dead, silent for long enough
    being_downed: bool = False  # an action of ours is about to set one of them down
    excluded_is_silent: bool = False  # and Slurm would start the job on it all the same
    kept_off: bool = False  # nodes that we exclude are on record, of this restart or of an earlier one
    waits_s: float = math.inf  # for how long we have seen the job wait in the queue, at least

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
    try:
        remedy = Remedy(action.remedy)
    except ValueError:  # of a watchdog of another release that was ended meanwhile
        return NextCommand(RecoveryStep.GIVE_UP, f"{action.remedy} is not done any more")
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
        case Remedy.NOTHING:
            return NextCommand(RecoveryStep.DONE, "nothing to do")


def _comment_step(action: ActionRecord, facts: ActionFacts) -> NextCommand:
    if facts.node is None:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm does not know the node")
    if with_our_comment(facts.node.comment, action.reason) == facts.node.comment:
        return NextCommand(RecoveryStep.DONE, "the node's comment says it")
    if facts.node.comment != ours_in_comment(facts.node.comment):
        return NextCommand(RecoveryStep.DONE, "reported only: the node already has an administrator's comment")
    if RecoveryStep.COMMENT in facts.refused:
        return NextCommand(RecoveryStep.GIVE_UP, "Slurm refused: the watchdog lacks an operator's rights")
    return _give(RecoveryStep.COMMENT, facts)


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
    if job.state.final:
        return NextCommand(RecoveryStep.DONE, f"the job ended: {job.state.value}")
    if job.address.is_component:
        return NextCommand(RecoveryStep.GIVE_UP, OF_A_WHOLE)
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
    return _requeue_step(facts, job)


def _requeue_step(facts: ActionFacts, job: JobRow) -> NextCommand:
    if not facts.lately(RecoveryStep.REQUEUE):
        if facts.goes_on:
            return NextCommand(RecoveryStep.GIVE_UP, "the job goes on by itself")
        if facts.returned_s < LISTEN_S:
            return NextCommand(RecoveryStep.WAIT, "for a word of its launcher")
    if facts.unreachable:
        # A requeue now would hang in COMPLETING until Slurm's own timeout, and with GRES lose the job.
        return _unreachable_step(facts, job)
    return _give(RecoveryStep.REQUEUE, facts)


def _unreachable_step(facts: ActionFacts, job: JobRow) -> NextCommand:
    """What can be done while an allocated node is unreachable and Slurm has not given it up."""
    wait = NextCommand(RecoveryStep.WAIT, f"until {', '.join(facts.unreachable)} is down")
    if facts.being_downed or not facts.given_up:
        return wait
    # Slurm takes the batch host out of no job (measured): there its own DOWN is waited for.
    if job.batch_host in facts.unreachable or RecoveryStep.DROP_NODES in facts.refused:
        return wait
    return wait if facts.lately(RecoveryStep.DROP_NODES) else NextCommand(RecoveryStep.DROP_NODES)


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
        if facts.excluded_is_silent:
            return NextCommand(RecoveryStep.WAIT, "until Slurm knows that the node is dead")
        if action.exclude or facts.kept_off:
            return NextCommand(RecoveryStep.RELAX, "no other nodes are free")
    return NextCommand(RecoveryStep.DONE, f"waits in the queue: {job.reason or 'no reason given'}")


# Which nodes a job that starts again is kept off: few, known, and only while there is reason to.

KEPT_OFF_S = 3_600.0  # A suspicion against a node that nothing has confirmed is forgotten after so long
LOOKED_AT_S = 60.0  # what a node's agent says so long after the suspicion is about the node as it is since
LEAST = 4  # so many nodes may be excluded in a partition however small, as far as the job could still start


def still_suspected(
    since: Mapping[NodeName, float], told: Mapping[NodeName, NodeRecord], now_unix: float
) -> tuple[NodeName, ...]:
    """Return the nodes that an earlier restart excluded and this one does, too; the newest suspicion first."""
    # Not those whose agent has been heard since without anything to find fault with, nor any after an hour.

    def cleared(name: NodeName, unix: float) -> bool:
        node = told.get(name)
        heard = node is not None and node.seen_unix - node.silent_s > unix + LOOKED_AT_S
        return node is not None and heard and all(finding.severity in _HARMLESS for finding in node.health)

    kept = [name for name, unix in since.items() if now_unix - unix < KEPT_OFF_S and not cleared(name, unix)]
    return tuple(sorted(kept, key=lambda name: (-since[name], name)))


_HARMLESS = frozenset({Severity.UNKNOWN, Severity.NOTE})


def bounded(
    wanted: Iterable[NodeName],
    place: JobPlace,
    partition: AbstractSet[NodeName],
    nodes: Mapping[NodeName, NodeRow],
    silent: AbstractSet[NodeName] = frozenset(),
) -> tuple[NodeName, ...]:
    """Return as many of the nodes, the first ones first, as may be excluded."""
    # Of those that could serve: a tenth of the partition at most, or four nodes where that is more, never so many
    # that too few would be left for the job. Nodes that do not answer, or that Slurm has given up, take no room,
    # so that a whole leaf that is cut off is left out. Names that the cluster does not know are not passed on.
    lost = {name for name, row in nodes.items() if row.down or row.drained or name in silent}
    serving = partition & nodes.keys() - lost - {*place.excluded}
    room = min(max(LEAST, len(partition) // 10), len(serving) - place.nodes)
    kept: list[NodeName] = []
    for name in dict.fromkeys(wanted):
        costs = name in serving
        if name in nodes and (not costs or room > 0):
            kept.append(name)
            room -= costs
    return tuple(kept)


def required_without(place: JobPlace, excluded: AbstractSet[NodeName]) -> tuple[NodeName, ...] | None:
    """Return what of the nodes that a job must run on to ask for still; None where that need not change."""
    # A list of all its nodes is a hint of the day it was submitted, and binds it to where it ran: all of it goes.
    # Of a shorter one, which only its user can have meant, the excluded nodes go.
    if not excluded & {*place.required}:
        return None
    rest = tuple(name for name in place.required if name not in excluded)
    return rest if len(place.required) < place.nodes else ()


def release_changes(
    place: JobPlace, wanted: AbstractSet[NodeName], required: tuple[NodeName, ...] | None
) -> dict[str, str]:
    """Return what to change, in scontrol's words, about the nodes a job may not, and must, start on."""
    changes = {} if wanted == {*place.excluded} else {"ExcNodeList": fold(sorted(wanted)) if wanted else ""}
    if required is not None:  # it starts nowhere if it must run on a node that it must not run on
        changes["ReqNodeList"] = fold(required) if required else ""
    return changes
