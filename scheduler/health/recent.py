"""What happened lately: a single event is complained of for a while, or no look after the next would see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deeplink.scheduler.health.look import Complaint, gravity

MOST = 64


@dataclass(slots=True)
class Recent:
    """Events of the last `held_s` seconds, the newest per subject, at most `MOST`."""

    held_s: float
    _events: dict[str, tuple[float, Complaint]] = field(default_factory=dict)

    def note(self, complaint: Complaint, now: float) -> None:
        """Take in an event of `now` (monotonic); a graver one about the same subject that is still held stays."""
        held = self._events.pop(complaint.subject, None)
        if (
            held is not None
            and now - held[0] < self.held_s
            and gravity(held[1].severity) > gravity(complaint.severity)
        ):
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
