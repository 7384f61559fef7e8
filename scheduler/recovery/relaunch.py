"""From what is seen of an attempt to what to do about it; pure.

The rules, in their order of precedence:

- Many nodes silent at once is us, a switch or a controller, not many bad nodes: touch nothing, for a while.
- A node that nothing was heard of for `silence_s` is lost; ranks on it: relaunch without it, or be stranded.
- A node that was rebooted, too fast to be missed: its ranks are gone, relaunch.
- Ranks that failed while every node answers questions asked after that: `rank_failure.py` says why, and whether
  another attempt makes sense.
- Ranks that hang while every node answers: relaunch, without the nodes of those to blame where spares are left.
- A rank that holds the others up for long, where such are to be replaced and a spare is left: the same.
- Relaunching again and again from one point helps nobody: give up.

Relaunched is on as many nodes as before; on fewer only where the job is elastic and no more are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.rank_failure import Cause, Failed, Ran, RelaunchLimits, Tried, diagnose, stop_for
from deeplink.scheduler.recovery.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName


AGAIN_CODE = 75  # EX_TEMPFAIL: the job itself is not to blame, and may be submitted again


@dataclass(frozen=True, slots=True)
class Silence:
    """A node's silence, in seconds."""

    answer_s: float  # since its agent last answered
    contact_s: float  # the same, or its machine did: it accepted a connection, or answered at slurmd's port
    question_s: float  # since the newest question that was answered was asked: what it knew before does not count
    answering_s: float = 0.0  # for how long it has answered by now without a gap of GAP_S
    deaf_s: float = 0.0  # for how long its machine has been in contact without an answer of its agent


class NextMove(Enum):
    """The next move."""

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
    """The thresholds, in seconds."""

    silence_s: float = 2.5  # a node out of contact for so long is lost
    starved_s: float = 30.0  # a node whose machine is in contact, and its agent silent for so long, is lost
    doubt_s: float = 1.5  # from here on a node is in doubt: no ranks are put on it
    settle_s: float = 0.5  # after ranks failed, every node must answer a question asked this much later
    partition_s: float = 60.0  # how long to touch nothing while most nodes are silent
    limits: RelaunchLimits = field(default_factory=RelaunchLimits)  # how often ranks are started again


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvidence:
    """The state of an attempt at one moment."""

    active: tuple[NodeName, ...]  # nodes that run ranks
    spares: tuple[NodeName, ...]  # nodes that could, besides
    silence: Mapping[NodeName, Silence]  # of these nodes, and of no others
    rebooted: tuple[NodeName, ...] = ()  # active nodes on another boot of their kernel than at the ranks' start
    here: NodeName | None = None  # the node we run on ourselves: since we do, it lives, whatever its agent does
    exit_code: int | None = None  # of the rank step; None while it runs
    exited_for_s: float = 0.0  # since it ended
    ran_for_s: float = 0.0  # since it was started
    failed: Failed = field(default_factory=Failed)  # what is known of the first failed rank
    hung: str = ""  # why ranks count as hung; empty while they do not
    slow: str = ""  # why a rank is to be replaced; empty while none is
    suspects: tuple[NodeName, ...] = ()  # the nodes to blame for that, where it can be told
    going_on: tuple[NodeName, ...] = ()  # silent nodes whose ranks go on: the others do steps with them
    # what is wrong with nodes, by their own checks
    health: Mapping[NodeName, tuple[Finding, ...]] = field(default_factory=dict)
    # what each node's own clock shows now; those that did not tell are left out
    unix: Mapping[NodeName, float] = field(default_factory=dict)
    taken: Container[NodeName] = ()  # nodes that Slurm has taken from the job: of these there is no doubt
    fewest: int | None = None  # nodes that are enough where no more are left; None: as many as now
    tried: Tried = field(default_factory=Tried)  # what was tried before


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """The next move, the nodes concerned, and why."""

    move: NextMove
    because: str = ""
    lost: tuple[NodeName, ...] = ()  # nodes nothing more is to be put on
    suspects: tuple[NodeName, ...] = ()  # nodes to leave out of the next attempt, if there are enough others
    slow: bool = False  # whether it is for a straggler
    code: int = 0  # exit code of the ranks that failed, or of the whole run, where it ends
    kind: IncidentKind | None = None  # of the incident; None where there is none
    cause: Cause | None = None  # who is to blame for the attempt's end; None where it does not end


