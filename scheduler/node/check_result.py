"""What one look of a check sees; pure values."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.finding import Finding, Severity
from deeplink.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_COMPLAINTS = 32  # subjects a check may complain of at once; of more the gravest are kept
LONGEST_PROBLEM = 256
MOST_SUBJECTS = 64  # subjects of a check that are remembered; beyond, new ones are not taken up until others end
FLAP_S = 3600.0  # a finding that begins again within so long of its last beginning flaps
MOST_DOUBLINGS = 4  # a flapping finding ends after at most 16 times as many good looks
_LEVELS = (Severity.NOTE, Severity.WARNING, Severity.ERROR)
COULD_NOT_TELL = ""  # the subject of a finding that says a check could not tell
MOST = 64
FIRST_WITHIN_S = 5.0
"""First looks are spread over so long: agents that start together do not write to their disks together."""
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that a look finds wrong."""

    subject: str  # what it is about, the same from look to look ("/home", "gpu 3 ecc"); its hysteresis hangs on it
    severity: Severity  # what it asks for, before the check's own limit
    problem: str  # for people, with the figures
    certain: bool = False  # the kernel or a driver has recorded it: one look is enough for a finding
    # when it last happened, for what happens in a moment: the finding is since then. 0: it lasts.
    at_unix: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """What one look of a check sees."""

    complaints: tuple[Complaint, ...] = ()  # what is wrong; at most one per subject counts
    unknown: str = ""  # why the check could not tell of all else; empty where what is not complained of is well

    def bounded(self) -> Look:
        """Return it with one complaint per subject, the gravest, of bounded number and length."""
        kept: dict[str, Complaint] = {}
        for complaint in sorted(self.complaints, key=lambda one: (-one.severity, one.subject)):
            if len(kept) < MOST_COMPLAINTS:
                short = replace(
                    complaint, subject=one_line(complaint.subject), problem=one_line(complaint.problem)
                )
                kept.setdefault(complaint.subject, short)
        return Look(tuple(kept.values()), one_line(self.unknown))


GOOD = Look()


class NodeCheck(ABC):
    """One of the checks that DeepLink has; what a look raises means that it could not tell."""

    __slots__ = ()

    @abstractmethod
    def look(self) -> Look:
        """Look once; called from one thread at a time."""

    def hung(self, _age_s: float, /) -> Look | None:
        """Return, at once, what a look says that has not ended for so many seconds; None: it cannot tell."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what a look may have left behind."""


