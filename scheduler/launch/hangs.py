"""Which ranks are late, and whether they hang: asks the agents where those ranks are, and keeps what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.wire import attempt_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.chronicle import Chronicle
    from deeplink.scheduler.launch.environment import Launch
    from deeplink.scheduler.launch.fleet import Fleet
    from deeplink.scheduler.launch.order import Order
    from deeplink.types import NodeName
    from deeplink.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What is to be said of ranks that are late.

    Attributes:
        hung: why ranks count as hung; empty while they do not.
        slow: why a rank is to be replaced; empty while none is.
        suspects: nodes to blame, where it can be told.
    """

    hung: str = ""
    slow: str = ""
    suspects: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where the ranks were, when they were asked.

    Attributes:
        gist: in one line, for people; empty when nobody could say.
        suspects: nodes of the ranks that the others seem to wait for.
    """

    gist: str = ""
    suspects: tuple[NodeName, ...] = ()


class Hangs:
    """Watches the progress of each rank of a run; the supervising thread alone uses it."""

    def __init__(self, fleet: Fleet, chronicle: Chronicle, folder: Path, order: Order, clock: Clock) -> None:
        self._fleet, self._chronicle, self._folder = fleet, chronicle, folder
        self._limit_s, self._clock = order.step_timeout_s, clock
        self._launch: Launch | None = None
        self._newest: tuple[int, float] | None = None

    @property
    def told_s(self) -> float:
        """The limit by which the watchdog, too, may tell that the ranks hang, seconds; 0: it is not to."""
        return self._limit_s

    def begin(self, launch: Launch) -> None:
        """A new attempt begins."""
        self._launch, self._newest = launch, None

    def take(self, reports: Iterable[common_pb2.Progress]) -> None:
        """Take in what agents heard of ranks; what is of other attempts does not count."""
        now = self._clock.monotonic()
        for report in reports:
            if self._launch is None or attempt_from_wire(report.attempt) != self._launch.attempt:
                continue
            if self._newest is None or report.step > self._newest[0]:
                self._newest = report.step, now

    def look(self) -> Late:
        """Return what is to be said of late ranks now."""
        if not self._limit_s or self._newest is None:
            return Late()
        stuck_s = self._clock.monotonic() - self._newest[1]
        return Late(hung=f"no progress for {stuck_s:.0f} s" if stuck_s > self._limit_s else "")

    def locate(self, listen: Callable[[], None]) -> Found:  # noqa: ARG002 - nobody is asked yet
        """Ask every agent where the ranks are; `listen` is called all the while."""
        return Found()
