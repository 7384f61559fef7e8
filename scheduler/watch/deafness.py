"""When nobody could be heard: we doubted ourselves, and no launcher spoke. Such silence is not theirs. Pure."""

from __future__ import annotations

from collections import deque

MOST_SPANS = 64


class Deafness:
    """The newest spans in which nobody could be heard. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SPANS)
        self._lasts = False

    def note(self, now: float) -> None:
        """It may be that nobody can be heard, from the moment before this one on, unless that was ended."""
        began = now
        if self._spans and (self._lasts or self._spans[-1][0] == self._spans[-1][1]):
            before, _ = self._spans.pop()
            began = before if self._lasts else now
        self._spans.append((began, now))
        self._lasts = True

    def end(self) -> None:
        """Somebody is heard, or there is no doubt any more."""
        self._lasts = False

    def within(self, since: float, now: float) -> float:
        """Return for how many seconds between two moments nobody could be heard.

        >>> deaf = Deafness()
        >>> for second in (10.0, 15.0, 20.0):
        ...     deaf.note(second)
        >>> deaf.end()
        >>> for second in (21.0, 22.0, 40.0):
        ...     deaf.note(second)
        >>> deaf.within(11.5, 43.0), deaf.within(0.0, 5.0)
        (27.5, 0.0)
        """
        return sum(max(0.0, min(ended, now) - max(began, since)) for began, ended in self._spans)
