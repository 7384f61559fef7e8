"""Which of the nodes that have no agent yet Slurm does not hear of either: asked from a thread, now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.launch.latest_answer import LastAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from deeplink.clock import Clock
    from deeplink.types import NodeName

    Ask = Callable[[Collection[NodeName]], Mapping[NodeName, bool] | None]

ASK_S = 5.0
"""Between two questions; most agents are up before the first one."""
ANSWER_S = 30.0
"""How long an answer may take, once it decides."""


class Unheard:
    """Asks about nodes while agents are waited for. The thread that waits alone uses it.

    Args:
        ask: as `Backend.unheard`.
        clock: for every duration.
        patience_s: how long nodes that Slurm does not hear of are waited for, until it has given them up.
    """

    def __init__(self, ask: Ask, clock: Clock, patience_s: float) -> None:
        self._clock, self._patience_s = clock, patience_s
        self._nodes: tuple[NodeName, ...] = ()
        self._last = LastAnswer(lambda: ask(self._nodes), clock, "deeplink-unheard")
        self._asked = clock.monotonic()
        self._late: float | None = None

    def lost(self, nodes: Collection[NodeName], spare: int, *, late: bool) -> frozenset[NodeName] | None:
        """Return which of these nodes are lost, if that is why too few agents are up; None while it is open.

        Args:
            nodes: those without an agent.
            spare: how many of them may be missing.
            late: whether no agent comes up there any more. From then on an older answer does not count, and one
                lost node explains all: srun ends the whole step of agents when it cannot start one of them.
        """
        now = self._clock.monotonic()
        if late and self._late is None:
            self._late = now
            self._asked = float("-inf")
        if now - self._asked >= ASK_S:
            self._asked, self._nodes = now, tuple(nodes)
            self._last.ask()
        asked, answer = self._last.answered, self._last.value or {}
        late_s = float("-inf") if self._late is None else now - self._late
        if self._late is not None and asked < self._late:
            return None if late_s < ANSWER_S else frozenset()
        away = {node: answer[node] for node in nodes if node in answer}
        if len(away) <= (0 if late else spare):
            return frozenset() if late else None
        return frozenset(away) if all(away.values()) or late_s >= self._patience_s else None
