"""When no launcher could be heard: our network was away, or beats were refused. Pure."""

from __future__ import annotations

from collections import deque

APART_S = 3.0
"""Moments no further apart are one span: rounds, and beats that are sent again, come about once a second."""
MOST_SPANS = 64


class Deafness:
    """The newest spans in which nobody could be heard. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SPANS)

    def note(self, now: float) -> None:
        """Nobody can be heard at this moment."""
        if self._spans and now - self._spans[-1][1] <= APART_S:
            began, ended = self._spans.pop()
            self._spans.append((began, max(ended, now)))
        else:
            self._spans.append((now, now))

    def within(self, since: float, now: float) -> float:
        """Return for how many seconds between two moments nobody could be heard.

        >>> deaf = Deafness()
        >>> for second in (10.0, 11.0, 12.0, 40.0, 43.0, 45.0):
        ...     deaf.note(second)
        >>> deaf.within(11.5, 43.0), deaf.within(0.0, 5.0)
        (3.5, 0.0)
        """
        return sum(max(0.0, min(ended, now) - max(began, since)) for began, ended in self._spans)
