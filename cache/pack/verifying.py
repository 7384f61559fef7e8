"""Reads packed shards back, each copy where it lies, and compares every byte with what was packed."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache.errors import MemberError, ShardCorruptError, ShardIdError
from deeplink.cache.format import block
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.transfer.client import member_channel
from deeplink.core.descriptors import opened
from deeplink.core.types import NodeName, ShardId
from deeplink.v1 import cache_pb2, cache_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.store.described import ShardDescription
    from deeplink.cache.store.store import Store
    from deeplink.core.types import Member

_START_S = 60.0
_SLOWEST_BYTES_PER_S = 4 << 20


def digest_of(checksums: np.ndarray) -> int:
    """Return one checksum of the checksums of a shard's samples, in order."""
    return block.checksum(np.ascontiguousarray(checksums, "<u8").data.cast("B"))


def read_back(store: Store, shard: ShardId) -> np.ndarray:
    """Return the checksums (uint64) of a shard's samples, made of the bytes that the disk holds."""
    from deeplink.cache.store.described import describe  # noqa: PLC0415 - pyarrow: no agent needs it to start

    path = store.path(shard)
    with opened(path) as descriptor:
        # What is in memory may be whole where the disk is not.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = describe(path, shard, verify=True)
        sums = np.fromiter(_sums(descriptor, shard, found), np.uint64, len(found))
    wrong = np.flatnonzero(sums != found.columns["checksums"])
    if len(wrong):
        raise ShardCorruptError(shard, f"{found.keys[int(wrong[0])].as_py()!r} does not have its checksum")
    return sums


def _sums(descriptor: int, shard: ShardId, found: ShardDescription) -> Iterator[int]:
    columns = (found.columns[name].tolist() for name in ("blocks", "offsets", "lengths"))
    for place in zip(*columns, strict=True):
        whole = xxhash.xxh3_64()
        for number, begin, length in block.pieces(*place):
            piece = os.pread(descriptor, length, int(found.block_offsets[number]) + begin)
            if len(piece) != length:
                raise ShardCorruptError(shard, "the file ends too soon")
            whole.update(piece)
        yield whole.intdigest()


def verified(store: Store, name: str) -> Iterator[cache_pb2.VerifyReply]:
    """Yield the one reply that says what was found of a shard here; a damaged one is set aside."""
    inode = 0
    try:
        shard = checked_shard_id(name)
        inode = store.inode(shard)
        sums = read_back(store, shard)
    except (ShardIdError, FileNotFoundError):
        yield cache_pb2.VerifyReply(id=name, status=cache_pb2.VERIFY_STATUS_NO_SHARD)
    except OSError as problem:
        status = cache_pb2.VERIFY_STATUS_UNREADABLE
        yield cache_pb2.VerifyReply(id=name, status=status, problem=str(problem))
    except ShardCorruptError as problem:
        # Only the file that was read: a good copy may have taken its place meanwhile.
        store.quarantine(ShardId(name), str(problem), inode=inode)
        status = cache_pb2.VERIFY_STATUS_DAMAGED
        yield cache_pb2.VerifyReply(id=name, status=status, problem=str(problem))
    else:
        yield cache_pb2.VerifyReply(id=name, status=cache_pb2.VERIFY_STATUS_OK, checksums=digest_of(sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """What reading a version back came to."""

    copies: int  # shards read back, each copy counted
    bytes: int  # of their files
    problems: tuple[str, ...]  # what is wrong, a sentence each; empty when all is well


def verify_copies(
    index: Index,
    placed: Mapping[ShardId, Sequence[NodeName]],
    *,
    store: Store,
    node: NodeName,
    members: Sequence[Member],
    token: str,
    progress: Callable[[int, int], None] = lambda _copies, _bytes: None,
) -> ReadBack:
    """Read every copy of a version's shards back, all members at once, and compare them with the index."""
    wanted: dict[NodeName, list[ShardId]] = {}
    for shard, holders in placed.items():
        for holder in holders:
            wanted.setdefault(holder, []).append(shard)
    sizes = {entry.id: entry.bytes for entry in index.shards}
    expected = _expected(index)
    replies: queue.SimpleQueue[tuple[NodeName, cache_pb2.VerifyReply | None]] = queue.SimpleQueue()
    reachable = {member.name: member for member in members if member.name != node}
    asked: Iterator[cache_pb2.VerifyReply]
    for holder, shards in wanted.items():
        if holder == node:
            asked = itertools.chain.from_iterable(verified(store, shard) for shard in shards)
        else:
            asked = _asked(reachable.get(holder), shards, token, sum(sizes[shard] for shard in shards))
        threading.Thread(target=_collect, args=(holder, asked, replies), daemon=True).start()
    problems = [f"shard {shard}: no member holds it" for shard, holders in placed.items() if not holders]
    copies = size = 0
    left = len(wanted)
    while left:
        holder, reply = replies.get()  # each thread ends: its calls have deadlines
        if reply is None:
            left -= 1
        elif reply.status == cache_pb2.VERIFY_STATUS_OK and reply.checksums == expected.get(ShardId(reply.id)):
            copies, size = copies + 1, size + sizes[ShardId(reply.id)]
            progress(copies, size)
        else:
            problems.append(f"{holder}: {_said(reply)}")
    return ReadBack(copies=copies, bytes=size, problems=tuple(problems))


def _expected(index: Index) -> dict[ShardId, int]:
    ends = np.searchsorted(np.asarray(index.shard), np.arange(len(index.shards) + 1))
    return {
        entry.id: digest_of(np.asarray(index.checksums[ends[number] : ends[number + 1]]))
        for number, entry in enumerate(index.shards)
    }


def _said(reply: cache_pb2.VerifyReply) -> str:
    said = {
        cache_pb2.VERIFY_STATUS_OK: "its samples are not those of the index",
        cache_pb2.VERIFY_STATUS_NO_SHARD: "it is not there any more",
    }
    if not reply.id:
        return reply.problem
    # A damaged shard's problem names it already.
    problem = reply.problem.removeprefix(f"shard {reply.id}: ")
    return f"shard {reply.id}: {problem or said.get(reply.status, 'unknown answer')}"


def _collect(
    holder: NodeName,
    asked: Iterator[cache_pb2.VerifyReply],
    replies: queue.SimpleQueue[tuple[NodeName, cache_pb2.VerifyReply | None]],
) -> None:
    try:
        for reply in asked:
            replies.put((holder, reply))
    except (MemberError, OSError) as problem:
        replies.put((holder, cache_pb2.VerifyReply(problem=str(problem))))
    finally:
        replies.put((holder, None))


def _asked(
    member: Member | None, shards: Sequence[ShardId], token: str, size: int
) -> Iterator[cache_pb2.VerifyReply]:
    if member is None:
        yield cache_pb2.VerifyReply(problem="it is no member any more")
        return
    with member_channel(member, token) as channel:
        yield from cache_pb2_grpc.CacheStub(channel).Verify(
            cache_pb2.VerifyRequest(ids=shards), timeout=_START_S + size / _SLOWEST_BYTES_PER_S
        )
