"""From what is seen of an attempt to what to do about it; pure.

The rules, in their order of precedence:

- Many nodes silent at once is us, a switch or a controller, not many bad nodes: touch nothing, for a while.
- A node that nothing was heard of for `silence_s` is lost; ranks on it: relaunch without it, or be stranded.
- A node that booted anew, too fast to be missed: its ranks are gone, relaunch.
- Ranks that failed while every node answers questions asked after that: `failure.py` says why, and whether another
  attempt makes sense.
- Ranks that hang while every node answers: relaunch, without the nodes of those to blame where spares are left.
- A rank that holds the others up for long, where such are to be replaced and a spare is left: the same.
- Relaunching again and again from one point helps nobody: give up.

Relaunched is on as many nodes as before; on fewer only where the job is elastic and no more are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.failure import Cause, Failed, Ran, RelaunchLimits, Tried, diagnose, stop_for
from deeplink.scheduler.watch.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from deeplink.scheduler.launch.agent_monitor import Silence
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import NodeName


AGAIN_CODE = 75
"""EX_TEMPFAIL: the job itself is not to blame, and may be submitted again."""


class NextMove(Enum):
    """What to do now."""

    CONTINUE = "carry on"
    WAIT = "wait"
    DROP_SPARES = "rest"
    RELAUNCH = "relaunch"
    STRANDED = "stranded"
    REQUEUE = "requeue"
    SUPERSEDED = "elsewhere"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaunchPolicy:
    """The thresholds, in seconds.

    Attributes:
        silence_s: a node out of contact for so long is lost.
        starved_s: a node whose machine is in contact but whose agent does not answer for so long is lost.
        doubt_s: from here on a node is in doubt: no ranks are put on it.
        settle_s: after ranks failed, every node must answer a question asked this much later.
        partition_s: how long to touch nothing while most nodes are silent.
        limits: how often ranks are started again.
    """

    silence_s: float = 2.5
    starved_s: float = 30.0
    doubt_s: float = 1.5
    settle_s: float = 0.5
    partition_s: float = 60.0
    limits: RelaunchLimits = field(default_factory=RelaunchLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvidence:
    """What is seen of an attempt at one moment.

    Attributes:
        active: nodes that run ranks.
        spares: nodes that could, besides.
        silence: of these nodes, and of no others.
        anew: active nodes that run another boot of their kernel than when the ranks were started.
        here: the node we run on ourselves: since we do, it lives, whatever its agent does.
        exit_code: of the rank step; None while it runs.
        exited_for_s: since it ended.
        ran_for_s: since it was started.
        failed: what is known of the first failed rank.
        hung: why ranks count as hung; empty while they do not.
        slow: why a rank is to be replaced; empty while none is.
        suspects: the nodes to blame for that, where it can be told.
        health: what is wrong with nodes, by their own checks.
        unix: what each node's own clock shows now; those that did not tell are left out.
        fewest: nodes that are enough where no more are left; None: as many as now.
        tried: what was tried before.
    """

    active: tuple[NodeName, ...]
    spares: tuple[NodeName, ...]
    silence: Mapping[NodeName, Silence]
    anew: tuple[NodeName, ...] = ()
    here: NodeName | None = None
    exit_code: int | None = None
    exited_for_s: float = 0.0
    ran_for_s: float = 0.0
    failed: Failed = field(default_factory=Failed)
    hung: str = ""
    slow: str = ""
    suspects: tuple[NodeName, ...] = ()
    health: Mapping[NodeName, tuple[HealthFinding, ...]] = field(default_factory=dict)
    unix: Mapping[NodeName, float] = field(default_factory=dict)
    fewest: int | None = None
    tried: Tried = field(default_factory=Tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptVerdict:
    """What to do, to whom, and why.

    Attributes:
        lost: nodes nothing more is to be put on.
        suspects: nodes to leave out of the next attempt, if there are enough others.
        slow: whether it is for a straggler.
        code: exit code of the ranks that failed, or of the whole run, where it ends.
        kind: of the incident; None where there is none.
        cause: who is to blame for the attempt's end; None where it does not end.
    """

    move: NextMove
    because: str = ""
    lost: tuple[NodeName, ...] = ()
    suspects: tuple[NodeName, ...] = ()
    slow: bool = False
    code: int = 0
    kind: IncidentKind | None = None
    cause: Cause | None = None


def is_alone(seen: AttemptEvidence, policy: RelaunchPolicy) -> bool:
    """Whether nobody is heard beyond the node we run on: that may be as well the others as us."""
    others = {node for node in (*seen.active, *seen.spares) if node != seen.here}
    return seen.here is not None and bool(others) and others <= _doubtful(seen, policy)


def decide(seen: AttemptEvidence, policy: RelaunchPolicy) -> AttemptVerdict:
    """Return what to do."""
    if seen.exit_code == 0:
        return AttemptVerdict(move=NextMove.SUCCEEDED)
    lost, deaf = _lost_and_deaf(seen, policy)
    if lost:
        return _about_lost(seen, policy, lost)
    if seen.anew:
        because = f"{', '.join(seen.anew)} booted anew, and the ranks there are gone"
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, suspects=seen.anew)
    if seen.exit_code is not None:
        return _about_failed(seen, policy)
    if deaf:
        because = f"agents on {', '.join(deaf)} are silent, most at once, and their machines answer"
        return AttemptVerdict(
            move=NextMove.WAIT, because=f"{because}; touching nothing", kind=IncidentKind.AGENTS_SILENT
        )
    return _about_late(seen, policy) if seen.hung or seen.slow else AttemptVerdict(move=NextMove.CONTINUE)


def too_few(verdict: AttemptVerdict, taken: Iterable[NodeName], known: Container[NodeName]) -> AttemptVerdict:
    """Return that the job is stranded: Slurm has taken nodes from it that the verdict counted on.

    Args:
        verdict: that the ranks are to be started again.
        taken: the nodes that are no longer the job's.
        known: those whose agents came up; of any other there is no silence to tell.
    """
    lost = (*verdict.lost, *(node for node in taken if node in known and node not in verdict.lost))
    because = f"{verdict.because}; too few nodes are left to the job"
    return AttemptVerdict(
        move=NextMove.STRANDED, because=because, lost=lost, kind=IncidentKind.JOB_STRANDED, cause=Cause.NODE_LOST
    )


def _lost_and_deaf(
    seen: AttemptEvidence, policy: RelaunchPolicy
) -> tuple[tuple[NodeName, ...], tuple[NodeName, ...]]:
    """Return the nodes that are lost, and those that only seem so.

    An agent that falls silent with most others is not ill: the wire is, or whatever they have in common.
    """
    others = [node for node in (*seen.active, *seen.spares) if node != seen.here]
    lost = tuple(node for node in others if _lost(seen.silence[node], policy))
    if not _silent_together(seen, policy):
        return lost, ()
    deaf = tuple(node for node in lost if seen.silence[node].contact_s < policy.silence_s)
    return tuple(node for node in lost if node not in deaf), deaf


def _about_late(seen: AttemptEvidence, policy: RelaunchPolicy) -> AttemptVerdict:
    doubtful = _doubtful(seen, policy)
    if seen.hung:
        if doubtful:
            return AttemptVerdict(move=NextMove.WAIT, because="no progress, and a node is in doubt")
        because = f"{seen.hung} while every node answers"
        return _again(seen, policy, Cause.HANG, IncidentKind.RANKS_HUNG, because, suspects=seen.suspects)
    if doubtful or len(seen.spares) < len(seen.suspects) or seen.tried.since_progress:
        return AttemptVerdict(move=NextMove.CONTINUE)  # slow is better than not at all
    again = _again(seen, policy, Cause.HANG, IncidentKind.STRAGGLER, seen.slow, suspects=seen.suspects)
    return replace(again, slow=True) if again.move is NextMove.RELAUNCH else AttemptVerdict(move=NextMove.CONTINUE)


def _lost(silence: Silence, policy: RelaunchPolicy) -> bool:
    return silence.contact_s >= policy.silence_s or silence.deaf_s >= policy.starved_s


def _silent_together(seen: AttemptEvidence, policy: RelaunchPolicy) -> bool:
    return 2 * len(_doubtful(seen, policy)) > len(seen.active) + len(seen.spares) > 1


def _doubtful(seen: AttemptEvidence, policy: RelaunchPolicy) -> set[NodeName]:
    return {
        node for node, silence in seen.silence.items() if node != seen.here and silence.answer_s >= policy.doubt_s
    }


def _about_lost(seen: AttemptEvidence, policy: RelaunchPolicy, lost: tuple[NodeName, ...]) -> AttemptVerdict:
    doubtful = _doubtful(seen, policy)
    together = len(seen.active) + len(seen.spares)
    longest = max(seen.silence[node].answer_s for node in lost)
    names = ", ".join(lost)
    if _silent_together(seen, policy) and longest < policy.partition_s:
        because = f"{len(doubtful)} of {together} nodes are silent at once: a switch, or us; touching nothing"
        return AttemptVerdict(move=NextMove.WAIT, because=because, kind=IncidentKind.AGENTS_SILENT)
    because = f"nothing heard of {names} for {longest:.1f} s"
    if not set(lost) & set(seen.active):
        return AttemptVerdict(move=NextMove.DROP_SPARES, because=because, lost=lost, kind=IncidentKind.NODE_SILENT)
    left = [node for node in (*seen.active, *seen.spares) if node not in doubtful]
    if len(left) >= len(seen.active):
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, lost=lost)
    if len(left) + len(doubtful - set(lost)) >= len(seen.active):
        return AttemptVerdict(move=NextMove.WAIT, because=f"{because}; others are in doubt")
    if seen.fewest is not None and len(left) >= seen.fewest:
        because = f"{because}; going on with fewer nodes"
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, lost=lost)
    short = len(seen.active) - len(left)
    because = f"{because}; {short} more than there are spares"
    return AttemptVerdict(
        move=NextMove.STRANDED, because=because, lost=lost, kind=IncidentKind.JOB_STRANDED, cause=Cause.NODE_LOST
    )


def _about_failed(seen: AttemptEvidence, policy: RelaunchPolicy) -> AttemptVerdict:
    # A rank fails on a peer's death before that peer's node has been silent for long. What counts is an answer to
    # a question that was asked after the failure.
    unproved = [
        node for node in seen.active if seen.silence[node].question_s > seen.exited_for_s - policy.settle_s
    ]
    if unproved and max(seen.silence[node].answer_s for node in unproved) < policy.starved_s:
        return AttemptVerdict(move=NextMove.WAIT, because="ranks failed; asking whether a node did")
    code = seen.exit_code or 1
    ran = {node: Ran(unix - seen.ran_for_s, unix - seen.exited_for_s) for node, unix in seen.unix.items()}
    found = diagnose(code, seen.failed, seen.active, seen.health, ran)
    return _again(seen, policy, found.cause, found.kind, found.because, suspects=found.suspects, code=code)


def _again(
    seen: AttemptEvidence,
    policy: RelaunchPolicy,
    cause: Cause,
    kind: IncidentKind,
    because: str,
    *,
    lost: tuple[NodeName, ...] = (),
    suspects: tuple[NodeName, ...] = (),
    code: int = 0,
) -> AttemptVerdict:
    """Return that the ranks are started again, or why not."""
    stop = stop_for(cause, code, kind, seen.tried, policy.limits)
    if stop is None:
        return AttemptVerdict(
            move=NextMove.RELAUNCH,
            because=because,
            lost=lost,
            suspects=suspects,
            code=code,
            kind=kind,
            cause=cause,
        )
    move = NextMove.FAILED if code else NextMove.GIVE_UP
    because = f"{because}; {stop.because}"
    code = code or (AGAIN_CODE if cause is Cause.NODE_LOST else 1)
    return AttemptVerdict(
        move=move, because=because, lost=lost, suspects=suspects, code=code, kind=stop.kind, cause=cause
    )
