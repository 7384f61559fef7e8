"""Brings shards to this node in the background: each once at a time, those that somebody waits for first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache.holding.fetching import Fetched, FetchOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.holding.fetching import Fetcher, WantedShard
    from deeplink.clock import Clock
    from deeplink.types import Member, ShardId

log = logging.getLogger(__name__)

WORKERS = 2
MOST_WAITING = 1 << 16
_BUSY_AGAIN_S = 0.5
_MOST_BUSY = 240
"""How often a shard is looked at again that another process is bringing."""


@dataclass(slots=True)
class _Order:
    wanted: WantedShard
    members: Sequence[Member]
    urgent: bool
    done: list[Callable[[Fetched], None]] = field(default_factory=list)
    busy: int = 0


class Filler:
    """A queue of shards to be brought, and the threads that bring them. Safe to use from several threads.

    Args:
        fetcher: brings one.
        clock: where time comes from.
        bytes_per_s: rate of what nobody waits for; what somebody waits for comes as fast as it can.
        ending: set when the process ends.
    """

    def __init__(
        self, fetcher: Fetcher, clock: Clock, *, bytes_per_s: float, ending: threading.Event | None = None
    ) -> None:
        self._fetcher, self._clock, self._rate = fetcher, clock, bytes_per_s
        self._ending = ending or threading.Event()
        self._changed = threading.Condition()
        self._waiting: OrderedDict[ShardId, _Order] = OrderedDict()
        self._working: dict[ShardId, _Order] = {}
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        """How many shards are being brought, or wait for it."""
        with self._changed:
            return len(self._waiting) + len(self._working)

    def want(
        self,
        wanted: WantedShard,
        *,
        members: Sequence[Member] = (),
        urgent: bool = True,
        done: Callable[[Fetched], None] | None = None,
    ) -> bool:
        """Have a shard brought; one that is on its way already is not brought twice.

        Args:
            wanted: which.
            members: all of them, as `Fetcher` takes them; those the fetcher knows when empty.
            urgent: whether somebody waits for it.
            done: told what became of it, from another thread.

        Returns:
            False: too many are waiting already, and `done` will not be called.
        """
        with self._changed:
            order = self._working.get(wanted.id) or self._waiting.get(wanted.id)
            if order is None:
                if len(self._waiting) >= MOST_WAITING or self._ending.is_set():
                    return False
                order = self._waiting[wanted.id] = _Order(wanted, members, urgent)
                self._start()
            if urgent and not order.urgent and wanted.id in self._waiting:
                # Behind those that somebody waits for already.
                self._waiting.move_to_end(wanted.id)
            order.urgent = order.urgent or urgent
            if done is not None:
                order.done.append(done)
            self._changed.notify()
        return True

    def _start(self) -> None:
        if len(self._threads) < WORKERS:
            thread = threading.Thread(target=self._run, name="deeplink-fill", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> _Order | None:
        with self._changed:
            while not self._waiting and not self._ending.is_set():
                self._changed.wait(1.0)
            if self._ending.is_set():
                return None
            chosen = next((order for order in self._waiting.values() if order.urgent), None)
            order = chosen or next(iter(self._waiting.values()))
            self._working[order.wanted.id] = self._waiting.pop(order.wanted.id)
            return order

    def _run(self) -> None:
        while (order := self._next()) is not None:
            began = self._clock.monotonic()
            try:
                found = self._fetcher.fetch(order.wanted, order.members)
            except Exception as problem:  # whatever it is, the queue goes on and who waits is told
                log.exception("shard %s cannot be brought", order.wanted.id)
                found = Fetched(FetchOutcome.FAILED, problem=f"{type(problem).__name__}: {problem}")
            if found.outcome is FetchOutcome.BUSY and order.busy < _MOST_BUSY:
                self._again(order)
                continue
            self._finish(order, found)
            if found.outcome is FetchOutcome.FETCHED and not order.urgent:
                self._ending.wait(max(0.0, found.bytes / self._rate - (self._clock.monotonic() - began)))

    def _again(self, order: _Order) -> None:
        order.busy += 1
        self._ending.wait(_BUSY_AGAIN_S)
        with self._changed:
            del self._working[order.wanted.id]
            self._waiting[order.wanted.id] = order

    def _finish(self, order: _Order, found: Fetched) -> None:
        metrics.STORE_FILLED_SHARDS.labels(found.outcome.name.lower()).inc()
        if found.outcome is FetchOutcome.FETCHED:
            metrics.STORE_FILLED_BYTES.labels(found.origin if found.origin in {"home", "source"} else "peer").inc(
                found.bytes
            )
        elif not found.outcome.is_here:
            log.warning("shard %s did not come: %s", order.wanted.id, found.problem)
        with self._changed:
            del self._working[order.wanted.id]
            told = order.done
        for done in told:
            done(found)

    def close(self) -> None:
        """Begin nothing new; what is under way goes on until the process ends."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()
