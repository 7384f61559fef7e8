"""What a shard says of itself, in a few page reads per MiB: enough to list its samples in an index."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pyarrow as pa

from deeplink.cache import block, layout
from deeplink.cache.columns import strings
from deeplink.cache.errors import ShardCorruptError, ShardIdError
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.store import Store
    from deeplink.types import ShardId


@dataclass(frozen=True, slots=True, eq=False)
class ShardDescription:
    """A shard, as an index lists it.

    Attributes:
        id: its name.
        bytes: size of its file.
        block_offsets: uint64, where each block's payload begins in its file.
        keys: its samples' names, in its order.
        columns: `blocks`, `offsets` (uint32), `lengths`, `checksums` (uint64), per sample.
    """

    id: ShardId
    bytes: int
    block_offsets: np.ndarray
    keys: pa.LargeStringArray
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.keys)


def tables(descriptor: int, found: layout.FileLayout, shard: ShardId) -> Iterator[bytes]:
    """Yield the payload of each table record of an open file.

    Raises:
        ShardCorruptError: one does not have its checksum.
        OSError: the file cannot be read.
    """
    for header, start in zip(found.headers, found.offsets.tolist(), strict=True):
        if header.kind is not block.RecordKind.TABLE:
            continue
        payload = os.pread(descriptor, header.payload, start)
        if len(payload) != header.payload or block.checksum(payload) != header.checksum:
            raise ShardCorruptError(shard, f"table record {header.number} is damaged")
        yield payload


def describe(path: Path, shard: ShardId, *, verify: bool = False) -> ShardDescription:
    """Return what the file of a shard says of itself.

    Args:
        path: the file.
        shard: its name.
        verify: read all of it and compare its name, too.

    Raises:
        ShardCorruptError: it is damaged.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = layout.verify(descriptor, shard) if verify else layout.scan(descriptor, shard)
        size = os.fstat(descriptor).st_size
        return described(shard, size, found.offsets, found.payloads, tables(descriptor, found, shard))
    finally:
        os.close(descriptor)


def described(
    shard: ShardId, size: int, offsets: np.ndarray, payloads: np.ndarray, records: Iterable[bytes]
) -> ShardDescription:
    """Return a description made of the places of a shard's blocks and of its table records.

    Raises:
        ShardCorruptError: they do not fit each other.
    """
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


def handler(store: Store) -> grpc.RpcMethodHandler[Any, Any]:
    """Return what answers the Describe call for the shards of a store."""

    def answer(
        request: cache_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> Iterator[cache_pb2.DescribeReply]:
        try:
            shard = layout.checked_shard_id(request.id)
            yield from _replies(store.path(shard), shard)
        except ShardIdError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except FileNotFoundError:
            context.abort(grpc.StatusCode.NOT_FOUND, f"shard {request.id} is not held here")
        except (ShardCorruptError, OSError) as problem:
            context.abort(grpc.StatusCode.DATA_LOSS, f"shard {request.id}: {problem}")

    return grpc.unary_stream_rpc_method_handler(
        answer,
        request_deserializer=cache_pb2.DescribeRequest.FromString,
        response_serializer=cache_pb2.DescribeReply.SerializeToString,
    )


def _replies(path: Path, shard: ShardId) -> Iterator[cache_pb2.DescribeReply]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = layout.scan(descriptor, shard)
        yield cache_pb2.DescribeReply(
            bytes=os.fstat(descriptor).st_size,
            block_offsets=found.offsets.astype("<u8").tobytes(),
            payloads=found.payloads.astype("<u8").tobytes(),
        )
        for table in tables(descriptor, found, shard):
            yield cache_pb2.DescribeReply(table=table)
    finally:
        os.close(descriptor)


def from_replies(shard: ShardId, replies: Sequence[cache_pb2.DescribeReply]) -> ShardDescription:
    """Return the description that a member sent.

    Raises:
        ShardCorruptError: what it sent does not fit together.
    """
    if not replies or len(replies[0].block_offsets) % 8 or len(replies[0].payloads) % 8:
        raise ShardCorruptError(shard, "no description of it came")
    offsets = np.frombuffer(replies[0].block_offsets, "<u8")
    payloads = np.frombuffer(replies[0].payloads, "<u8")
    return described(shard, replies[0].bytes, offsets, payloads, (reply.table for reply in replies[1:]))