def observe(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint to be seen on pages and in metrics."""
    return Complaint(subject, Severity.NOTE, problem, certain)


def comment(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint to be written down at the node in Slurm."""
    return Complaint(subject, Severity.WARNING, problem, certain)


def drain(subject: str, problem: str, *, certain: bool = False) -> Complaint:
    """Return a complaint that asks for the node to be drained."""
    return Complaint(subject, Severity.ERROR, problem, certain)


def one_line(text: str) -> str:
    r"""Return a text on one line and of bounded length, with nothing unprintable in it.

    >>> one_line("disk\n full\x1b[2J")
    'disk full\\x1b[2J'
    """
    said = printable(" ".join(text.split()))
    return said if len(said) <= LONGEST_PROBLEM else f"{said[: LONGEST_PROBLEM - 3]}..."


@dataclass(frozen=True, slots=True)
class Rule:
    """How looks become findings."""

    bad: int = 3  # looks in a row that must be at least so bad before a finding rises to that
    good: int = 3  # looks in a row that must be better before a finding falls or ends
    most: Severity = Severity.ERROR  # the gravest a finding of this check may become


@dataclass(frozen=True, slots=True)
class SubjectState:
    """How one subject of a check stands."""

    level: Severity = Severity.OK  # severity of the finding; OK: there is none
    runs: tuple[int, ...] = (0, 0, 0)  # for each of `_LEVELS`, how many looks in a row were at least so bad
    better: int = 0  # looks in a row that were better than `level`
    best_worst: Severity = Severity.OK  # the worst of those better looks
    # when the finding began, or what it tells of last happened; Unix time, 0 while there is none
    began: float = 0.0
    last_began: float | None = None  # monotonic time of its last beginning; None before the first
    doublings: int = 0  # how often the looks it takes to end it are doubled
    problem: str = ""  # what the newest complaint said


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
            standing = _seen(standing, min(complaint.severity, rule.most), own, now)
            began = complaint.at_unix if standing.level > Severity.OK and complaint.at_unix else standing.began
            standing = replace(standing, problem=complaint.problem, began=began)
        elif not look.unknown:
            standing = _seen(standing, Severity.OK, rule, now)
        subjects[subject] = standing
    subjects = _bounded(subjects, now)
    if not look.unknown:
        return CheckState(subjects)
    first = not state.unknown_looks
    return CheckState(subjects, state.unknown_looks + 1, look.unknown, now.unix if first else state.unknown_since)


def _seen(standing: SubjectState, seen: Severity, rule: Rule, now: LookTime) -> SubjectState:
    runs = tuple(run + 1 if seen >= level else 0 for level, run in zip(_LEVELS, standing.runs, strict=True))
    standing = replace(standing, runs=runs)
    risen = max((level for level, run in zip(_LEVELS, runs, strict=True) if run >= rule.bad), default=Severity.OK)
    if risen > standing.level:
        return _risen(standing, risen, now)
    if seen >= standing.level:
        return replace(standing, better=0, best_worst=Severity.OK)
    better, worst = standing.better + 1, max(standing.best_worst, seen)
    if better < rule.good << standing.doublings:
        return replace(standing, better=better, best_worst=worst)
    return replace(
        standing,
        level=worst,
        better=0,
        best_worst=Severity.OK,
        began=standing.began if worst > Severity.OK else 0.0,
    )


def _risen(standing: SubjectState, level: Severity, now: LookTime) -> SubjectState:
    if standing.level > Severity.OK:
        return replace(standing, level=level, better=0, best_worst=Severity.OK)
    flaps = standing.last_began is not None and now.monotonic - standing.last_began < FLAP_S
    return replace(
        standing,
        level=level,
        better=0,
        best_worst=Severity.OK,
        began=now.unix,
        last_began=now.monotonic,
        doublings=min(standing.doublings + 1, MOST_DOUBLINGS) if flaps else 0,
    )


def _bounded(subjects: Mapping[str, SubjectState], now: LookTime) -> dict[str, SubjectState]:
    """Return what is worth remembering: what is bad, then what was lately, until there is no room."""
    bad = {name: one for name, one in subjects.items() if one.level > Severity.OK or any(one.runs)}
    lately = {
        name: one
        for name, one in subjects.items()
        if name not in bad and one.last_began is not None and now.monotonic - one.last_began < FLAP_S
    }
    return dict([*bad.items(), *lately.items()][:MOST_SUBJECTS])


def findings(check: str, state: CheckState, rule: Rule) -> dict[str, Finding]:
    """Return what the check finds wrong now, by subject; UNKNOWN once it could not tell for `rule.bad` looks."""
    found = {
        subject: Finding(check=check, severity=standing.level, text=standing.problem, since_unix=standing.began)
        for subject, standing in state.subjects.items()
        if standing.level > Severity.OK
    }
    if not found and state.unknown_looks >= rule.bad:
        found[COULD_NOT_TELL] = Finding(
            check=check, severity=Severity.UNKNOWN, text=state.unknown, since_unix=state.unknown_since
        )
    return found


@dataclass(slots=True)
class Recent:
    """Events of the last `held_s` seconds, the newest per subject, at most `MOST`."""

    held_s: float
    _events: dict[str, tuple[float, Complaint]] = field(default_factory=dict)

    def note(self, complaint: Complaint, now: float) -> None:
        """Take in an event of `now` (monotonic); a graver one about the same subject that is still held stays."""
        held = self._events.pop(complaint.subject, None)
        if held is not None and now - held[0] < self.held_s and held[1].severity > complaint.severity:
            complaint = held[1]
        self._events[complaint.subject] = (now, complaint)
        while len(self._events) > MOST:
            del self._events[next(iter(self._events))]

    def complaints(self, now: float) -> tuple[Complaint, ...]:
        """Return those that are still held, and forget the others."""
        self._events = {name: event for name, event in self._events.items() if now - event[0] < self.held_s}
        return tuple(complaint for _, complaint in self._events.values())


@dataclass(slots=True)
class Counters:
    """Counters as they were at the last look."""

    _last: dict[str, int] = field(default_factory=dict)

    def rises(self, counters: dict[str, int]) -> dict[str, int]:
        """Return by how much each has risen since the last look; a new counter, or one reset, has not risen."""
        risen = {name: now - self._last[name] for name, now in counters.items() if now > self._last.get(name, now)}
        self._last = dict(counters)
        return risen


@dataclass(slots=True)
class _Slot:
    interval_s: float
    deadline_s: float
    due: float
    began: float | None = None
    told: float | None = None


class Timetable:
    """When each check's looks begin, and which of them take too long. `now` is monotonic and never goes back."""

    def __init__(self, checks: Iterable[tuple[str, float, float]], now: float, *, spread: str = "") -> None:
        self._slots = {
            name: _Slot(interval_s, deadline_s, now + _phase(spread, name, interval_s))
            for name, interval_s, deadline_s in checks
        }

    def begin(self, now: float) -> list[str]:
        """Return the checks whose next look is to begin now; each counts as begun until `ended` is told."""
        due = [name for name, slot in self._slots.items() if slot.began is None and slot.due <= now]
        for name in due:
            slot = self._slots[name]
            slot.began, slot.told, slot.due = now, None, now + slot.interval_s
        return due

    def hanging(self, now: float) -> list[tuple[str, float]]:
        """Return the looks that take longer than their deadline, once per interval, and their ages."""
        found = []
        for name, slot in self._slots.items():
            if slot.began is None or now < self._late_at(slot):
                continue
            slot.told = now
            found.append((name, now - slot.began))
        return found

    def ended(self, name: str) -> None:
        """Take note that a look has ended."""
        self._slots[name].began = None

    def wait_s(self, now: float) -> float:
        """Return for how long there is nothing to do."""
        times = [slot.due if slot.began is None else self._late_at(slot) for slot in self._slots.values()]
        return max(0.0, min([time - now for time in times] + [LONGEST_WAIT_S]))

    def _late_at(self, slot: _Slot) -> float:
        if slot.told is not None:
            return slot.told + slot.interval_s
        return (slot.began or 0.0) + slot.deadline_s


def _phase(spread: str, name: str, interval_s: float) -> float:
    if not spread:
        return 0.0
    share = zlib.crc32(f"{spread} {name}".encode()) / (1 << 32)
    return share * min(interval_s, FIRST_WITHIN_S)
