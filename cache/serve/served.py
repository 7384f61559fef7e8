"""Shards of a store that are open to be sent, and where in them a request's extents lie."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deeplink.cache.errors import ShardCorruptError, ShardIdError
from deeplink.cache.format import block
from deeplink.cache.read.batch import by_shard
from deeplink.cache.read.mapped import ColdGauge, ShardFile, most_open
from deeplink.cache.store.store import is_doubtful
from deeplink.cache.transfer import frames
from deeplink.core import metrics
from deeplink.rpc.plain import CallRefusedError, Status
from deeplink.rpc.plain.outgoing import Scattered
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

_BODY_BYTES = 16 << 20
"""A reply's body is closed when it has so many bytes: it bounds what a reply takes."""
_LOOKED_AT_S = 0.1
"""An open file is not compared with its folder's more often than this."""
_TOUCHED_S = 60.0
"""What is sent is noted as read no more often than this: it keeps the shard from leaving as unused."""
_DEAD_ENTRIES = 1 << 20
_LACKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What says nothing of a shard: it can be opened again in a moment."""

_OK = cache_pb2.READ_STATUS_OK


@dataclass(slots=True, eq=False)
class _Served:
    """An open shard; its blocks are entries `base` to `base + count` of the table."""

    file: ShardFile
    count: int
    base: int
    looked_at: float
    touched_at: float


class _Blocks(NamedTuple):
    offsets: np.ndarray  # where the blocks of all open shards lie in their files, int64
    payloads: np.ndarray  # their lengths, int64


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Items of a reply in order; their bytes are `copies`, or lie at `places`."""

    head: np.ndarray  # of frames.ITEM
    samples: int  # how many of them are OK
    size: int  # bytes of those
    copies: list[memoryview]
    places: Scattered | None = None


