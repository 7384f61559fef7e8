"""Batches: many samples in one piece of memory, and the system calls that copy them there out of shard files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.rpc.plain.outgoing import IOV_MAX, PAIR, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.mapped import ShardFile

_SMALL = 1 << 18
"""For less than this malloc's own memory is as good."""
_MOST_LENT = 16
"""Batches that are watched at once: a caller that keeps more has no use for their memory being used again."""
_MOST_KEPT = 64 << 20
"""Bytes of memory that no batch uses at the moment."""
_UNIT = 2 << 20
"""Memory is got in whole huge pages of x86, so that batches of about one length fit into one another's."""
_GATHERED_BYTES = 32 << 10
"""Longer samples are copied by a call each: gathering takes 0.65 of the time at 4 KiB, and the same here."""
_PIPE_BYTES = 512 << 10
"""In one smaller than half of that the calls are so many that `preadv` does as well."""
_NONBLOCK = 2  # SPLICE_F_NONBLOCK

_library = ctypes.CDLL(None, use_errno=True)
_vmsplice = getattr(_library, "vmsplice", None)
if _vmsplice is not None:
    _vmsplice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    _vmsplice.restype = ctypes.c_ssize_t
_readv = _library.readv
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_readv.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples back to back in one arena; nothing else refers to it, so it may be written to."""

    arena: np.ndarray  # uint8
    offsets: np.ndarray  # int64, one more than samples: sample i is `arena[offsets[i]:offsets[i + 1]]`
    lengths: np.ndarray  # int64, bytes of each sample
    _views: list[memoryview] = field(default_factory=list, repr=False)  # made when first asked for

    @classmethod
    def empty(cls, lengths: np.ndarray, room: Callable[[int], np.ndarray] | None = None) -> Self:
        """Return a batch with room for samples of these lengths, whose bytes are whatever was in memory."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
        size = int(offsets[-1])
        return cls(np.empty(size, np.uint8) if room is None else room(size), offsets, offsets[1:] - offsets[:-1])

    @property
    def data(self) -> memoryview:
        """The arena as bytes."""
        return self.arena.data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> memoryview:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.data[int(self.offsets[position]) : int(self.offsets[position + 1])]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.views())

    def views(self) -> list[memoryview]:
        """Return each sample's bytes."""
        if not self._views:
            data = self.data
            self._views[:] = [data[start:stop] for start, stop in itertools.pairwise(self.offsets.tolist())]
        return self._views.copy()


