"""Spans in which the watchdog itself may have been cut off: silence then is no evidence. Pure."""

from __future__ import annotations

from collections import deque

MOST_SPANS = 64


class WatchdogOutages:
    """The newest spans in which we doubted ourselves. Times are monotonic seconds.

    Who is heard meanwhile does not end one: that a few are heard says nothing of the others.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SPANS)
        self._lasts = False

    def note(self, now: float) -> None:
        """It may be that nobody can be heard at this moment, nor since the one before, unless that was the end."""
        ended = self._spans[-1][1] if self._spans else now
        began = self._spans.pop()[0] if self._lasts else max(ended, now)
        self._spans.append((began, max(ended, now)))
        self._lasts = True

    def end(self, now: float) -> None:
        """It lasted until now."""
        if self._lasts:
            self.note(now)
        self._lasts = False

    def within(self, since: float, now: float) -> float:
        """Return for how many seconds between two moments it may be that nobody could be heard.

        >>> deaf = WatchdogOutages()
        >>> for second in (10.0, 15.0):
        ...     deaf.note(second)
        >>> deaf.end(20.0)
        >>> for second in (19.0, 31.0):
        ...     deaf.note(second)
        >>> deaf.within(11.5, 43.0), deaf.within(0.0, 5.0)
        (19.5, 0.0)
        """
        return sum(max(0.0, min(ended, now) - max(began, since)) for began, ended in self._spans)
