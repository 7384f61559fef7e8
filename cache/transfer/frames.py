"""Requests for extents of shards, planned for a batch, and the messages that carry them.

A request is the protobuf message of `Cache.Read`. A reply to a gRPC client is one too; a reply to our own clients
is a count, the items and their bytes, which are received where they are wanted.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from google.protobuf.message import DecodeError

from deeplink.cache.errors import FrameError
from deeplink.cache.format import block
from deeplink.cache.read.batch import by_shard
from deeplink.core.types import ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.read.batch import Batch
    from deeplink.core.types import NodeName

EXTENT = np.dtype([("shard", "<u4"), ("block", "<u4"), ("offset", "<u4"), ("length", "<u4")])
ITEM = np.dtype([("status", "<u4"), ("length", "<u4")])
MOST_EXTENTS = 65_536
MOST_SHARDS = 4096
ASKED_EXTENTS = 1024
"""Asked for at once by our client: with a shard's name each they stay below `rpc.plain.LARGEST_REQUEST`."""
MOST_EXTENT_BYTES = block.SPAN
_MOST_BATCH_BYTES = 64 << 20
"""Samples asked of one member at once, so that a batch of giants does not fill the memory."""

_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class ExtentsRequest:
    """A batch of extents: `extents` is an array of EXTENT whose `shard` is a position in `shards`.

    `doubted` names shards of which the member has sent other bytes than were packed.
    """

    id: int
    shards: Sequence[ShardId]
    extents: np.ndarray
    doubted: Sequence[ShardId] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the bytes of a request's extents are wanted."""

    arena: memoryview  # writable
    starts: np.ndarray  # int64, one per extent: where in the arena its bytes begin

    @classmethod
    def alone(cls, request: ExtentsRequest) -> Self:
        """Return places one after another in an arena of their own."""
        lengths = request.extents["length"].astype(np.int64)
        return cls(memoryview(bytearray(int(lengths.sum()))), np.cumsum(lengths) - lengths)


@dataclass(frozen=True, slots=True, eq=False)
class BatchReply:
    """What came of a request, extent by extent."""

    status: np.ndarray  # a ReadStatus each, uint32
    checksums: np.ndarray  # xxh3-64 of the bytes that came of each, uint64

    @classmethod
    def joined(cls, answers: Sequence[BatchReply]) -> BatchReply:
        """Return several answers as one."""
        if len(answers) == 1:
            return answers[0]
        status = np.concatenate([np.empty(0, np.uint32), *(answer.status for answer in answers)])
        return cls(status, np.concatenate([np.empty(0, np.uint64), *(answer.checksums for answer in answers)]))


def encode_request(request: ExtentsRequest) -> bytes:
    """Return the message of a request."""
    message = cache_pb2.ReadRequest(
        id=request.id, shards=request.shards, extents=request.extents.tobytes(), doubted=request.doubted
    )
    return message.SerializeToString()


def decode_request(message: bytes) -> ExtentsRequest:
    """Return the request in a message. Whether its extents exist is not looked at."""
    try:
        said = cache_pb2.ReadRequest.FromString(message)
    except DecodeError as problem:
        raise FrameError(str(problem)) from problem
    if len(said.extents) % EXTENT.itemsize:
        raise FrameError(f"{len(said.extents)} bytes of extents, not a multiple of {EXTENT.itemsize}")
    extents = np.frombuffer(said.extents, EXTENT)
    if len(extents) > MOST_EXTENTS:
        raise FrameError(f"{len(extents)} extents, more than {MOST_EXTENTS}")
    if max(len(said.shards), len(said.doubted)) > MOST_SHARDS:
        raise FrameError(f"more than {MOST_SHARDS} shards")
    doubted = [ShardId(name) for name in said.doubted]
    return ExtentsRequest(said.id, [ShardId(name) for name in said.shards], extents, doubted)


def reply_start(head: np.ndarray) -> bytes:
    """Return a reply to one of our own clients, up to where its items' bytes begin: their count, and `head`."""
    return _COUNT.pack(len(head)) + head.tobytes()


