"""Builds one shard from a source: reads its files, packs them into blocks, writes and seals them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache import block
from deeplink.cache.packing.byte_queue import AbandonedError, Handover
from deeplink.cache.shard import SealedShard, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.cache.names import Names
    from deeplink.cache.sources.origin import Source
    from deeplink.cache.sources.reading import FileReader

Value = bytes | bytearray
_WAITING_BYTES = 8 << 20
"""What was read and is not yet written, unless one piece of a long sample alone is more."""
_OWN_PAGES = 8
"""Of LMDB, in the smallest file."""


@dataclass(frozen=True, slots=True, eq=False)
class BuiltShard:
    """A sealed shard, and the checksums (uint64) of its samples in order."""

    sealed: SealedShard
    checksums: np.ndarray


class ShardBuilder:
    """Builds one shard. `read` and `write` are for two threads: files are read while blocks are written.

    Args:
        source: what to read from.
        reader: reads many small files of it.
        names: the files of this shard, sorted.
        sizes: int64, their bytes.
        done: told, after each block, how many files and bytes were packed since it was last told.
    """

    def __init__(
        self, source: Source, reader: FileReader, names: Names, sizes: np.ndarray, done: Callable[[int, int], None]
    ) -> None:
        self._source, self._reader, self._done = source, reader, done
        self._names, self._sizes = names, sizes
        self._blocks, self._offsets, self._payloads = block.arrange(sizes)
        self._checksums = np.zeros(len(names), np.uint64)
        # Row where each block's samples begin, and one past the last.
        self._first = np.searchsorted(self._blocks, np.arange(len(self._payloads) + 1)).tolist()
        self._values: Handover[Value] = Handover(_WAITING_BYTES)

    def file_bytes(self) -> int:
        """Return how many bytes the file is going to have, or a few pages more."""
        pages = [block.value_pages(payload) for payload in self._payloads + self._table_payloads()]
        return (sum(pages) + _OWN_PAGES + len(pages) // 64) * block.PAGE

    def read(self) -> None:
        """Read the source's files and hand them to `write`; return when all were read.

        Raises:
            SourceFileError, SourceChangedError: a file cannot be read, or is not what was listed.
            AbandonedError: `write` failed, and says why.
        """
        try:
            for value in self._made():
                self._values.give(value)
        except BaseException:
            self._values.end(broken=True)
            raise
        self._values.end()

    def write(self, path: Path) -> BuiltShard:
        """Write the shard to `path`, which must not exist, as `read` goes on.

        Raises:
            BrokenOffError: `read` failed, and says why.
            ShardWriteError: this machine cannot write shards.
            OSError: writing failed.
        """
        try:
            sealed = write_shard(path, self._payloads + self._table_payloads(), self._values)
        finally:
            self.abandon()
        return BuiltShard(sealed, self._checksums)

    def abandon(self) -> None:
        """Let `read` go: `write` will not be called, or has ended."""
        self._values.close()

    def _table_payloads(self) -> list[int]:
        sizes = self._names.lengths
        starts = range(0, len(sizes), block.TABLE_SAMPLES)
        return [block.table_payload(sizes[start : start + block.TABLE_SAMPLES]) for start in starts]

    def _made(self) -> Iterator[Value]:
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
        return block.encode_header(
            block.Header(
                kind=block.RecordKind.DATA,
                number=number,
                samples=samples,
                first=first,
                payload=self._payloads[number],
                checksum=checksum,
            )
        )

    def _table_values(self) -> Iterator[bytes]:
        table = block.BlockTable(
            self._names, self._blocks, self._offsets, self._sizes.astype(np.uint64), self._checksums
        )
        for i, start in enumerate(range(0, len(table), block.TABLE_SAMPLES)):
            stop = min(start + block.TABLE_SAMPLES, len(table))
            payload = block.encode_table(table, start, stop)
            header = block.Header(
                kind=block.RecordKind.TABLE,
                number=len(self._payloads) + i,
                samples=stop - start,
                first=start,
                payload=len(payload),
                checksum=block.checksum(payload),
            )
            yield block.encode_header(header) + payload


def build_shard(builder: ShardBuilder, path: Path) -> BuiltShard:
    """Read and write one shard, and return it sealed at `path`, which must not exist.

    Raises:
        SourceFileError, SourceChangedError: a file cannot be read, or is not what was listed.
        ShardWriteError: this machine cannot write shards.
        OSError: writing failed.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="deeplink-write") as pool:
        written = pool.submit(builder.write, path)
        with suppress(AbandonedError):  # `write` says why
            builder.read()
        return written.result()