def is_alone(seen: AttemptEvidence, policy: RelaunchPolicy) -> bool:
    """Whether nobody is heard beyond the node we run on: that may be as well the others as us."""
    others = {node for node in (*seen.active, *seen.spares) if node != seen.here}
    return seen.here is not None and bool(others) and others <= _doubtful(seen, policy)


def decide(seen: AttemptEvidence, policy: RelaunchPolicy) -> AttemptVerdict:
    """Return what to do."""
    if seen.exit_code == 0:
        return AttemptVerdict(NextMove.SUCCEEDED)
    lost, starved = _lost_and_deaf(seen, policy)
    if lost:
        return _about_lost(seen, policy, lost)
    if seen.rebooted:
        because = f"{', '.join(seen.rebooted)} rebooted, and the ranks there are gone"
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, suspects=seen.rebooted)
    if seen.exit_code is not None:
        return _about_failed(seen, policy, seen.exit_code)
    if starved:
        because = (
            f"agents on {', '.join(starved)} are silent, most at once, and their machines answer; touching nothing"
        )
        return AttemptVerdict(NextMove.WAIT, because, kind=IncidentKind.AGENTS_SILENT)
    return _about_late(seen, policy) if seen.hung or seen.slow else AttemptVerdict(NextMove.CONTINUE)


def _stranded(because: str, lost: tuple[NodeName, ...]) -> AttemptVerdict:
    kind, cause = IncidentKind.JOB_STRANDED, Cause.NODE_LOST
    return AttemptVerdict(NextMove.STRANDED, because, lost=lost, kind=kind, cause=cause)


def too_few(verdict: AttemptVerdict, taken: Iterable[NodeName], known: Container[NodeName]) -> AttemptVerdict:
    """Return that the job is stranded: Slurm has taken nodes from it that the verdict counted on."""
    lost = (*verdict.lost, *(node for node in taken if node in known and node not in verdict.lost))
    return _stranded(f"{verdict.because}; too few nodes are left to the job", lost)


def _doubtful(seen: AttemptEvidence, policy: RelaunchPolicy) -> set[NodeName]:
    silent = {node for node, silence in seen.silence.items() if silence.answer_s >= policy.doubt_s}
    return silent - {seen.here}


def _silent_together(seen: AttemptEvidence, policy: RelaunchPolicy) -> bool:
    # Slurm's word ends the doubt: those that it has called down fall silent by themselves, not with the others.
    nodes = [node for node in (*seen.active, *seen.spares) if node not in seen.taken]
    return 2 * len(_doubtful(seen, policy).intersection(nodes)) > len(nodes) > 1


def _lost_and_deaf(
    seen: AttemptEvidence, policy: RelaunchPolicy
) -> tuple[tuple[NodeName, ...], tuple[NodeName, ...]]:
    """Return the nodes that are lost, and those that only seem so."""
    # An agent that falls silent with most others is not ill: the wire is, or whatever they have in common.
    silence = {node: seen.silence[node] for node in (*seen.active, *seen.spares) if node != seen.here}
    away = [node for node, one in silence.items() if one.contact_s >= policy.silence_s]
    starved = [
        node for node, one in silence.items() if one.deaf_s >= policy.starved_s and node not in seen.going_on
    ]
    together = _silent_together(seen, policy)
    lost = tuple(node for node in silence if node in away or (node in starved and not together))
    return lost, tuple(node for node in silence if node in starved and node not in lost)