class ServedShards:
    """The open shards of `store`. Safe to use from several threads."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Served] = OrderedDict()
        self._most = most_open()
        self._blocks = _Blocks(np.empty(0, np.int64), np.empty(0, np.int64))
        self._used = self._dead = 0
        self.cold = ColdGauge()

    def get(self, name: ShardId) -> tuple[_Served | None, int]:
        """Return an open shard; None, with the status that says why, where it cannot be served."""
        now = self._clock.monotonic()
        with self._lock:
            served = self._open.get(name)
            if served is not None:
                self._open.move_to_end(name)
        try:
            if served is not None:
                if now - served.looked_at < _LOOKED_AT_S:
                    return served, _OK
                # A reader in another process may have put the file aside, and another copy may have come.
                if self._store.inode(name) == served.file.inode:
                    served.file.check()
                    served.looked_at = now
                    if now - served.touched_at >= _TOUCHED_S:
                        served.touched_at = now
                        self._store.touch(name)
                    return served, _OK
                self.close(name)
            return self._opened(block.checked_shard_id(name), now), _OK
        except ShardIdError:
            return None, cache_pb2.READ_STATUS_NO_SHARD
        except FileNotFoundError:
            self._store.missed(name)
            return None, cache_pb2.READ_STATUS_NO_SHARD
        except (ShardCorruptError, OSError) as problem:
            if isinstance(problem, OSError) and problem.errno in _LACKS:
                with self._lock:
                    self._close_oldest((len(self._open) + 1) // 2)
                raise CallRefusedError(Status.EXHAUSTED, f"shards cannot be opened now: {problem}") from problem
            self.set_aside(name, problem)
            return None, cache_pb2.READ_STATUS_DAMAGED

    def _opened(self, shard: ShardId, now: float) -> _Served:
        file = ShardFile(self._store.path(shard), shard, mapped=self._store.is_verified(shard))
        found = file.scan()
        self._store.touch(shard)
        with self._lock:
            base = self._add(found.offsets.astype(np.int64), found.payloads.astype(np.int64))
            served = self._open[shard] = _Served(file, len(found.offsets), base, now, now)
            self._close_oldest(len(self._open) - self._most)
        return served

    def _close_oldest(self, count: int) -> None:
        for _ in range(count):
            self._dead += self._open.popitem(last=False)[1].count

    def _add(self, offsets: np.ndarray, payloads: np.ndarray) -> int:
        """Put a shard's blocks into the table; return where."""
        if self._dead > max(_DEAD_ENTRIES, self._used // 2):
            self._compact()
        base, end = self._used, self._used + len(offsets)
        if end > len(self._blocks.offsets):
            room = np.empty(max(end, len(self._blocks.offsets)), np.int64)
            # New arrays, for others read the old ones at this moment.
            self._blocks = _Blocks(*(np.concatenate([column[:base], room]) for column in self._blocks))
        self._blocks.offsets[base:end], self._blocks.payloads[base:end] = offsets, payloads
        self._used = end
        return base

    def _compact(self) -> None:
        kept = list(self._open.values())
        columns = (
            np.concatenate([column[served.base : served.base + served.count] for served in kept] or [column[:0]])
            for column in self._blocks
        )
        self._blocks = _Blocks(*columns)
        base = 0
        # Replaced, not changed: a request that located blocks a moment ago goes on with the old table.
        for name, served in list(self._open.items()):
            self._open[name] = replace(served, base=base)
            base += served.count
        self._used, self._dead = base, 0

    def locate(
        self, shards: Sequence[ShardId], forbidden: Collection[ShardId] = ()
    ) -> tuple[list[_Served | None], list[int], _Blocks]:
        """Return, per shard, what `get` says unless it is forbidden, and the table that their `base` is of."""
        found = [
            (None, cache_pb2.READ_STATUS_FORBIDDEN) if shard in forbidden else self.get(shard) for shard in shards
        ]
        with self._lock:
            blocks = self._blocks
            served = [
                None if one is None else self._open.get(shard, one)
                for shard, (one, _) in zip(shards, found, strict=True)
            ]
        return served, [status for _, status in found], blocks

    def close(self, name: str) -> _Served | None:
        """Let go of a shard's open file, if there is one, and return it; the next request opens what is there."""
        with self._lock:
            served = self._open.pop(name, None)
            self._dead += served.count if served else 0
            return served

    def set_aside(self, shard: ShardId, problem: Exception) -> None:
        """Stop serving a shard's open file; if the shard itself is damaged, it is quarantined."""
        served = self.close(shard)
        if not isinstance(problem, ShardCorruptError):
            log.warning("shard %s cannot be served now: %s", shard, problem)
            if is_doubtful(problem):
                with contextlib.suppress(OSError):
                    self._store.doubt(shard)
            return
        metrics.CACHE_DAMAGED_SHARDS.inc()
        self._store.quarantine(shard, str(problem), inode=served.file.inode if served else None)


class Answering:
    """One request being answered from open shards; `bodies` may be gone through once."""

    def __init__(
        self,
        shards: ServedShards,
        request: frames.ExtentsRequest,
        *,
        copied: bool,
        forbidden: Collection[ShardId] = (),
    ) -> None:
        self._shards, self._request, self._copied = shards, request, copied
        self._served, problems, blocks = shards.locate(request.shards, forbidden)
        extents, begins, numbers = request.extents, request.extents["offset"], request.extents["block"]
        self._places, self._lengths = extents["shard"], extents["length"].astype(np.int64)
        bases: np.ndarray | int
        counts: np.ndarray | int
        if len(self._served) == 1 and self._served[0] and not self._places.any():  # one shard: the same for all
            bases, counts = self._served[0].base, self._served[0].count
            self._status = np.zeros(len(extents), np.uint32)
        else:
            # One more for extents of shards that were not named.
            self._places = np.minimum(self._places, len(self._served))
            bases = np.array([*(one.base if one else 0 for one in self._served), 0])[self._places]
            counts = np.array([*(one.count if one else 0 for one in self._served), 0])[self._places]
            self._status = np.array([*problems, cache_pb2.READ_STATUS_BAD_EXTENT], np.uint32)[self._places]
        good: np.ndarray = numbers < counts
        entries: np.ndarray = bases + numbers.astype(np.int64)
        if not good.all():
            entries[~good] = 0
        if len(blocks.offsets):
            self._offsets = blocks.offsets[entries] + begins
            good &= self._lengths <= np.minimum(blocks.payloads[entries] - begins, frames.MOST_EXTENT_BYTES)
        else:
            self._offsets = begins.astype(np.int64)
        self._is_whole = bool(good.all())  # every extent can be sent, as far as is known
        if not self._is_whole:
            self._status[~good & (self._status == _OK)] = cache_pb2.READ_STATUS_BAD_EXTENT

    def bodies(self) -> Iterator[Body]:
        """Yield what is to be sent, one body a reply."""
        cold = self._shards.cold.is_cold()
        if self._is_whole and int(self._lengths.sum()) <= _BODY_BYTES:
            yield self._body(slice(None), cold=cold)
            return
        ends = np.cumsum(np.where(self._status == _OK, self._lengths, 0))
        start = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + _BODY_BYTES, side="right")), start + 1)
            yield self._body(slice(start, stop), cold=cold)
            start = stop

    def _body(self, run: slice, *, cold: bool) -> Body:
        status, lengths = self._status[run], self._lengths[run]
        mine = slice(None) if self._is_whole else np.flatnonzero(status == _OK)
        copies, found = list[memoryview](), None
        if self._copied or not all(served is None or served.file.is_mapped for served in self._served):
            copies = self._read(run, np.arange(len(status))[mine], cold=cold)
            lengths = np.where(status == _OK, lengths, 0)  # what could not be read is damaged
        elif len(lengths[mine]):
            found = self._scattered(self._places[run][mine], self._offsets[run][mine], lengths[mine], cold=cold)
        if not self._is_whole:
            lengths = np.where(status == _OK, lengths, 0)
        head = np.empty(len(status), frames.ITEM)
        head["status"], head["length"] = status, lengths
        samples = len(status) - int(np.count_nonzero(status))  # READ_STATUS_OK is 0
        return Body(head, samples, len(found) if found else int(lengths.sum()), copies, found)

    def _scattered(self, places: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, *, cold: bool) -> Scattered:
        """Return where samples lie in mapped files."""
        if cold and len(places) > 1:
            for place, here in by_shard(places):
                if served := self._served[place]:
                    served.file.will_need(offsets[here].tolist(), lengths[here].tolist())
        files = [served.file for served in self._served if served]
        if len(self._served) == 1:
            return Scattered(offsets + files[0].address, lengths, files)
        mapped = np.array([served.file.address if served else 0 for served in self._served], np.int64)
        return Scattered(mapped[places] + offsets, lengths, files)

    def _read(self, run: slice, mine: np.ndarray, *, cold: bool) -> list[memoryview]:
        """Return the parts shard by shard: read ahead, and copied where they are not mapped."""
        parts: list[memoryview | None] = [None] * len(self._status[run])
        places, offsets, lengths = self._places[run], self._offsets[run], self._lengths[run]
        for place in sorted(set(places[mine].tolist())):
            here = mine[places[mine] == place]
            served = self._served[place]
            if served is None:
                continue
            try:
                extents = offsets[here].tolist(), lengths[here].tolist()
                found = served.file.read(*extents, cold=cold, copied=self._copied)
            except (ShardCorruptError, OSError) as problem:
                self._shards.set_aside(self._request.shards[place], problem)
                self._status[run][here] = cache_pb2.READ_STATUS_DAMAGED
                continue
            for position, part in zip(here.tolist(), found, strict=True):
                parts[position] = part
        return [part for part in parts if part is not None]

    def unreadable(self) -> str:
        """Set aside the shards that the kernel could not read; return which, for the reader."""
        lost = []
        places, is_ok = self._places, self._status == _OK
        for place, served in enumerate(self._served):
            if served is None:
                continue
            here = np.flatnonzero((places == place) & is_ok)
            try:
                served.file.check()
                for offset, length in zip(self._offsets[here].tolist(), self._lengths[here].tolist(), strict=True):
                    served.file.populate(offset, length)
            except (ShardCorruptError, OSError) as problem:
                self._shards.set_aside(self._request.shards[place], problem)
                lost.append(self._request.shards[place])
        return f"shards cannot be read here: {', '.join(lost)}" if lost else "a shard could not be read"
