"""The index of a dataset's version: one Arrow file, memory-mapped, a row per sample in the order of the keys.

Nothing is made per sample when it is opened: columns are views of the mapped file. A version is the SHA-256 of
that file, 40 digits of it, so `sha256sum` checks it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deeplink.cache import block
from deeplink.cache.errors import IndexFormatError, KeyMissingError, RowError
from deeplink.cache.layout import DIGEST_DIGITS
from deeplink.types import SampleKey, ShardId, Version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMAT = 1
_META = b"deeplink"
_OFFSETS = b"deeplink.block_offsets"
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_string(), nullable=False),
        pa.field("shard", pa.uint32(), nullable=False),
        pa.field("block", pa.uint32(), nullable=False),
        pa.field("offset", pa.uint32(), nullable=False),
        pa.field("length", pa.uint64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard of a version.

    Attributes:
        id: its name.
        bytes: size of its file.
        samples: how many of the version's rows it holds.
        blocks: how many blocks, of all kinds, it has.
    """

    id: ShardId
    bytes: int
    samples: int
    blocks: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexContent:
    """What an index is made of; columns in the order of the sorted keys.

    Attributes:
        source: where the small files are.
        shards: the shards, as numbered in `shard`.
        block_offsets: per shard, uint64: where each block's payload begins in its file.
        keys: sorted.
        shard, block, offset: uint32, where each sample begins (see docs/format.md).
        length, checksum: uint64, bytes and xxh3-64 of each sample.
    """

    source: str
    shards: Sequence[ShardEntry]
    block_offsets: Sequence[np.ndarray]
    keys: Sequence[SampleKey]
    shard: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    checksum: np.ndarray


def write_index(path: Path, content: IndexContent) -> Version:
    """Write an index file and return its version; the same content gives the same file.

    Raises:
        OSError: the file cannot be written.
    """
    meta = {"format": FORMAT, "source": content.source, "shards": [asdict(shard) for shard in content.shards]}
    offsets = np.concatenate([np.asarray(part, "<u8") for part in content.block_offsets])
    schema = _SCHEMA.with_metadata({_META: json.dumps(meta, sort_keys=True).encode(), _OFFSETS: offsets.tobytes()})
    columns = [
        pa.array(content.keys, pa.large_string()),
        pa.array(content.shard, pa.uint32()),
        pa.array(content.block, pa.uint32()),
        pa.array(content.offset, pa.uint32()),
        pa.array(content.length, pa.uint64()),
        pa.array(content.checksum, pa.uint64()),
    ]
    batch = pa.record_batch(columns, schema=schema)
    # One record batch, so that each column is one run of memory.
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    return file_version(path)


