"""The node's clock: does the kernel take it for synchronised, and has it jumped."""

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
_UNSYNC = 0x40  # STA_UNSYNC of adjtimex(2)
_ERROR = 5  # TIME_ERROR: what adjtimex returns for a clock that is not synchronised


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What the kernel says of its clock.

    Attributes:
        synchronised: by a daemon of NTP or PTP; None where the kernel does not tell.
        error_s: how wrong the clock may be at most, by the kernel's own account.
    """

    synchronised: bool | None = None
    error_s: float = 0.0


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
    return ClockReading(state != _ERROR and not timex.status & _UNSYNC, timex.maxerror / 1e6)


class ClockCheck:
    """Looks at the clock, and remembers jumps."""

    def __init__(self, clock: Clock, read: Callable[[], ClockReading] = read_clock) -> None:
        self._clock, self._read = clock, read
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
        reading = self._read()
        if reading.synchronised is None:
            return Look(self._recent.complaints(now), "the kernel does not say whether its clock is synchronised")
        return Look((*judge_clock(reading), *self._recent.complaints(now)))


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