def _about_late(seen: AttemptEvidence, policy: RelaunchPolicy) -> AttemptVerdict:
    doubtful = _doubtful(seen, policy)
    if seen.hung:
        if doubtful:
            return AttemptVerdict(NextMove.WAIT, "no progress, and a node is in doubt")
        because = f"{seen.hung} while every node answers"
        return _again(seen, policy, Cause.HANG, IncidentKind.RANKS_HUNG, because, suspects=seen.suspects)
    if doubtful or len(seen.spares) < len(seen.suspects) or seen.tried.since_progress:
        return AttemptVerdict(NextMove.CONTINUE)  # slow is better than not at all
    again = _again(seen, policy, Cause.HANG, IncidentKind.STRAGGLER, seen.slow, suspects=seen.suspects)
    return replace(again, slow=True) if again.move is NextMove.RELAUNCH else AttemptVerdict(NextMove.CONTINUE)


def _about_lost(seen: AttemptEvidence, policy: RelaunchPolicy, lost: tuple[NodeName, ...]) -> AttemptVerdict:
    doubtful = _doubtful(seen, policy)
    together = len(seen.active) + len(seen.spares)
    longest = max(seen.silence[node].answer_s for node in lost)
    if _silent_together(seen, policy) and longest < policy.partition_s:
        because = f"{len(doubtful)} of {together} nodes are silent at once: a switch, or us; touching nothing"
        return AttemptVerdict(NextMove.WAIT, because, kind=IncidentKind.AGENTS_SILENT)
    because = f"nothing heard of {', '.join(lost)} for {longest:.1f} s"
    if not set(lost) & set(seen.active):
        return AttemptVerdict(NextMove.DROP_SPARES, because, lost=lost, kind=IncidentKind.NODE_SILENT)
    left = [node for node in (*seen.active, *seen.spares) if node not in doubtful]
    short = len(seen.active) - len(left)
    if short <= 0:
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, lost=lost)
    if len(doubtful - set(lost)) >= short:
        return AttemptVerdict(NextMove.WAIT, f"{because}; others are in doubt")
    if seen.fewest is not None and len(left) >= seen.fewest:
        because = f"{because}; going on with fewer nodes"
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, lost=lost)
    return _stranded(f"{because}; {short} more than there are spares", lost)


def _about_failed(seen: AttemptEvidence, policy: RelaunchPolicy, code: int) -> AttemptVerdict:
    # A rank fails on a peer's death before that peer's node has been silent for long. What counts is an answer to
    # a question that was asked after the failure.
    least_s = seen.exited_for_s - policy.settle_s
    unproved = [seen.silence[node] for node in seen.active if seen.silence[node].question_s > least_s]
    if unproved and max(silence.answer_s for silence in unproved) < policy.starved_s:
        return AttemptVerdict(NextMove.WAIT, "ranks failed; asking whether a node did")
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
    again = AttemptVerdict(NextMove.RELAUNCH, because, lost, suspects, code=code, kind=kind, cause=cause)
    stop = stop_for(cause, code, kind, seen.tried, policy.limits)
    if stop is None:
        return again
    move = NextMove.FAILED if code else NextMove.GIVE_UP
    code = code or (AGAIN_CODE if cause is Cause.NODE_LOST else 1)
    return replace(again, move=move, because=f"{because}; {stop.because}", code=code, kind=stop.kind)


def select_nodes(
    usable: Sequence[NodeName],
    count: int,
    *,
    silence: Mapping[NodeName, Silence],
    doubt_s: float,
    here: NodeName | None = None,
    suspects: Collection[NodeName] = (),
    sick: Collection[NodeName] = (),
    out: Collection[NodeName] = (),
) -> list[NodeName]:
    """Return the nodes to choose `count` from: all good ones, and only as many others as are missing."""
    # Nodes in doubt are left out, unless too few are left: one that is silent just now is seen by the next
    # attempt.

    def badness(node: NodeName) -> int:
        if node != here and silence[node].answer_s >= doubt_s:
            return 4
        return 3 if node in out else 2 if node in sick else 1 if node in suspects else 0

    ordered = sorted(usable, key=badness)
    return ordered[: max(count, sum(not badness(node) for node in usable))]
