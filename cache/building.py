"""Builds one shard from a source: reads its files, packs them into blocks, writes and seals them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache import block
from deeplink.cache.shard import SealedShard, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.plan import ShardPlan
    from deeplink.cache.reading import FileReader
    from deeplink.cache.source import Listing, Source
    from deeplink.types import SampleKey


@dataclass(frozen=True, slots=True, eq=False)
class BuiltShard:
    """A sealed shard, and the checksums (uint64) of its samples in order."""

    sealed: SealedShard
    checksums: np.ndarray


class ShardBuilder:
    """Builds the shard of one plan.

    Args:
        source: what to read from.
        reader: reads many small files of it.
        listing: what was listed there.
        plan: the rows that make this shard.
        done: told, after each block, how many files and bytes were packed since it was last told.
    """

    def __init__(
        self,
        source: Source,
        reader: FileReader,
        listing: Listing,
        plan: ShardPlan,
        done: Callable[[int, int], None],
    ) -> None:
        self._source, self._reader, self._done = source, reader, done
        self._keys: Sequence[SampleKey] = listing.keys[plan.rows]
        self._lengths = listing.sizes[plan.rows]
        self._blocks, self._offsets, self._payloads = block.arrange(self._lengths.tolist())
        self._checksums = np.zeros(len(self._keys), np.uint64)
        # Row where each block's samples begin, and one past the last.
        self._first = np.searchsorted(self._blocks, np.arange(len(self._payloads) + 1)).tolist()

    def build(self, path: Path) -> BuiltShard:
        """Write the shard to `path`, which must not exist.

        Raises:
            SourceFileError, SourceChangedError: a file cannot be read, or is not what was listed.
            ShardWriteError: this machine cannot write shards.
            OSError: writing failed.
        """
        tables = self._table_payloads()
        sealed = write_shard(path, self._payloads + tables, self._values())
        return BuiltShard(sealed, self._checksums)

    def _table_payloads(self) -> list[int]:
        sizes = np.array([len(key.encode()) for key in self._keys], np.int64)
        starts = range(0, len(sizes), block.TABLE_SAMPLES)
        return [block.table_payload(sizes[start : start + block.TABLE_SAMPLES]) for start in starts]

    def _values(self) -> Iterator[bytes]:
        for number in range(len(self._payloads)):
            first, stop = self._first[number], self._first[number + 1]
            if first == stop:
                continue  # a later piece of a long sample, written with its first
            if int(self._lengths[first]) > block.SPAN:
                yield from self._long_values(number, first)
            else:
                yield self._packed_value(number, first, stop)
            self._done(stop - first, int(self._lengths[first:stop].sum()))
        yield from self._table_values()

    def _packed_value(self, number: int, first: int, stop: int) -> bytes:
        samples = self._reader.read(self._keys[first:stop], self._lengths[first:stop].tolist())
        whole = xxhash.xxh3_64()
        for row, sample in enumerate(samples, first):
            self._checksums[row] = block.checksum(sample)
            whole.update(sample)
        return b"".join([self._header(number, first, stop - first, whole.intdigest()), *samples])

    def _long_values(self, number: int, row: int) -> Iterator[bytes]:
        whole = xxhash.xxh3_64()
        length = int(self._lengths[row])
        for place, _, size in block.pieces(number, 0, length):
            start = (place - number) * block.SPAN
            piece = self._source.read_range(self._keys[row], start, size)
            whole.update(piece)
            yield self._header(place, row, int(place == number), block.checksum(piece)) + piece
        self._checksums[row] = whole.intdigest()

    def _header(self, number: int, first: int, samples: int, checksum: int) -> bytes:
        return block.encode_header(
            block.Header(
                kind=block.Kind.DATA,
                number=number,
                samples=samples,
                first=first,
                payload=self._payloads[number],
                checksum=checksum,
            )
        )

    def _table_values(self) -> Iterator[bytes]:
        table = block.Table(
            self._keys, self._blocks, self._offsets, self._lengths.astype(np.uint64), self._checksums
        )
        for i, start in enumerate(range(0, len(table), block.TABLE_SAMPLES)):
            stop = min(start + block.TABLE_SAMPLES, len(table))
            payload = block.encode_table(table, start, stop)
            header = block.Header(
                kind=block.Kind.TABLE,
                number=len(self._payloads) + i,
                samples=stop - start,
                first=start,
                payload=len(payload),
                checksum=block.checksum(payload),
            )
            yield block.encode_header(header) + payload
