"""Reads batches ahead by threads of the trainer's own process, and tells the store which shards come next."""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from typing_extensions import override

from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.data.order import Order
from deeplink.data.subsets import resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from deeplink.core.clock import Clock
    from deeplink.data.order import BlockOrder, Residency
    from deeplink.data.sampler import Pass, ResumableSampler

log = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""Within an epoch the store is not told more often: each time a small file is written."""
_NEVER: Final = np.iinfo(np.int64).max
_MOST_BATCHES = 64
"""Batches ahead however small they are."""
_LAST_READ_S = 60.0
"""Longest wait for the reads under way when a pass ends: longer than any read's own deadlines."""


_Task = tuple[Future[Any], "Callable[[Any], Any]", Any]


class ReadableDataset(Protocol):
    """A dataset that a Prefetcher reads; `deeplink.Dataset` is one."""

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each sample."""
        ...

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples of a batch."""
        ...

    def will_need(self, indices: np.ndarray) -> None:
        """Ask this node's disks for samples, and do not wait for them."""
        ...


class _Readers:
    """Threads that do work in the order it comes; what was not begun is dropped at the end.

    Not a ThreadPoolExecutor: that one does all that was asked for before it lets an interpreter exit, so a rank
    that failed would linger for as many reads as were ahead.
    """

    def __init__(self, count: int) -> None:
        self._todo: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_serve, args=(self._todo,), name=f"deeplink-ahead-{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, self._todo, threads)
        for thread in threads:
            thread.start()

    def submit(self, work: Callable[[Any], Any], argument: Any) -> Future[Any]:
        """Have `work(argument)` done; return what its result will be in."""
        future: Future[Any] = Future()
        self._todo.put((future, work, argument))
        return future


def _serve(todo: queue.SimpleQueue[_Task | None]) -> None:
    while (task := todo.get()) is not None:
        future, work, argument = task
        try:
            future.set_result(work(argument))
        except BaseException as problem:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(problem)
        del task, future, work, argument  # a batch is not kept until the next one comes


