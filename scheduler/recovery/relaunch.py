"""From what is seen of an attempt to what to do about it; pure.

The rules, in their order of precedence:

- A node is lost by the witnesses against it (`witnesses.py`); ranks on it: relaunch without it, or be stranded.
- Of most nodes at once our own wire says less: that is us, a switch or a controller: touch nothing, for a while.
- A node that was rebooted, too fast to be missed: its ranks are gone, relaunch.
- Ranks that failed while every node answers questions asked after that: `rank_failure.py` says why, and whether
  another attempt makes sense.
- Ranks that hang while every node answers: relaunch, without the nodes of those to blame where spares are left.
- A rank that holds the others up for long, where such are to be replaced and a spare is left: the same.
- Relaunching again and again from one point helps nobody: give up.

Relaunched is on as many nodes as before; on fewer only where the job is elastic and no more are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.rank_failure import Cause, Failed, Ran, RelaunchLimits, Tried, diagnose, stop_for
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.recovery.witnesses import NodeWitness, Thresholds, is_proved

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaunchPolicy(Thresholds):
    """When evidence is enough, and how often ranks are started again."""

    limits: RelaunchLimits = field(default_factory=RelaunchLimits)


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
    stepped_s: float = math.inf  # since any rank of this attempt made a new step; inf: none has told of one
    hung: str = ""  # why ranks count as hung; empty while they do not
    slow: str = ""  # why a rank is to be replaced; empty while none is
    suspects: tuple[NodeName, ...] = ()  # the nodes to blame for that, where it can be told
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
    lost, away, deaf = _silent(seen, policy)
    together = _silent_together(seen, policy)
    if away and together:
        return _at_once(f"{len(away)} of {len(seen.silence)} nodes are silent at once: a switch, or us")
    if lost:
        return _about_lost(seen, policy, lost)
    if seen.rebooted:
        because = f"{', '.join(seen.rebooted)} rebooted, and the ranks there are gone"
        return _again(seen, policy, Cause.NODE_LOST, IncidentKind.NODE_SILENT, because, suspects=seen.rebooted)
    if seen.exit_code is not None:
        return _about_failed(seen, policy, seen.exit_code)
    return _about_late(seen, policy, deaf if together else ())


def _at_once(because: str) -> AttemptVerdict:
    return AttemptVerdict(NextMove.WAIT, f"{because}; touching nothing", kind=IncidentKind.AGENTS_SILENT)


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


def _silent(seen: AttemptEvidence, policy: RelaunchPolicy) -> tuple[tuple[NodeName, ...], ...]:
    """Return the nodes that are lost; of the other silent ones those out of contact; and those in contact."""
    together = _silent_together(seen, policy)
    silent = [
        node
        for node in (*seen.active, *seen.spares)
        if node != seen.here and seen.silence[node].answer_s >= policy.silence_s
    ]
    lost = tuple(node for node in silent if _is_lost(node, seen, policy, together=together))
    away = tuple(node for node in silent if node not in lost and seen.silence[node].contact_s >= policy.silence_s)
    return lost, away, tuple(node for node in silent if node not in (*lost, *away))


def _is_lost(node: NodeName, seen: AttemptEvidence, policy: RelaunchPolicy, *, together: bool) -> bool:
    one = seen.silence[node]
    away = one.contact_s >= policy.silence_s
    said = {
        NodeWitness.AGENT: one.deaf_s >= policy.silence_s or away,
        NodeWitness.MACHINE: away and not together,  # of most nodes it is our own wire that says both
        NodeWitness.RANKS: bool(seen.hung) and not together,
        NodeWitness.SLURM: node in seen.taken,
    }
    if is_proved([witness for witness, speaks in said.items() if speaks]):
        return True
    # Steps that others make with it clear a node whose agent alone is silent.
    alone_s = 0.0 if together else min(one.deaf_s, seen.stepped_s)
    return max(one.contact_s, alone_s) >= policy.brake_s


def _about_late(seen: AttemptEvidence, policy: RelaunchPolicy, deaf: tuple[NodeName, ...]) -> AttemptVerdict:
    if deaf:
        return _at_once(f"agents on {', '.join(deaf)} are silent, and their machines answer")
    doubtful = _doubtful(seen, policy)
    if seen.hung:
        if doubtful:
            return AttemptVerdict(NextMove.WAIT, "no progress, and a node is in doubt")
        because = f"{seen.hung} while every node answers"
        return _again(seen, policy, Cause.HANG, IncidentKind.RANKS_HUNG, because, suspects=seen.suspects)
    if not seen.slow or doubtful or len(seen.spares) < len(seen.suspects) or seen.tried.since_progress:
        return AttemptVerdict(NextMove.CONTINUE)  # slow is better than not at all
    again = _again(seen, policy, Cause.HANG, IncidentKind.STRAGGLER, seen.slow, suspects=seen.suspects)
    return again if again.move is NextMove.RELAUNCH else AttemptVerdict(NextMove.CONTINUE)


def _about_lost(seen: AttemptEvidence, policy: RelaunchPolicy, lost: tuple[NodeName, ...]) -> AttemptVerdict:
    doubtful = _doubtful(seen, policy)
    longest = max(seen.silence[node].answer_s for node in lost)
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
    # For so long an agent may be starved, like a launcher: then they are judged by what is known.
    if unproved and max(silence.answer_s for silence in unproved) < policy.launcher_lost_s:
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
    code = code or (AGAIN_CODE if cause is Cause.NODE_LOST else 1)
    return replace(again, move=NextMove.FAILED, because=f"{because}; {stop[1]}", code=code, kind=stop[0])


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