def by_shard(shards: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each shard's number and the positions where it stands."""
    if not len(shards):
        return
    if (shards == shards[0]).all():
        yield int(shards[0]), np.arange(len(shards))
        return
    order = np.argsort(shards, kind="stable")
    ordered = shards[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for start, stop in itertools.pairwise([0, *edges.tolist(), len(order)]):
        yield int(ordered[start]), order[start:stop]


class Arenas:
    """Memory that batches are read into. Safe to use from several threads; each process needs its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        # Looked at, not called back: an error that a signal raises in a weak reference's callback would be lost.
        self._lent: list[tuple[weakref.ref[NDArray[np.uint8]], mmap.mmap]] = []

    def room(self, size: int) -> NDArray[np.uint8]:
        """Return an arena of `size` bytes, uint8, whose content is anything."""
        if size < _SMALL:
            return np.empty(size, np.uint8)
        with self._lock:
            self._take_back()
            if len(self._lent) >= _MOST_LENT:
                return np.empty(size, np.uint8)
            memory = self._fitting(size) or _new(-(-size // _UNIT) * _UNIT)
            arena = np.frombuffer(memory, np.uint8, size)
            self._lent.append((weakref.ref(arena), memory))
            return arena

    def _take_back(self) -> None:
        still, free = [], []
        for entry in self._lent:
            if entry[0]() is None:
                free.append(entry[1])
            else:
                still.append(entry)
        # In this order: what a signal's error comes between is lost, and never twice there for two batches.
        self._lent = still
        self._free += free
        while sum(map(len, self._free)) > _MOST_KEPT:
            del self._free[0]

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Take the smallest free memory that has room, if it is not far too large."""
        fitting = [memory for memory in self._free if size <= len(memory) <= 2 * size + _UNIT]
        if not fitting:
            return None
        memory = min(fitting, key=len)
        self._free.remove(memory)
        return memory


def _new(size: int) -> mmap.mmap:
    # Private, so that a forked child's writes are its own.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL: a kernel built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Pipe:
    """A pipe for one batch: making it takes a twentieth of the batch's time, and none is ever left half full.

    None is kept: the pages of all of a user's pipes count against one limit (64 MiB), and beyond it each new one
    has two pages, torch's queues too.
    """

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.reads, self.writes = self._ends
        _pipes.add(self)
        try:
            fcntl.fcntl(self.writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the pipe, and what is in it."""
        _pipes.discard(self)
        for descriptor in self._ends:
            os.close(descriptor)


_pipes: set[_Pipe] = set()
_usable = _vmsplice is not None


def _let_go() -> None:
    for pipe in list(_pipes):
        pipe.close()


# Those that other threads were using at the moment of a fork are of no use to the child.
os.register_at_fork(after_in_child=_let_go)


def is_available() -> bool:
    """Tell whether this machine has the call, and no sandbox has refused it so far."""
    return _usable


def gather(sources: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> int:
    """Copy `lengths[i]` bytes from `sources[i]` to `targets[i]`; return how many pieces were copied.

    Pieces are copied in order; the one after those that were copied cannot be read. Fewer than all, and
    `is_available` false from then on, where the machine does not let us.
    """
    if not len(sources) or not is_available():
        return 0
    try:
        pipe = _Pipe()
    except OSError:  # there may be room again for the next batch
        return 0
    try:
        return _copied(pipe, sources, lengths, targets)
    finally:
        pipe.close()


def _copied(pipe: _Pipe, sources: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> int:
    ends = np.cumsum(lengths)
    whole, done, piece = int(ends[-1]), 0, 0
    remote, local = pairs(sources, lengths), pairs(targets, lengths)
    while done < whole:
        at, count = piece * PAIR.itemsize, min(IOV_MAX, len(lengths) - piece)
        moved = _moved(pipe, remote.ctypes.data + at, local.ctypes.data + at, count)
        if moved <= 0:
            break
        done += moved
        piece = int(np.searchsorted(ends, done, side="right"))
        if done < whole:
            _shorten(remote, local, piece, done - (int(ends[piece - 1]) if piece else 0), lengths)
    return int(np.searchsorted(ends, done, side="right"))


def _moved(pipe: _Pipe, remote: int, local: int, count: int) -> int:
    """Copy what the pipe takes in one go of `count` pieces; return how many bytes that was, 0 where none can."""
    global _usable  # noqa: PLW0603 - what a sandbox refuses once it refuses always
    if _vmsplice is None:
        return 0
    moved: int = _vmsplice(pipe.writes, remote, count, _NONBLOCK)
    if moved < 0:
        if ctypes.get_errno() in {errno.ENOSYS, errno.EPERM}:
            _usable = False
        return 0
    if moved and _readv(pipe.reads, local, count) != moved:
        raise OSError(errno.EIO, "a pipe gave other bytes than it took")
    return moved


def _shorten(remote: np.ndarray, local: np.ndarray, piece: int, copied: int, lengths: np.ndarray) -> None:
    """Let a piece begin behind so many bytes that were copied."""
    before = int(lengths[piece]) - int(remote["length"][piece])
    for pieces in (remote, local):
        pieces["base"][piece] += np.uintp(copied - before)
        pieces["length"][piece] -= np.uintp(copied - before)


class Copying:
    """The copies that one batch takes: many short samples in a few calls, long ones in a call each."""

    def __init__(self, index: Index, rows: np.ndarray, batch: Batch) -> None:
        self._index, self._rows, self._batch = index, rows, batch
        self._offsets, self._lengths = index.file_offsets(rows), batch.lengths
        self._sources = np.zeros(len(rows), np.uint64)
        self._files: dict[int, tuple[ShardFile, np.ndarray]] = {}
        self._gathered: list[np.ndarray] = []
        self.missing: list[np.ndarray] = []

    def add(self, number: int, file: ShardFile, positions: np.ndarray, *, cold: bool) -> None:
        """Take in the samples at `positions`, all of one shard."""
        self._files[number] = (file, positions)
        lengths = self._lengths[positions]
        if cold and len(positions) > 1:
            # What comes from the disk is read by calls, which bring no page into the mapping: a tenth faster.
            file.will_need(self._offsets[positions].tolist(), lengths.tolist())
        elif file.address and is_available():
            short = positions[lengths <= _GATHERED_BYTES]
            self._sources[short] = np.uint64(file.address) + self._offsets[short].astype(np.uint64)
            self._gathered.append(short)

    def copy(self) -> list[tuple[int, Exception]]:
        """Copy everything; return the shards that could not be read, and why. Their samples are missing."""
        chosen = np.sort(np.concatenate(self._gathered)) if self._gathered else np.empty(0, np.int64)
        target = np.uint64(self._batch.arena.ctypes.data)
        targets = target + self._batch.offsets[chosen].astype(np.uint64)
        # Whatever could not be gathered is read one by one, which says what is wrong with it.
        copied = chosen[: gather(self._sources[chosen], self._lengths[chosen], targets)]
        is_left = np.ones(len(self._rows), bool)
        is_left[copied] = False
        problems: list[tuple[int, Exception]] = []
        for number, (file, positions) in self._files.items():
            try:
                self._read(file, positions[is_left[positions]])
                file.check()  # a page cut through reads as zeros beyond the cut
            except (ShardCorruptError, OSError) as problem:
                problems.append((number, problem))
                self.missing.append(positions)
        return problems

    def _read(self, file: ShardFile, positions: np.ndarray) -> None:
        data, starts = self._batch.data, self._batch.offsets
        lengths = self._lengths[positions]
        if len(positions) and int(lengths.max()) > block.SPAN:
            for position in positions.tolist():
                self._read_pieces(file, position)
            return
        ends = zip(starts[positions].tolist(), starts[positions + 1].tolist(), strict=True)
        file.read_into([data[start:stop] for start, stop in ends], self._offsets[positions].tolist())

    def _read_pieces(self, file: ShardFile, position: int) -> None:
        row = int(self._rows[position])
        begins = self._index.block_offsets(int(self._index.shard[row]))
        pieces = self._index.pieces(row)
        ends = itertools.accumulate(
            (length for _, _, length in pieces), initial=int(self._batch.offsets[position])
        )
        parts = [self._batch.data[start:stop] for start, stop in itertools.pairwise(ends)]
        file.read_into(parts, [int(begins[number]) + offset for number, offset, _ in pieces])

    def left(self) -> np.ndarray:
        """Return the positions that are missing, sorted; int64."""
        if not self.missing:
            return np.empty(0, np.int64)
        is_missing = np.zeros(len(self._rows), bool)
        is_missing[np.concatenate(self.missing)] = True
        return np.flatnonzero(is_missing)
