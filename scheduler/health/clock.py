"""The node's clock: does the kernel take it for synchronised, has it jumped, is it where the watchdog's is."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, Look, comment, observe
from deeplink.scheduler.health.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock

JUMP_S = 1.0
"""The clock for people and the one that never jumps may drift so far apart between looks: slewing is slower."""
FAR_S = 60.0
JUMP_HELD_S = 1800.0
SKEW_S = 1.0
"""So far apart may this clock and the watchdog's be, the time that asking took left out."""
COMPARED_S = 60.0
"""A comparison counts for so long: the watchdog may be away."""
_UNSYNC = 0x40  # STA_UNSYNC of adjtimex(2)
_ERROR = 5  # TIME_ERROR: what adjtimex returns for a clock that is not synchronised


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What the kernel says of its clock.

    Attributes:
        synchronised: by a daemon of NTP or PTP; None where the kernel does not tell.
    """

    synchronised: bool | None = None


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def read_clock() -> ClockReading:
    """Ask the kernel; changes nothing (modes is 0) and needs no right."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return ClockReading()
    if state < 0:  # forbidden by a filter of system calls
        return ClockReading()
    return ClockReading(state != _ERROR and not timex.status & _UNSYNC)


@dataclass(frozen=True, slots=True)
class Comparison:
    """This clock beside the watchdog's.

    Attributes:
        ahead_s: by how much this one is ahead; negative where it is behind.
        within_s: the figure is right to so much either way: half of what asking took.
        at: when it was compared, monotonic.
    """

    ahead_s: float
    within_s: float
    at: float


@dataclass(slots=True)
class Compared:
    """The newest comparison: who tells the watchdog of this node leaves it here for the check."""

    newest: Comparison | None = None


class ClockCheck:
    """Looks at the clock, and remembers jumps."""

    def __init__(
        self, clock: Clock, read: Callable[[], ClockReading] = read_clock, compared: Compared | None = None
    ) -> None:
        self._clock, self._read, self._compared = clock, read, compared or Compared()
        self._last: tuple[float, float] | None = None
        self._recent = Recent(JUMP_HELD_S)

    def look(self) -> Look:
        """Look once."""
        now, unix = self._clock.monotonic(), self._clock.unix()
        if self._last is not None:
            jumped = judge_jump(unix - self._last[1], now - self._last[0])
            if jumped is not None:
                self._recent.note(jumped, now)
        self._last = (now, unix)
        newest = self._compared.newest
        skewed = judge_skew(newest) if newest is not None and now - newest.at < COMPARED_S else ()
        complaints = (*skewed, *self._recent.complaints(now))
        reading = self._read()
        if reading.synchronised is None:
            return Look(complaints, "the kernel does not say whether its clock is synchronised")
        return Look((*judge_clock(reading), *complaints))


def judge_clock(reading: ClockReading) -> tuple[Complaint, ...]:
    """Return what is wrong with the clock as it is.

    A kernel whose clock a virtual machine's host keeps right looks unsynchronised, too: so that is only observed.
    """
    if reading.synchronised is False:
        return (
            observe("unsynchronised", "the clock is not synchronised: is chronyd, ntpd or timesyncd running?"),
        )
    return ()


def judge_jump(unix_s: float, monotonic_s: float) -> Complaint | None:
    """Return a complaint when by one clock another time has passed than by the other."""
    jump_s = unix_s - monotonic_s
    if abs(jump_s) <= JUMP_S:
        return None
    said = f"the clock jumped by {jump_s:+.1f} s"
    return comment("jump", said, certain=True) if abs(jump_s) > FAR_S else observe("jump", said, certain=True)


def judge_skew(found: Comparison) -> tuple[Complaint, ...]:
    """Return a complaint when this clock and the watchdog's are surely apart.

    Whose is wrong is not known from here, and the watchdog's would make all nodes look so: it is only observed.

    >>> [one.problem for one in judge_skew(Comparison(ahead_s=-75.04, within_s=0.5, at=0.0))]
    ["the clock is 75.0 s behind the watchdog's"]
    """
    apart_s = abs(found.ahead_s)
    if apart_s - found.within_s <= SKEW_S:
        return ()
    said = f"the clock is {apart_s:.1f} s {'ahead of' if found.ahead_s > 0 else 'behind'} the watchdog's"
    return (observe("skew", said),)
