"""Reads batches ahead, in order of use, by threads of the trainer's own process."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from deeplink.data.sampler import Pass, ResumableSampler

_MOST_BATCHES = 64
"""Batches ahead however small they are."""
_LAST_READ_S = 60.0
"""Longest wait for a read under way when a pass ends: longer than any read's own deadlines."""


_Task = tuple[Future[Any], "Callable[[Any], Any]", Any]


class ReadableDataset(Protocol):
    """What a Prefetcher needs of a dataset; `deeplink.Dataset` is one."""

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
    for thread in threads:
        thread.join(_LAST_READ_S)


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
            raise ValueError(f"threads {threads}, ahead_bytes {ahead_bytes}")
        self._dataset, self._sampler, self._collate = dataset, sampler, collate
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