def _end(todo: queue.SimpleQueue[_Task | None], threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            todo.get_nowait()
    for _ in threads:
        todo.put(None)
    clock = SystemClock()
    until = clock.monotonic() + _LAST_READ_S
    for thread in threads:
        thread.join(max(0.0, until - clock.monotonic()))


class Prefetcher:
    """Yields a sampler's batches as a DataLoader without workers does, and reads those that follow meanwhile.

    Reading lets other threads run (system calls, sockets), so this takes the place of DataLoader workers wherever
    their work is mostly reading, or decoding that lets other threads run. Batches come in order. Read ahead are as
    many as fit into `ahead_bytes`, the one in training's hands counted in, and one at least. In `Order.BLOCKS` the
    disks are besides asked for the blocks of the next window while one is used up.

    An error while a batch is read is raised where that batch would have come. The threads end with the pass: when
    it is used up, broken off, or interrupted; reads under way are waited for, the others are not begun.

    Args:
        dataset: what is read.
        sampler: which samples, in which batches. Call its `finished()` as ever.
        collate: gets what `dataset` gives for a batch, in one of the threads.
        threads: how many batches are read at once.
        ahead_bytes: bytes of samples read and not yet used up.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        dataset: ReadableDataset,
        sampler: ResumableSampler,
        *,
        collate: Callable[[Any], Any] | None = None,
        threads: int = 2,
        ahead_bytes: int = 64 << 20,
    ) -> None:
        if threads < 1 or ahead_bytes < 1:
            raise ValueError(f"threads and ahead_bytes must be positive, got {threads} and {ahead_bytes}")
        self._dataset, self._sampler, self._collate = resolved(dataset), sampler, collate
        self._threads, self._ahead_bytes = threads, ahead_bytes

    def __len__(self) -> int:
        """Return the number of batches left in the epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches left in the epoch. Raises what sampler and dataset raise, in its place."""
        return self._read_ahead(iter(self._sampler))

    def _read_ahead(self, asked: Pass) -> Iterator[Any]:
        readers = _Readers(self._threads)
        waiting: deque[tuple[Future[Any], int]] = deque()
        held = 0
        try:
            rows = _next(asked)
            while rows is not None or waiting:
                while rows is not None and len(waiting) < _MOST_BATCHES:
                    size = 0 if isinstance(rows, Exception) else int(self._dataset.lengths[rows].sum())
                    if waiting and held + size > self._ahead_bytes:
                        break
                    waiting.append((readers.submit(self._read, rows), size))
                    held += size
                    if len(coming := asked.coming()):
                        readers.submit(self._dataset.will_need, coming)
                    rows = None if isinstance(rows, Exception) else _next(asked)
                future, size = waiting.popleft()
                yield future.result()
                del future  # with it the batch, once training has let go of it
                held -= size
        finally:
            readers.close()

    def _read(self, rows: list[int] | Exception) -> Any:
        if isinstance(rows, Exception):
            raise rows
        items = self._dataset.__getitems__(rows)
        return items if self._collate is None else self._collate(items)


def _next(asked: Pass) -> list[int] | Exception | None:
    """Return the sampler's next batch, None at the end, or what is wrong with it: to be raised in its place."""
    try:
        return next(asked, None)
    except Exception as problem:  # noqa: BLE001 - raised again
        return problem


class Announced(Protocol):
    """A dataset whose use an Announcer announces; `deeplink.Dataset` is one."""

    @property
    def shard(self) -> np.ndarray:
        """Shard number of each sample."""
        ...

    @property
    def shards(self) -> Sequence[str]:
        """Name of each shard by number."""
        ...

    def announce(self, shards: Sequence[int], needed: int) -> None:
        """Say in which order shards are used from now on; the first `needed` of them in this epoch."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The uses of one epoch, in their order; arrays of int64 of one length."""

    shard: NDArray[np.int64]  # number of the shard
    begin: NDArray[np.int64]  # the first place of the epoch that may be a sample of it
    end: NDArray[np.int64]  # the place behind the last one; no smaller than that of the use before

    def next(self, place: int, count: int) -> NDArray[np.int64]:
        """Return for each of `count` shards where it is used next, from `place` on; int64's largest for never."""
        left = int(np.searchsorted(self.end, place, side="right"))
        found = np.full(count, _NEVER)
        np.minimum.at(found, self.shard[left:], self.begin[left:])
        return found

    def last(self, count: int) -> NDArray[np.int64]:
        """Return for each of `count` shards behind which place it is used no more; 0 for never at all."""
        found = np.zeros(count, np.int64)
        np.maximum.at(found, self.shard, self.end)
        return found


def uses_in(order: Order, shard: NDArray[np.integer], by_blocks: BlockOrder | None, epoch: int) -> Uses:
    """Return the uses of an epoch whose samples lie in the shards numbered `shard`."""
    if by_blocks is not None:
        samples, begin, end = by_blocks.uses(epoch)
        return Uses(shard[samples].astype(np.int64), begin, end)
    if order is Order.SEQUENTIAL:
        edges = np.flatnonzero(shard[1:] != shard[:-1]) + 1
        bounds = np.concatenate([[0], edges, [len(shard)]])
        return Uses(shard[bounds[:-1]].astype(np.int64), bounds[:-1], bounds[1:])
    is_used = np.zeros(int(shard.max()) + 1, bool)
    is_used[shard] = True
    used = np.flatnonzero(is_used)
    return Uses(used, np.zeros(len(used), np.int64), np.full(len(used), len(shard)))


@dataclass(frozen=True, slots=True, eq=False)
class Upcoming:
    """The shards to be announced at a place of an epoch."""

    shards: NDArray[np.int64]  # numbers, in the order of their next use
    needed: int  # how many of them, from the first, the epoch still needs here
    until: int  # the place from which on fewer are needed


def upcoming(now: Uses, later: Uses, place: int, is_near: NDArray[np.bool_]) -> Upcoming:
    """Return what is to be announced.

    First what this epoch (`now`) uses from `place` on and this node is to take (`is_near`, per shard number);
    then what others take of this epoch; then the next epoch's (`later`); each in the order of its next use.
    """
    count = len(is_near)
    use, then, last = now.next(place, count), later.next(0, count), now.last(count)
    is_left = use < _NEVER
    is_needed = is_left & is_near
    group = np.where(is_needed, 0, np.where(is_left, 1, 2))
    when = np.where(is_left, use, then)
    order = np.lexsort((when, group))
    shards = order[when[order] < _NEVER]
    until = int(last[is_needed].min()) if is_needed.any() else _NEVER
    return Upcoming(shards, int(is_needed.sum()), until)


class Announcer:
    """Says what a pass uses next, when it begins and whenever a shard is used up. In the trainer's process.

    `is_near`: per shard number, whether this node is to take its samples; all of them when not given.
    """

    def __init__(
        self,
        dataset: Announced,
        order: Order,
        by_blocks: BlockOrder | None,
        is_near: NDArray[np.bool_] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._dataset, self._order, self._by_blocks = dataset, order, by_blocks
        self._is_near = np.ones(len(dataset.shards), bool) if is_near is None else is_near
        self._clock = clock or SystemClock()
        self._epoch, self._place, self._until, self._said = -1, 0, 0, float("-inf")
        self._uses: dict[int, Uses] = {}

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers get a copy and never ask it: 50 bytes per block are not sent to each of them.
        return vars(self) | {"_uses": {}}

    def tell(self, epoch: int, place: int, *, again: bool = False) -> None:
        """Say what comes, now that all ranks have used `place` samples of an epoch; nothing where that is known.

        Cheap enough to be called after each step. `again`: say it though it is known; it may have been forgotten.
        """
        is_same = epoch == self._epoch and place >= self._place
        if is_same and not again and (place < self._until or self._clock.monotonic() - self._said < EVERY_S):
            return
        try:
            until = self._announced(epoch, place)
        except (DeepLinkError, IndexError) as problem:  # what is not said stays; reads meet what is damaged
            log.warning("the store is not told what is used next: %s", problem)
            until = _NEVER
        self._epoch, self._place, self._until, self._said = epoch, place, until, self._clock.monotonic()

    def _announced(self, epoch: int, place: int) -> int:
        """Say what comes; return until which place of the epoch that holds."""
        now, later = (epoch, epoch + 1) if self._by_blocks is not None else (0, 0)
        self._uses = {number: self._uses_of(number) for number in {now, later}}
        found = upcoming(self._uses[now], self._uses[later], place, self._is_near)
        self._dataset.announce(found.shards.tolist(), found.needed)
        return found.until

    def _uses_of(self, epoch: int) -> Uses:
        known = self._uses.get(epoch)
        return known or uses_in(self._order, self._dataset.shard, self._by_blocks, epoch)


def announcer_of(
    dataset: Any, order: Order, by_blocks: BlockOrder | None, residency: Residency | None, rank: int
) -> Announcer | None:
    """Return who tells the store of a sampler's dataset; None where that is no `Announced` one."""
    # Looked for, not asked for: that would go through the whole index.
    if any(inspect.getattr_static(dataset, name, None) is None for name in ("announce", "shard", "shards")):
        return None
    return Announcer(dataset, order, by_blocks, None if residency is None else residency.is_home(rank))