class Bytes(Protocol):
    """A message that is read from its beginning; `left` bytes of it are to come."""

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        ...

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        ...


def read_reply_head(message: Bytes) -> np.ndarray:
    """Return a reply's items (of ITEM), and leave their bytes, and no more, to be read from the message."""
    if message.left < _COUNT.size:
        raise FrameError("a reply that ends too soon")
    (count,) = _COUNT.unpack(message.read(_COUNT.size))
    if count * ITEM.itemsize > message.left:
        raise FrameError(f"a reply with {count} items that ends too soon")
    items = np.frombuffer(message.read(count * ITEM.itemsize), ITEM)
    if int(items["length"].sum(dtype=np.uint64)) != message.left:
        raise FrameError(f"a body of {message.left} bytes that does not fit its head")
    return items


@dataclass(slots=True, eq=False)
class BatchOutcome:
    """How a batch of reads from members went, by position."""

    missing: np.ndarray  # int64, sorted
    problems: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: set[int] = field(default_factory=set)  # by some member; not holding the shard is no failure

    def go_on(self, later: BatchOutcome) -> None:
        """Add how it went with other members, who were asked for what was missing."""
        self.missing = later.missing
        for position, problems in later.problems.items():
            self.problems[position] += problems
        self.failed |= later.failed

    def fail(self, positions: np.ndarray, problem: str) -> None:
        """Note that a member failed to serve these."""
        for position in positions.tolist():
            self.problems[position].append(problem)
            self.failed.add(position)


