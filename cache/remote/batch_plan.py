"""Plans the requests of one batch: what is still missing, which members to ask, in which requests."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.reads.copying import by_shard
from deeplink.cache.remote import frames
from deeplink.cache.remote.transport import BatchReply, Places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.batch import Batch
    from deeplink.cache.index import Index
    from deeplink.types import NodeName, ShardId

_MOST_BATCH_BYTES = 64 << 20
"""Samples asked of one member at once, so that a batch of giants does not fill the memory."""


@dataclass(slots=True, eq=False)
class BatchOutcome:
    """How a batch of reads from members went.

    Attributes:
        missing: positions that no member served; int64, sorted.
        problems: per position, why members did not serve it.
        failed: positions that some member failed to serve (not holding a shard is no failure).
    """

    missing: np.ndarray
    problems: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    failed: set[int] = field(default_factory=set)

    def fail(self, positions: np.ndarray, problem: str) -> None:
        """Note that a member failed to serve these."""
        for position in positions.tolist():
            self.problems[position].append(problem)
            self.failed.add(position)


class Asking:
    """A batch being filled by members.

    Args:
        index: the dataset's version.
        rows: of the index, one per place of the batch.
        positions: which of them are wanted; int64, sorted.
        batch: where the bytes go.
        chain: shard number -> members to be asked for it, in order.

    Attributes:
        silent: members that failed during this batch: it does not wait for one of them twice.
    """

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
        self.silent: set[NodeName] = set()
        self.outcome = BatchOutcome(positions)

    def is_left(self, positions: np.ndarray) -> np.ndarray:
        """Tell of each position whether its sample is still to be had."""
        found: np.ndarray = self._is_left[positions]
        return found

    def left(self, among: np.ndarray | None = None) -> np.ndarray:
        """Return the positions still to be had."""
        positions = self._positions if among is None else among
        found: np.ndarray = positions[self._is_left[positions]]
        return found

    def shares(self, among: np.ndarray | None = None) -> dict[NodeName, np.ndarray]:
        """Return whom to ask for what, of what is left: each shard's next member that was not asked yet."""
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

    def ask_again(self, name: NodeName) -> None:
        """Let a member be asked once more for what is left."""
        for tried in self._tried.values():
            tried.discard(name)

    def parts(self, positions: np.ndarray) -> Iterator[np.ndarray]:
        """Yield one member's share in pieces of a size that one request may have."""
        lengths = self._lengths[positions]
        is_few = len(positions) <= frames.ASKED_EXTENTS and not self._has_long
        if is_few and int(lengths.sum()) <= _MOST_BATCH_BYTES:
            yield positions
            return
        ends, counts = np.cumsum(lengths), np.cumsum(_pieces(lengths))
        start = 0
        while start < len(positions):
            before, asked = (int(ends[start - 1]), int(counts[start - 1])) if start else (0, 0)
            stop = min(
                int(np.searchsorted(ends, before + _MOST_BATCH_BYTES, side="right")),
                int(np.searchsorted(counts, asked + frames.ASKED_EXTENTS, side="right")),
            )
            stop = max(stop, start + 1)
            yield positions[start:stop]
            start = stop

    def request(self, positions: np.ndarray) -> tuple[frames.ExtentsRequest, Places]:
        """Return the request for these samples, and where their bytes go."""
        rows, starts = self.rows[positions], self.batch.offsets[positions]
        numbers, places = list[int](), np.empty(len(rows), np.int64)
        for number, here in by_shard(self._shards[positions]):
            places[here] = len(numbers)
            numbers.append(number)
        named: list[ShardId] = [self._index.shards[number].id for number in numbers]
        if self._has_long and (self._lengths[positions] > block.SPAN).any():
            return self._request_in_pieces(rows, starts, named, places)
        extents = np.empty(len(rows), frames.EXTENT)
        extents["shard"], extents["block"] = places, self._index.block[rows]
        extents["offset"], extents["length"] = self._index.offset[rows], self._lengths[positions]
        return frames.ExtentsRequest(0, named, extents), Places(self.batch.data, starts)

    def _request_in_pieces(
        self, rows: np.ndarray, starts: np.ndarray, named: list[ShardId], places: np.ndarray
    ) -> tuple[frames.ExtentsRequest, Places]:
        extents, at = [], []
        for row, start, place in zip(rows.tolist(), starts.tolist(), places.tolist(), strict=True):
            for piece in self._index.pieces(row):
                extents.append((place, *piece))
                at.append(start)
                start += piece[2]  # noqa: PLW2901 - each piece follows the last
        return frames.ExtentsRequest(0, named, np.array(extents, frames.EXTENT)), Places(
            self.batch.data, np.array(at, np.int64)
        )

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
        """Take notice that samples came; return the positions of those that are not what was packed.

        Args:
            positions: of samples still to be had.
            checksums: uint64, of the bytes that came of each.
        """
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
