"""Reads many small files from a source: one by one where it answers at once, many at a time where it is slow.

Threads help with a cold or remote source and hurt with a warm local one, so how much is under way at once follows
from what the source gives: measured, 8 threads pack cold files 2.2 times as fast, and warm ones at three quarters
of the speed. What a slow source gives is asked for ahead of where it is needed, across blocks.
"""

from __future__ import annotations

import resource
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from deeplink.cache.names import Names
    from deeplink.cache.sources.origin import Source
    from deeplink.clock import Clock

_THREADS = 16
_SLOW_S = 0.0003
"""Seconds per file above which threads pay: a warm file takes a tenth of it, a cold one twice as long."""
_SAMPLE_FILES = 32
"""Fewer files than this say nothing about the source's speed."""
_AHEAD_FILES = 64
"""Files asked for at once where each is a call of its own."""
_BATCHES, _BATCH_FILES = 4, 128
"""Calls under way, and files in each, where the source takes many files in a call."""
_AHEAD_BYTES = 64 << 20
"""All that is under way has no more bytes than this, unless one file alone has."""


class FileReader:
    """Reads files of one source, in order. Close it (or use `with`) to end its threads."""

    def __init__(self, source: Source, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None
        if not source.local:
            self._grow()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _grow(self) -> None:
        threads = _BATCHES if self._source.batched else _THREADS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="deeplink-read")

    def runs(
        self, names: Names, sizes: np.ndarray, runs: Sequence[slice], head: int
    ) -> Iterator[tuple[slice, bytearray]]:
        """Yield, for each of `runs` of the files, its arena: room for a head, and the files one after another.

        Args:
            names: the files.
            sizes: int64, their bytes.
            runs: rows of the files that go into one arena each, in order.
            head: bytes to leave free in front.

        Raises:
            SourceFileError: one cannot be read.
            SourceChangedError: one is not of its size.
        """
        for position, run in enumerate(runs):
            if self._pool is not None:
                yield from self._slow_runs(self._pool, names, sizes, runs[position:], head)
                return
            yield run, self._quick_run(names[run], sizes[run], head)

    def _quick_run(self, names: Names, sizes: np.ndarray, head: int) -> bytearray:
        began, waits = self._clock.monotonic(), _waits()
        # A byte more than there should be, so that a file that grew is noticed.
        arena = bytearray(head + int(sizes.sum()) + 1)
        with memoryview(arena) as whole:
            self._source.fill(names, sizes.tolist(), whole[head:])
        del arena[-1]
        slow = self._clock.monotonic() - began > _SLOW_S * len(names)
        if len(names) >= _SAMPLE_FILES and slow and _waits() - waits > len(names) // 2:
            self._grow()
        return arena

    def _slow_runs(
        self, pool: ThreadPoolExecutor, names: Names, sizes: np.ndarray, runs: Sequence[slice], head: int
    ) -> Iterator[tuple[slice, bytearray]]:
        parts = self._ahead(pool, names, sizes, np.concatenate([np.arange(run.start, run.stop) for run in runs]))
        try:
            for run in runs:
                files = list(islice(parts, run.stop - run.start))
                yield run, bytearray().join([bytes(head), *files])
        finally:
            parts.close()  # type: ignore[attr-defined]  # it is a generator

    def _ahead(
        self, pool: ThreadPoolExecutor, names: Names, sizes: np.ndarray, rows: np.ndarray
    ) -> Iterator[bytes]:
        """Yield the files at `rows`, in order; so many are under way that a slow source is kept busy."""
        calls = _AHEAD_FILES if not self._source.batched else _BATCHES
        each = 1 if not self._source.batched else _BATCH_FILES
        queue = iter(_cut(rows, sizes, each, _AHEAD_BYTES // calls))
        under_way: deque[tuple[Future[list[bytes]], int]] = deque()
        held = 0
        waiting: np.ndarray | None = next(queue, None)
        try:
            while under_way or waiting is not None:
                while waiting is not None and len(under_way) < calls:
                    size = int(sizes[waiting].sum())
                    if under_way and held + size > _AHEAD_BYTES:
                        break
                    wanted = [names[row] for row in waiting.tolist()]
                    call = pool.submit(self._source.read_many, wanted, sizes[waiting].tolist())
                    under_way.append((call, size))
                    held += size
                    waiting = next(queue, None)
                call, size = under_way.popleft()
                yield from call.result()
                held -= size
        finally:
            for call, _ in under_way:
                call.cancel()


def _cut(rows: np.ndarray, sizes: np.ndarray, most_files: int, most_bytes: int) -> Iterator[np.ndarray]:
    """Yield runs of `rows` of at most so many files and bytes, or of one file."""
    start = 0
    while start < len(rows):
        ends = np.cumsum(sizes[rows[start : start + most_files]])
        count = max(int(np.searchsorted(ends, most_bytes, side="right")), 1)
        yield rows[start : start + count]
        start += count


def _waits() -> int:
    """Return how often this thread has waited for something: a busy processor makes reads slow too, but not so."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