def file_version(path: Path) -> Version:
    """Return the version that a file's bytes stand for; reads all of it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return Version(hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_DIGITS])


class Index:
    """A version of a dataset, mapped into memory. Safe to read from any thread, and across fork.

    Attributes:
        path: the file.
        version: the dataset version (the file's name says it; `verify` checks it).
        source: where the small files came from.
        shards: the shards, numbered as in `shard`.
        shard, block, offset: uint32 arrays, one entry per row; read-only views of the file.
        lengths: uint64, bytes of each sample.
        checksums: uint64, xxh3-64 of each sample.
    """

    def __init__(self, path: Path, version: Version) -> None:
        """Open `path`.

        Raises:
            IndexFormatError: it is no index, damaged, or of an unknown format.
            OSError: it cannot be opened.
        """
        self.path, self.version = path, version
        try:
            batch, meta = _load(path)
            self._take(batch, meta)
        except (pa.ArrowInvalid, ValueError, KeyError, TypeError) as problem:
            raise IndexFormatError(path, str(problem)) from problem

    def _take(self, batch: pa.RecordBatch, meta: dict[bytes, bytes]) -> None:
        said: dict[str, Any] = json.loads(meta[_META])
        if said["format"] != FORMAT:
            raise IndexFormatError(self.path, f"format {said['format']}, this release reads format {FORMAT}")
        self.source: str = said["source"]
        self.shards = tuple(ShardEntry(**entry) for entry in said["shards"])
        self._first_block = np.cumsum([0, *(entry.blocks for entry in self.shards)], dtype=np.int64)
        self._offsets = np.frombuffer(meta[_OFFSETS], "<u8").astype(np.int64)
        if len(self._offsets) != self._first_block[-1]:
            raise IndexFormatError(self.path, "the list of block offsets does not fit the list of shards")
        self._keys: pa.LargeStringArray = batch.column("key")
        _, ends, text = self._keys.buffers()
        # Plain memory for the search by key: Arrow's scalars cost ten times as much.
        self._ends = memoryview(ends).cast("q") if ends is not None else memoryview(b"").cast("q")
        self._text = memoryview(text) if text is not None else memoryview(b"")
        self.shard, self.block, self.offset, self.lengths, self.checksums = (
            batch.column(name).to_numpy(zero_copy_only=True)
            for name in ("shard", "block", "offset", "length", "checksum")
        )

    def __len__(self) -> int:
        return len(self._keys)

    def _key_bytes(self, row: int) -> bytes:
        return bytes(self._text[self._ends[row] : self._ends[row + 1]])

    def key(self, row: int) -> SampleKey:
        """Return the key of a row.

        Raises:
            RowError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise RowError(row, len(self))
        return SampleKey(self._key_bytes(row).decode())

    def keys(self, rows: range | None = None) -> list[str]:
        """Return the keys of all rows, or of a run of them; makes a text of each."""
        chosen = self._keys if rows is None else self._keys.slice(rows.start, len(rows))
        found: list[str] = chosen.to_pylist()
        return found

    def key_text(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all keys (uint8), and where each begins in them (int64, one entry more than rows).

        Views of the file, for work on all keys at once without a text of each.
        """
        return np.frombuffer(self._text, np.uint8), np.frombuffer(self._ends, np.int64)[: len(self) + 1]

    def _first_not_below(self, key: bytes) -> int:
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._key_bytes(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def row(self, key: str) -> int:
        """Return the row of a key.

        Raises:
            KeyMissingError: the dataset has no such sample.
        """
        raw = key.encode(errors="surrogateescape")
        row = self._first_not_below(raw)
        if row == len(self) or self._key_bytes(row) != raw:
            raise KeyMissingError(key)
        return row

    def rows_below(self, folder: str) -> range:
        """Return the rows of all samples below a folder, `""` for all of them; empty where there is none."""
        name = folder.strip("/").encode(errors="surrogateescape")
        if not name:
            return range(len(self))
        # "0" follows "/" in ASCII.
        return range(self._first_not_below(name + b"/"), self._first_not_below(name + b"0"))

    def classes(self, root: str = "") -> list[str]:
        """Return the sorted names of the folders directly below `root` that hold samples (ImageFolder's classes).

        Raises:
            KeyMissingError: there are no samples below `root`.
        """
        return self._classed(root)[0]

    def labels(self, root: str = "") -> np.ndarray:
        """Return, for each of `rows_below(root)`, the position of its class in `classes(root)`.

        int64, shape (rows,); -1 for a sample that lies directly in `root` and so has no class.

        Raises:
            KeyMissingError: there are no samples below `root`.
        """
        return self._classed(root)[1]

    def _classed(self, root: str) -> tuple[list[str], np.ndarray]:
        rows = self.rows_below(root)
        if not rows:
            raise KeyMissingError(root)
        depth = len(root.strip("/").split("/")) if root.strip("/") else 0
        parts = pc.split_pattern(self._keys.slice(rows.start, len(rows)), "/", max_splits=depth + 1)
        # A sample directly in the root has no part after its own name.
        classed = pc.greater(pc.list_value_length(parts), depth + 1)
        first = pc.if_else(classed, pc.list_element(parts, depth), pa.scalar(None, pa.large_string()))
        coded = first.dictionary_encode()
        seen: list[str] = coded.dictionary.to_pylist()
        names = sorted(seen)
        rank_of = {name: position for position, name in enumerate(names)}
        rank = np.array([rank_of[name] for name in seen], np.int64)
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return names, np.append(rank, -1)[codes].astype(np.int64)

    def block_offsets(self, shard: int) -> np.ndarray:
        """Return where each block's payload of a shard begins in its file (int64)."""
        return self._offsets[self._first_block[shard] : self._first_block[shard + 1]]

    def file_offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return where in their shards' files samples begin (int64); for one longer than SPAN, its first piece."""
        blocks = self._first_block[self.shard[rows]] + self.block[rows]
        found: np.ndarray = self._offsets[blocks] + self.offset[rows]
        return found

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return the (block, offset, length) of a sample's pieces: one, unless it is longer than SPAN."""
        return list(block.pieces(int(self.block[row]), int(self.offset[row]), int(self.lengths[row])))

    def verify(self) -> None:
        """Return if the file is, byte for byte, the version it is named by; reads all of it.

        Raises:
            IndexFormatError: it is not.
            OSError: it cannot be read.
        """
        found = file_version(self.path)
        if found != self.version:
            raise IndexFormatError(self.path, f"its content is that of version {found}")


def _load(path: Path) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    with pa.memory_map(str(path)) as mapped:
        reader = pa.ipc.open_file(mapped)
        meta = reader.schema.metadata or {}
        if reader.num_record_batches != 1 or not reader.schema.equals(_SCHEMA):
            raise IndexFormatError(path, "it does not have an index's columns")
        return reader.get_batch(0), meta
