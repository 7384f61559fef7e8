"""The file of an index: its columns, and how it is written (docs/format.md)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deeplink.cache.columns import fixed, numbers, strings
from deeplink.cache.indexing.seal import append_seal
from deeplink.cache.indexing.slots import MOST_ROWS, make_slots
from deeplink.cache.layout import DIGEST_DIGITS
from deeplink.types import Version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.types import SampleKey, ShardId

FORMAT = 3
READABLE = (1, 2, 3)
META = b"deeplink"
ID_BYTES = DIGEST_DIGITS // 2


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_SHARD = pa.struct(
    [
        _field("id", pa.binary(ID_BYTES)),
        _field("bytes", pa.uint64()),
        _field("samples", pa.uint64()),
        _field("block_offsets", pa.large_list(_field("item", pa.uint64()))),
    ]
)
PLACE = [("block", pa.uint32()), ("offset", pa.uint32()), ("length", pa.uint64()), ("checksum", pa.uint64())]
SCHEMA = pa.schema(
    [
        _field("key", pa.large_string()),
        _field("shard", pa.dictionary(pa.uint32(), _SHARD)),
        *(_field(name, kind) for name, kind in PLACE),
    ]
)
SCHEMA_2 = SCHEMA.append(_field("hash", pa.uint64())).append(_field("hash_row", pa.uint32()))
"""Its hashes, sorted, and the row of each are of no use any more: keys are found by halving."""
OFFSETS_1 = b"deeplink.block_offsets"
SCHEMA_1 = pa.schema(
    [
        _field("key", pa.large_string()),
        _field("shard", pa.uint32()),
        *(_field(name, kind) for name, kind in PLACE),
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
        keys: sorted by their bytes, each once; Arrow's large strings where there are many.
        shard, block, offset: uint32, where each sample begins (see docs/format.md).
        length, checksum: uint64, bytes and xxh3-64 of each sample.
        home: where all of the shards are kept besides; empty for nowhere.
    """

    source: str
    shards: Sequence[ShardEntry]
    block_offsets: Sequence[np.ndarray]
    keys: Sequence[SampleKey] | pa.LargeStringArray
    shard: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    checksum: np.ndarray
    home: str = ""


def write_index(path: Path, content: IndexContent) -> Version:
    """Write an index file and return its version; the same content gives the same file.

    Takes about 16 bytes of memory per sample besides the content.

    Raises:
        ValueError: the keys are not sorted, or the columns do not fit each other.
        OSError: the file cannot be written.
    """
    keys = _key_array(content.keys)
    if len(keys) > MOST_ROWS:
        raise ValueError(f"{len(keys):,} samples; an index holds {MOST_ROWS:,} at most")
    if not is_ascending(keys):
        raise ValueError("the keys are not sorted, or one is there twice")
    slots = make_slots(keys)
    meta = {"format": FORMAT, "samples": len(keys), "slots": len(slots), "source": content.source}
    if content.home:
        meta["home"] = content.home
    schema = SCHEMA.with_metadata({META: json.dumps(meta, sort_keys=True).encode()})
    columns = [
        keys,
        pa.DictionaryArray.from_arrays(numbers(content.shard, pa.uint32()), _shard_array(content)),
        *(numbers(getattr(content, name), kind) for name, kind in PLACE),
    ]
    batch = pa.record_batch(columns, schema=schema)
    # One record batch, so that each column is one run of memory.
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    # Behind the columns: in front of them is only what a reader looks at when it opens the file.
    append_seal(path, _columns_start(path), slots.astype("<u4", copy=False).data)
    return file_version(path)


def _columns_start(path: Path) -> int:
    """Return where the columns of a file begin: behind all that says where they are, and the shards."""
    with pa.memory_map(str(path)) as mapped:
        begin = mapped.read_buffer(1).address
        _, ends, _ = pa.ipc.open_file(mapped).get_batch(0).column("key").buffers()
        return int(ends.address - begin) if ends is not None else mapped.size()


def is_ascending(keys: pa.LargeStringArray) -> bool:
    """Tell whether keys are sorted by their bytes, each there once."""
    return len(keys) <= 1 or bool(pc.all(pc.less(keys[:-1], keys[1:])).as_py())


def _key_array(keys: Sequence[SampleKey] | pa.LargeStringArray) -> pa.LargeStringArray:
    if not isinstance(keys, pa.LargeStringArray):
        return strings([key.encode() for key in keys], pa.large_string())
    # A slice would drag along, or worse point into, what it was cut from.
    return pa.concat_arrays([keys]) if keys.offset else keys


def _shard_array(content: IndexContent) -> pa.StructArray:
    ends = np.cumsum([0, *map(len, content.block_offsets)], dtype=np.int64)
    every = np.concatenate([np.asarray(part, np.uint64) for part in content.block_offsets])
    item = _SHARD.field("block_offsets").type.value_field
    blocks = pa.LargeListArray.from_arrays(
        numbers(ends, pa.int64()), numbers(every, pa.uint64()), type=pa.large_list(item)
    )
    columns = [
        fixed([bytes.fromhex(entry.id) for entry in content.shards], ID_BYTES),
        numbers((entry.bytes for entry in content.shards), pa.uint64()),
        numbers((entry.samples for entry in content.shards), pa.uint64()),
        blocks,
    ]
    return pa.StructArray.from_arrays(columns, fields=list(_SHARD))


def file_version(path: Path) -> Version:
    """Return the version that a file's bytes stand for; reads all of it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return Version(hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_DIGITS])
