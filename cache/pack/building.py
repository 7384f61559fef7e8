"""Builds one shard from a source: reads its files, packs them into blocks, writes and seals them.

Threads help with a cold or remote source and hurt with a warm local one: measured, 2.2 and 0.75 of one's speed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import struct
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import lmdb
import numpy as np
import xxhash

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.format.names import Names
    from deeplink.cache.source.source import Source
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

LMDB_FORMAT = (0, 9)
"""Versions 0.9 and 1.0 of LMDB cannot read each other's files: 0.9 is what shards are."""
_COMMIT_BYTES = 16 << 20
_PROBE = bytes(1 << 20)
_NUMBER = struct.Struct(">Q")
_ONE_FILE: dict[str, Any] = {"subdir": False, "lock": False, "max_dbs": 0}


@dataclass(frozen=True, slots=True, eq=False)
class SealedShard:
    """A shard's file, complete and on stable storage."""

    id: ShardId
    bytes: int
    layout: block.FileLayout


def _check_machine() -> None:
    found, ours, page = lmdb.version(), ".".join(map(str, LMDB_FORMAT)), os.sysconf("SC_PAGESIZE")
    if found[:2] != LMDB_FORMAT:
        problem = f"this is LMDB {'.'.join(map(str, found))}, shards are LMDB {ours} files"
        remedy = "Install the py-lmdb release of constraints.txt, with its default library."
    elif page != block.PAGE:
        problem = f"memory pages of {page} bytes, shards have pages of {block.PAGE}"
        remedy = "Pack on a machine with 4 KiB pages; shards can be read on any."
    else:
        return
    raise DeepLinkError(f"shards cannot be written here: {problem}", remedy=remedy)


def _map_size(payloads: Iterable[int]) -> int:
    """Return room for the blocks and for LMDB's own pages; a function of the content, for it is in the file."""
    pages = [block.value_pages(payload) for payload in payloads]
    # A branch page names over a hundred leaves of over a hundred blocks each, copied at each commit.
    own = 64 + len(pages) // 16 + 16 * (sum(pages) * block.PAGE // _COMMIT_BYTES)
    return (sum(pages) + own) * block.PAGE


def write_shard(path: Path, payloads: list[int], values: Iterable[bytes | bytearray | memoryview]) -> SealedShard:
    """Write a new file at `path` and return it as a sealed shard, on stable storage.

    Its name is the digest of the values as they were given. That the file holds them is seen by each block's
    header, looked for in the file; reading all of it back at once would only show what is still in memory.
    """
    _check_machine()
    size, never = _map_size(payloads), {"sync": False, "metasync": False, "readahead": False}
    digests: list[bytes] = []
    try:
        with lmdb.open(str(path), map_size=size, mode=0o600, **_ONE_FILE, **never) as environment:
            digests += _put_all(environment, values)
    except (lmdb.Error, OSError) as problem:
        _raise_as_os_error(problem, path)
    return _seal(path, payloads, block.name_of(digests))


def _put_all(environment: lmdb.Environment, values: Iterable[bytes | bytearray | memoryview]) -> list[bytes]:
    """Put the values, and return their digests."""
    digests: list[bytes] = []
    transaction = environment.begin(write=True)
    try:
        pending = 0
        for number, value in enumerate(values):
            if pending >= _COMMIT_BYTES:
                transaction.commit()
                # The disk works while the next files are read, not all at once at the end.
                environment.sync(force=True)
                transaction = environment.begin(write=True)
                pending = 0
            # Neither of the two holds Python's lock: files are read in another thread meanwhile.
            digests.append(hashlib.sha256(value).digest())
            transaction.put(_NUMBER.pack(number), value, append=True)
            pending += len(value)
        transaction.commit()
    except BaseException:
        transaction.abort()
        raise
    return digests


