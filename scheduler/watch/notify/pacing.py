"""Which news goes out now, in one message, and what waits to be gathered. Pure: time is passed in.

One message per incident and state, in the order of the incidents. Two things gather news into one message: a node
of which there were several messages lately (it flaps; what is critical does not wait for that), and more news than
may be sent now (a storm).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.notify.news import Gravity, gravity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.watch.notify.news import IncidentNews


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRate:
    """How much one channel is told.

    Attributes:
        burst: messages that may go out at once.
        every_s: seconds until one more may.
        flaps: after so many messages about one node within `window_s` seconds its news are gathered until the
            window is over.
    """

    burst: int = 10
    every_s: float = 60.0
    flaps: int = 4
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do now.

    Attributes:
        batch: news for one message; none: nothing may go out now.
        wait_s: seconds until that changes by itself; None: never, as long as there is no other news.
    """

    batch: tuple[IncidentNews, ...] = ()
    wait_s: float | None = None


@dataclass(slots=True)
class Pacer:
    """Keeps account of what one channel was told lately."""

    pace: ChannelRate
    _tokens: float = field(init=False)
    _at: float | None = None
    _told: deque[tuple[float, str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Begin with all messages of a burst."""
        self._tokens = float(self.pace.burst)

    def turn(self, waiting: Sequence[IncidentNews], now: float) -> Turn:
        """Return what goes out of the news that wait, which are in order; `now` is monotonic."""
        self._pass(now)
        held = self._flapping(now)
        free = [news for news in waiting if news.incident.node not in held or _urgent(news)]
        if not free:
            waits = [held[news.incident.node] for news in waiting if news.incident.node]
            return Turn(wait_s=min(waits, default=None))
        if self._tokens < 1.0:
            return Turn(wait_s=(1.0 - self._tokens) * self.pace.every_s)
        if len(free) > self._tokens:
            return Turn(batch=tuple(free))
        node = free[0].incident.node
        return Turn(batch=tuple(free[:1]) if node is None else tuple(n for n in free if n.incident.node == node))

    def sent(self, batch: Sequence[IncidentNews], now: float) -> None:
        """Take note that a message went out."""
        self._pass(now)
        self._tokens = max(0.0, self._tokens - 1.0)
        self._told.extend((now, node) for node in {news.incident.node for news in batch if news.incident.node})

    def _pass(self, now: float) -> None:
        if self._at is not None:
            more = max(0.0, now - self._at) / self.pace.every_s
            self._tokens = min(float(self.pace.burst), self._tokens + more)
        self._at = now
        while self._told and now - self._told[0][0] >= self.pace.window_s:
            self._told.popleft()

    def _flapping(self, now: float) -> dict[str | None, float]:
        """Nodes that flap, and for how many seconds more their news are held."""
        counts = Counter(node for _, node in self._told)
        held: dict[str | None, float] = {}
        for at, node in self._told:
            # Until the newest messages alone are too few to make a node one that flaps.
            if counts[node] >= self.pace.flaps:
                held[node] = at + self.pace.window_s - now
                counts[node] -= 1
        return held


def _urgent(news: IncidentNews) -> bool:
    return gravity(news.incident) is Gravity.CRITICAL
