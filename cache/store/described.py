"""Descriptions of shards, made of a few page reads per MiB: enough to list their samples in an index."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.format.index_format import strings
from deeplink.core.descriptors import opened
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from deeplink.core.types import ShardId


@dataclass(frozen=True, slots=True, eq=False)
class ShardDescription:
    """A shard, as an index lists it."""

    id: ShardId
    bytes: int  # of its file
    block_offsets: np.ndarray  # uint64, where each block's payload begins in its file
    keys: pa.LargeStringArray  # in its order
    columns: dict[str, np.ndarray]  # `blocks`, `offsets` (uint32), `lengths`, `checksums` (uint64), per sample

    def __len__(self) -> int:
        return len(self.keys)


def tables(descriptor: int, found: block.FileLayout, shard: ShardId) -> Iterator[bytes]:
    """Yield the payload of each table record of an open file."""
    for header, start in zip(found.headers, found.offsets.tolist(), strict=True):
        if header.kind is not block.RecordKind.TABLE:
            continue
        payload = os.pread(descriptor, header.payload, start)
        if len(payload) != header.payload or block.checksum(payload) != header.checksum:
            raise ShardCorruptError(shard, f"table record {header.number} is damaged")
        yield payload


def describe(path: Path, shard: ShardId, *, verify: bool = False) -> ShardDescription:
    """Return what the file of a shard says of itself."""
    with opened(path) as descriptor:
        found = block.verify_shard(descriptor, shard) if verify else block.scan_shard(descriptor, shard)
        size = os.fstat(descriptor).st_size
        return described(shard, size, found.offsets, found.payloads, tables(descriptor, found, shard))


def described(
    shard: ShardId, size: int, offsets: np.ndarray, payloads: np.ndarray, records: Iterable[bytes]
) -> ShardDescription:
    """Return a description made of the places of a shard's blocks and of its table records."""
    keys: list[pa.Array] = []
    parts: list[dict[str, np.ndarray]] = []
    for record in records:
        names, columns = block.decode_table(record, shard)
        try:
            keys.append(strings(names, pa.large_binary()).cast(pa.large_string()))
        except pa.ArrowInvalid as problem:
            raise ShardCorruptError(shard, f"a key is not UTF-8: {problem}") from problem
        parts.append(columns)
    if not any(map(len, keys)) or len(offsets) != len(payloads):
        raise ShardCorruptError(shard, "it has no table of its samples")
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _check_places(shard, size, found, (offsets, payloads))
    return ShardDescription(shard, size, offsets, pa.concat_arrays(keys), found)


def _check_places(
    shard: ShardId, size: int, columns: dict[str, np.ndarray], blocks: tuple[np.ndarray, np.ndarray]
) -> None:
    offsets, payloads = blocks
    if (offsets > size).any() or (payloads > size).any() or (offsets + payloads > size).any():
        raise ShardCorruptError(shard, "a block reaches beyond the file's end")
    if (columns["lengths"] > size).any() or (columns["blocks"] >= len(payloads)).any():
        raise ShardCorruptError(shard, "a sample lies in no block")
    # Of one that is longer than SPAN, the first piece.
    ends = columns["offsets"] + np.minimum(columns["lengths"], np.uint64(block.SPAN))
    if (ends > payloads[columns["blocks"]]).any():
        raise ShardCorruptError(shard, "a sample reaches beyond its block")


def replies(path: Path, shard: ShardId) -> Iterator[cache_pb2.DescribeReply]:
    """Yield a description as it is sent."""
    with opened(path) as descriptor:
        found = block.scan_shard(descriptor, shard)
        yield cache_pb2.DescribeReply(
            bytes=os.fstat(descriptor).st_size,
            block_offsets=found.offsets.astype("<u8").tobytes(),
            payloads=found.payloads.astype("<u8").tobytes(),
        )
        for table in tables(descriptor, found, shard):
            yield cache_pb2.DescribeReply(table=table)


def from_replies(shard: ShardId, replies: Sequence[cache_pb2.DescribeReply]) -> ShardDescription:
    """Return the description that a member sent."""
    if not replies or len(replies[0].block_offsets) % 8 or len(replies[0].payloads) % 8:
        raise ShardCorruptError(shard, "no description of it came")
    offsets = np.frombuffer(replies[0].block_offsets, "<u8")
    payloads = np.frombuffer(replies[0].payloads, "<u8")
    return described(shard, replies[0].bytes, offsets, payloads, (reply.table for reply in replies[1:]))