def _raise_as_os_error(problem: Exception, path: Path) -> None:
    """Raise what LMDB reports in a sentence as the OSError it was."""
    if isinstance(problem, OSError):
        raise problem
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        if os.strerror(number) in str(problem):
            raise OSError(number, os.strerror(number), str(path)) from problem
    _raise_true_cause(path)
    raise OSError(errno.EIO, str(problem), str(path)) from problem


def _raise_true_cause(path: Path) -> None:
    """Write on to the draft: LMDB calls it an I/O error when a disk took a part of what was written."""
    with opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
        for _ in range(_COMMIT_BYTES // len(_PROBE)):
            if os.write(descriptor, _PROBE) == len(_PROBE):
                return


def _seal(path: Path, payloads: list[int], shard: ShardId) -> SealedShard:
    with opened(path) as descriptor:
        os.fsync(descriptor)
        found = block.scan_shard(descriptor, shard)
        if found.payloads.tolist() != payloads:
            raise ShardCorruptError(shard, f"{len(found.headers)} of {len(payloads)} blocks found after writing")
        return SealedShard(shard, os.fstat(descriptor).st_size, found)


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
_WAITING_BYTES = 8 << 20
"""What was read and is not yet written, unless one piece of a long sample alone is more."""
_OWN_PAGES = 8
"""Of LMDB, in the smallest file."""


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

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _grow(self) -> None:
        threads = _BATCHES if self._source.batched else _THREADS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="deeplink-read")

    def runs(
        self, names: Names, sizes: np.ndarray, runs: Sequence[slice], head: int
    ) -> Iterator[tuple[slice, bytearray]]:
        """Yield, for each of `runs` of the files, its arena: room for a head, and the files one after another."""
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


class AbandonedError(Exception):
    """The other thread gave up on a shard; its own error says why."""


class ByteQueue:
    """A queue between two threads, bounded in bytes: one puts and ends, the other iterates and closes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._waiting: deque[bytes | bytearray] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._ended = self._broken = self._closed = False

    def put(self, value: bytes | bytearray) -> None:
        """Add a value once there is room for it."""
        with self._changed:
            while self._waiting and self._bytes + len(value) > self._most and not self._closed:
                self._changed.wait()
            if self._closed:
                raise AbandonedError
            self._waiting.append(value)
            self._bytes += len(value)
            self._changed.notify_all()

    def end(self, *, broken: bool = False) -> None:
        """Say that no more values come; `broken`: though some are missing."""
        with self._changed:
            self._ended, self._broken = True, self._broken or broken
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no more values are taken."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes | bytearray]:
        """Yield the values as they come."""
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if self._broken:
                    raise AbandonedError
                if not self._waiting:
                    return
                value = self._waiting.popleft()
                self._bytes -= len(value)
                self._changed.notify_all()
            yield value


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A shard, as the index needs to know it."""

    id: ShardId
    bytes: int  # of its file
    block_offsets: np.ndarray  # uint64, where each block's payload begins in the file
    checksums: np.ndarray  # uint64, xxh3-64 of its samples in order


