"""From looks to findings: several bad looks in a row raise one, several good ones end it; pure.

What the kernel has recorded needs one look alone. A look that could not tell counts neither way. A finding that
comes back again and again stays longer each time, so that what flaps does not have the node drained and resumed in
turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Look, at_gravity, gravity
from deeplink.scheduler.watch.records import HealthFinding, HealthSeverity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.health.look import Complaint

MOST_SUBJECTS = 64
"""Subjects of a check that are remembered; beyond, new ones are not taken up until others end."""
FLAP_S = 3600.0
"""A finding that begins again within so long of its last beginning flaps."""
MOST_DOUBLINGS = 4
"""A flapping finding ends after at most 16 times as many good looks."""
COULD_NOT_TELL = ""
"""The subject of a finding that says a check could not tell."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How looks become findings.

    Attributes:
        bad: looks in a row that must be at least so bad before a finding rises to that.
        good: looks in a row that must be better before a finding falls or ends.
        most: the gravest a finding of this check may become.
    """

    bad: int = 3
    good: int = 3
    most: HealthSeverity = HealthSeverity.DRAIN


@dataclass(frozen=True, slots=True)
class SubjectState:
    """How one subject of a check stands.

    Attributes:
        level: gravity of the finding as it is told; 0: none is.
        runs: for each gravity from OBSERVE on, how many looks in a row were at least so bad.
        better: looks in a row that were better than `level`.
        best_worst: the worst of those better looks.
        began: when the finding began, or what it tells of last happened; Unix time, 0 while there is none.
        last_began: monotonic time of its last beginning; None before the first.
        doublings: how often the looks it takes to end it are doubled.
        problem: what the newest complaint said.
    """

    level: int = 0
    runs: tuple[int, int, int] = (0, 0, 0)
    better: int = 0
    best_worst: int = 0
    began: float = 0.0
    last_began: float | None = None
    doublings: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckState:
    """How one check stands: its subjects, and for how many looks in a row it could not tell."""

    subjects: Mapping[str, SubjectState] = field(default_factory=dict)
    unknown_looks: int = 0
    unknown: str = ""
    unknown_since: float = 0.0


@dataclass(frozen=True, slots=True)
class LookTime:
    """When a look was: by the clock for people, and by the one that never jumps."""

    unix: float
    monotonic: float


def folded(state: CheckState, look: Look, rule: Rule, now: LookTime) -> CheckState:
    """Return how the check stands after one more look."""
    look = look.bounded()
    bad = {complaint.subject: complaint for complaint in look.complaints}
    subjects: dict[str, SubjectState] = {}
    for subject in [*state.subjects, *(new for new in bad if new not in state.subjects)]:
        standing = state.subjects.get(subject, SubjectState())
        complaint = bad.get(subject)
        if complaint is not None:
            own = replace(rule, bad=1) if complaint.certain else rule
            standing = _seen(standing, min(gravity(complaint.severity), gravity(rule.most)), own, now)
            began = complaint.at_unix if standing.level and complaint.at_unix else standing.began
            standing = replace(standing, problem=complaint.problem, began=began)
        elif not look.unknown:
            standing = _seen(standing, 0, rule, now)
        subjects[subject] = standing
    subjects = _bounded(subjects, now)
    if not look.unknown:
        return CheckState(subjects)
    first = not state.unknown_looks
    return CheckState(subjects, state.unknown_looks + 1, look.unknown, now.unix if first else state.unknown_since)


def _seen(standing: SubjectState, seen: int, rule: Rule, now: LookTime) -> SubjectState:
    runs = (
        standing.runs[0] + 1 if seen >= 1 else 0,
        standing.runs[1] + 1 if seen >= 2 else 0,  # noqa: PLR2004 - COMMENT
        standing.runs[2] + 1 if seen >= 3 else 0,  # noqa: PLR2004 - DRAIN
    )
    standing = replace(standing, runs=runs)
    risen = max((level for level, run in enumerate(runs, 1) if run >= rule.bad), default=0)
    if risen > standing.level:
        return _risen(standing, risen, now)
    if seen >= standing.level:
        return replace(standing, better=0, best_worst=0)
    better, worst = standing.better + 1, max(standing.best_worst, seen)
    if better < rule.good << standing.doublings:
        return replace(standing, better=better, best_worst=worst)
    return replace(standing, level=worst, better=0, best_worst=0, began=standing.began if worst else 0.0)


def _risen(standing: SubjectState, level: int, now: LookTime) -> SubjectState:
    if standing.level:
        return replace(standing, level=level, better=0, best_worst=0)
    flaps = standing.last_began is not None and now.monotonic - standing.last_began < FLAP_S
    return replace(
        standing,
        level=level,
        better=0,
        best_worst=0,
        began=now.unix,
        last_began=now.monotonic,
        doublings=min(standing.doublings + 1, MOST_DOUBLINGS) if flaps else 0,
    )


def _bounded(subjects: Mapping[str, SubjectState], now: LookTime) -> dict[str, SubjectState]:
    """Return what is worth remembering: what is bad, then what was lately, until there is no room."""
    bad = {name: one for name, one in subjects.items() if one.level or any(one.runs)}
    lately = {
        name: one
        for name, one in subjects.items()
        if name not in bad and one.last_began is not None and now.monotonic - one.last_began < FLAP_S
    }
    return dict([*bad.items(), *lately.items()][:MOST_SUBJECTS])


def findings(check: str, state: CheckState, rule: Rule) -> dict[str, HealthFinding]:
    """Return what the check finds wrong now, by subject.

    That it cannot tell is a finding, too (UNKNOWN, of `COULD_NOT_TELL`): once it has lasted `rule.bad` looks, and
    where there is no other.
    """
    found = {
        subject: HealthFinding(
            check=check,
            severity=at_gravity(standing.level),
            problem=standing.problem,
            since_unix=standing.began,
        )
        for subject, standing in state.subjects.items()
        if standing.level
    }
    if not found and state.unknown_looks >= rule.bad:
        found[COULD_NOT_TELL] = HealthFinding(
            check=check, severity=HealthSeverity.UNKNOWN, problem=state.unknown, since_unix=state.unknown_since
        )
    return found


def as_complained(complaint: Complaint, rule: Rule) -> HealthSeverity:
    """Return what a complaint asks for within the check's limit."""
    return at_gravity(min(gravity(complaint.severity), gravity(rule.most)))