class Asking:
    """A batch being filled by members: what is still missing, which members to ask for it, in which requests."""

    def __init__(
        self,
        index: Index,
        rows: np.ndarray,
        positions: np.ndarray,
        batch: Batch,
        *,
        chain: Callable[[int], Sequence[NodeName]],
    ) -> None:
        self.rows, self.batch = rows, batch
        self._index, self._chain, self._positions = index, chain, positions
        self._shards = index.shard[rows]
        self._lengths = batch.lengths
        self._has_long = bool(len(rows)) and int(self._lengths.max()) > block.SPAN
        self._is_left = np.zeros(len(rows), bool)
        self._is_left[positions] = True
        self._tried: dict[int, set[NodeName]] = {}
        self.refused: set[NodeName] = set()  # busy: may be asked again after a while
        self.doubted: set[tuple[NodeName, int]] = set()  # members that sent wrong bytes, and of which shards
        self.silent: set[NodeName] = set()  # failed during this batch: it does not wait for one of them twice
        self.outcome = BatchOutcome(positions)

    def is_left(self, positions: np.ndarray) -> np.ndarray:
        """Tell of each position whether its sample is still missing."""
        found: np.ndarray = self._is_left[positions]
        return found

    def left(self, among: np.ndarray | None = None) -> np.ndarray:
        """Return the positions still missing."""
        positions = self._positions if among is None else among
        found: np.ndarray = positions[self._is_left[positions]]
        return found

    def shares(self, among: np.ndarray | None = None) -> dict[NodeName, np.ndarray]:
        """Return which member to ask for which of what is left: each shard's next one that was not asked yet."""
        found: dict[NodeName, list[np.ndarray]] = {}
        left = self.left(among)
        for shard, places in by_shard(self._shards[left]):
            tried = self._tried.setdefault(shard, set())
            name = next((name for name in self._chain(shard) if name not in tried | self.silent), None)
            if name is not None:
                tried.add(name)
                found.setdefault(name, []).append(left[places])
        return {
            name: groups[0] if len(groups) == 1 else np.sort(np.concatenate(groups))
            for name, groups in found.items()
        }

    def ask_refused_again(self) -> None:
        """Let the members that refused be asked once more for what is left."""
        for tried in self._tried.values():
            tried.difference_update(self.refused)
        self.refused.clear()

    def parts(self, positions: np.ndarray) -> Iterator[np.ndarray]:
        """Yield one member's share in pieces of a size that one request may have."""
        lengths = self._lengths[positions]
        is_few = len(positions) <= ASKED_EXTENTS and not self._has_long
        if is_few and int(lengths.sum()) <= _MOST_BATCH_BYTES:
            yield positions
            return
        ends, counts = np.cumsum(lengths), np.cumsum(_pieces(lengths))
        start = 0
        while start < len(positions):
            before, asked = (int(ends[start - 1]), int(counts[start - 1])) if start else (0, 0)
            stop = min(
                int(np.searchsorted(ends, before + _MOST_BATCH_BYTES, side="right")),
                int(np.searchsorted(counts, asked + ASKED_EXTENTS, side="right")),
            )
            stop = max(stop, start + 1)
            yield positions[start:stop]
            start = stop

    def request(self, positions: np.ndarray) -> tuple[ExtentsRequest, Places]:
        """Return the request for these samples, and where their bytes go."""
        rows, starts = self.rows[positions], self.batch.offsets[positions]
        numbers, places = list[int](), np.empty(len(rows), np.int64)
        for number, here in by_shard(self._shards[positions]):
            places[here] = len(numbers)
            numbers.append(number)
        named: list[ShardId] = [self._index.shards[number].id for number in numbers]
        if self._has_long and (self._lengths[positions] > block.SPAN).any():
            return self._request_in_pieces(rows, starts, named, places)
        extents = np.empty(len(rows), EXTENT)
        extents["shard"], extents["block"] = places, self._index.block[rows]
        extents["offset"], extents["length"] = self._index.offset[rows], self._lengths[positions]
        return ExtentsRequest(0, named, extents), Places(self.batch.data, starts)

    def _request_in_pieces(
        self, rows: np.ndarray, starts: np.ndarray, named: list[ShardId], places: np.ndarray
    ) -> tuple[ExtentsRequest, Places]:
        extents, at = [], []
        for row, start, place in zip(rows.tolist(), starts.tolist(), places.tolist(), strict=True):
            for piece in self._index.pieces(row):
                extents.append((place, *piece))
                at.append(start)
                start += piece[2]  # noqa: PLW2901 - each piece follows the last
        return ExtentsRequest(0, named, np.array(extents, EXTENT)), Places(self.batch.data, np.array(at, np.int64))

    def per_sample(self, positions: np.ndarray, answer: BatchReply) -> BatchReply:
        """Return each sample's status, of those of its pieces the worst, and checksum."""
        if len(answer.status) == len(positions):
            return answer
        counts = _pieces(self._lengths[positions])
        status = np.maximum.reduceat(answer.status, np.cumsum(counts) - counts)
        data, ends = self.batch.data, self.batch.offsets
        bounds = zip(ends[positions].tolist(), ends[positions + 1].tolist(), strict=True)
        checksums = np.fromiter((block.checksum(data[a:b]) for a, b in bounds), np.uint64, len(positions))
        return BatchReply(status, checksums)

    @contextmanager
    def safe(self, positions: np.ndarray) -> Iterator[None]:
        """Keep those samples that have come already as they are, whatever is written over them meanwhile."""
        come = positions[~self._is_left[positions]]
        if not len(come):
            yield
            return
        data, ends = self.batch.data, self.batch.offsets
        places = [slice(*pair) for pair in zip(ends[come].tolist(), ends[come + 1].tolist(), strict=True)]
        kept = [bytes(data[place]) for place in places]
        try:
            yield
        finally:
            for place, sample in zip(places, kept, strict=True):
                data[place] = sample

    def take(self, positions: np.ndarray, checksums: np.ndarray) -> np.ndarray:
        """Note that samples came; return the positions of those that are not what was packed."""
        is_wrong = checksums != self._index.checksums[self.rows[positions]]
        self._is_left[positions] = is_wrong
        wrong: np.ndarray = positions[is_wrong]
        return wrong

    def shards_of(self, positions: np.ndarray) -> list[int]:
        """Return the numbers of the shards that hold these, each once, sorted."""
        return sorted(set(self._shards[positions].tolist()))


def _pieces(lengths: np.ndarray) -> np.ndarray:
    """Return how many extents samples of these lengths are."""
    found: np.ndarray = np.maximum(-(-lengths // block.SPAN), 1)
    return found
