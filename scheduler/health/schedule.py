"""Which looks are to begin when; pure. A look that hangs delays its own check's next one, and no other's."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_WITHIN_S = 5.0
"""First looks are spread over so long: agents that start together do not write to their disks together."""
LONGEST_WAIT_S = 60.0


@dataclass(slots=True)
class _Slot:
    interval_s: float
    deadline_s: float
    due: float
    began: float | None = None
    told: float | None = None


class Timetable:
    """When each check's looks begin, and which of them take too long. `now` is monotonic and never goes back.

    Args:
        checks: name, interval and deadline of each, in seconds.
        now: the present.
        spread: what the first looks are spread by; the node's name, say. Empty: all begin at once.
    """

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