class ShardBuilder:
    """Builds one shard. `read` and `write` run in two threads: files are read while blocks are written."""

    def __init__(
        self, source: Source, reader: FileReader, names: Names, sizes: np.ndarray, done: Callable[[int, int], None]
    ) -> None:
        self._source, self._reader, self._done = source, reader, done
        self._names, self._sizes = names, sizes
        self._blocks, self._offsets, self._payloads = block.arrange(sizes)
        self._checksums = np.zeros(len(names), np.uint64)
        # Row where each block's samples begin, and one past the last.
        self._first = np.searchsorted(self._blocks, np.arange(len(self._payloads) + 1)).tolist()
        self._values: ByteQueue = ByteQueue(_WAITING_BYTES)

    def file_bytes(self) -> int:
        """Return how many bytes the file is going to have, or a few pages more."""
        pages = [block.value_pages(payload) for payload in self._payloads + self._table_payloads()]
        return (sum(pages) + _OWN_PAGES + len(pages) // 64) * block.PAGE

    def read(self) -> None:
        """Read the source's files and hand them to `write`; return when all were read."""
        try:
            for value in self._made():
                self._values.put(value)
        except BaseException:
            self._values.end(broken=True)
            raise
        self._values.end()

    def write(self, path: Path) -> Piece:
        """Write the shard to `path`, which must not exist, as `read` goes on."""
        try:
            sealed = write_shard(path, self._payloads + self._table_payloads(), self._values)
        finally:
            self.abandon()
        return Piece(sealed.id, sealed.bytes, sealed.layout.offsets, self._checksums)

    def abandon(self) -> None:
        """Let `read` go: `write` will not be called, or has ended."""
        self._values.close()

    def _table_payloads(self) -> list[int]:
        sizes = self._names.lengths
        starts = range(0, len(sizes), block.TABLE_SAMPLES)
        return [block.table_payload(sizes[start : start + block.TABLE_SAMPLES]) for start in starts]

    def _made(self) -> Iterator[bytes | bytearray]:
        numbers = [n for n in range(len(self._payloads)) if self._first[n] < self._first[n + 1]]
        short = [n for n in numbers if self._sizes[self._first[n]] <= block.SPAN]
        rows = [slice(self._first[n], self._first[n + 1]) for n in short]
        packed = self._reader.runs(self._names, self._sizes, rows, block.HEADER)
        for number in numbers:
            first, stop = self._first[number], self._first[number + 1]
            if int(self._sizes[first]) > block.SPAN:
                yield from self._long_values(number, first)
            else:
                yield self._packed_value(number, *next(packed))
            self._done(stop - first, int(self._sizes[first:stop].sum()))
        yield from self._table_values()

    def _packed_value(self, number: int, run: slice, value: bytearray) -> bytearray:
        checksum = block.checksum
        with memoryview(value) as whole:
            at, found = block.HEADER, []
            for size in self._sizes[run].tolist():
                found.append(checksum(whole[at : at + size]))
                at += size
            self._checksums[run] = found
            payload = checksum(whole[block.HEADER :])
        value[: block.HEADER] = self._header(number, run.start, run.stop - run.start, payload)
        return value

    def _long_values(self, number: int, row: int) -> Iterator[bytes]:
        whole = xxhash.xxh3_64()
        length = int(self._sizes[row])
        for place, _, size in block.pieces(number, 0, length):
            start = (place - number) * block.SPAN
            piece = self._source.read_range(self._names[row], start, size)
            whole.update(piece)
            yield self._header(place, row, int(place == number), block.checksum(piece)) + piece
        self._checksums[row] = whole.intdigest()

    def _header(self, number: int, first: int, samples: int, checksum: int) -> bytes:
        payload = self._payloads[number]
        return block.encode_header(block.Header(block.RecordKind.DATA, number, samples, first, payload, checksum))

    def _table_values(self) -> Iterator[bytes]:
        columns = {
            "lengths": self._sizes,
            "checksums": self._checksums,
            "blocks": self._blocks,
            "offsets": self._offsets,
        }
        for i, start in enumerate(range(0, len(self._names), block.TABLE_SAMPLES)):
            stop = min(start + block.TABLE_SAMPLES, len(self._names))
            listed = {name: column[start:stop] for name, column in columns.items()}
            payload = block.encode_table(self._names[start:stop], listed)
            number, checksum = len(self._payloads) + i, block.checksum(payload)
            header = block.Header(block.RecordKind.TABLE, number, stop - start, start, len(payload), checksum)
            yield block.encode_header(header) + payload


def build_shard(builder: ShardBuilder, path: Path) -> Piece:
    """Read and write one shard, and return it sealed at `path`, which must not exist."""
    with ThreadPoolExecutor(1, thread_name_prefix="deeplink-write") as pool:
        written = pool.submit(builder.write, path)
        with suppress(AbandonedError):  # `write` says why
            builder.read()
        return written.result()
