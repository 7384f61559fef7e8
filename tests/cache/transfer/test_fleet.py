"""Copies that race for the same samples: whoever loses must not undo what the other has brought."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import xxhash
from typing_extensions import override

from deeplink.cache import membership
from deeplink.cache.errors import MemberBusyError, MemberError
from deeplink.cache.read.batch import Batch
from deeplink.cache.transfer.fleet import MemberPool
from deeplink.cache.transfer.frames import BatchReply, Pending, Places, Transport
from deeplink.core.clock import ManualClock
from deeplink.core.types import Member, NodeName, ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.transfer import frames

NAMES = [NodeName(name) for name in "abc"]
SIZE = 10


def ranked(shard: str) -> Sequence[NodeName]:
    return membership.ranked(ShardId(shard), NAMES)


def two_shards() -> tuple[str, str]:
    """Return two shards with the same first member and different second ones."""
    shards = (f"{number:040x}" for number in range(50))
    return next(
        (one, other)
        for one, other in itertools.combinations(shards, 2)
        if ranked(one)[0] == ranked(other)[0] and ranked(one)[1] != ranked(other)[1]
    )


@dataclass
class Call(Pending):
    """A batch on its way; the first member's does not end well: `ends`."""

    name: NodeName
    shards: list[str]
    samples: list[bytes]
    places: Places
    ends: Callable[[Call], BatchReply] | None

    def bring(self, samples: Sequence[bytes]) -> BatchReply:
        for start, sample in zip(self.places.starts.tolist(), samples, strict=True):
            self.places.arena[start : start + SIZE] = sample
        checksums = np.array([xxhash.xxh3_64_intdigest(sample) for sample in samples], np.uint64)
        return BatchReply(np.full(len(samples), cache_pb2.READ_STATUS_OK, np.uint32), checksums)

    @override
    def result(self) -> BatchReply:
        return self.ends(self) if self.ends is not None else self.bring(self.samples)

    @override
    def cancel(self) -> None:
        pass


@dataclass
class Racing(Transport):
    """The first member is late: one of the two second copies answers, then the first member, then the rest."""

    clock: ManualClock
    order: list[tuple[NodeName, int]]
    ends: Callable[[Call], BatchReply]
    samples: dict[str, bytes]
    asked: list[tuple[NodeName, list[str]]] = field(default_factory=list)
    has_waited: bool = False

    @override
    def start(self, member: Member, request: frames.ExtentsRequest, deadline_s: float, places: Places) -> Pending:
        shards = [str(request.shards[number]) for number in request.extents["shard"].tolist()]
        self.asked.append((member.name, shards))
        ends = self.ends if len(self.asked) == 1 else None
        return Call(member.name, shards, [self.samples[shard] for shard in shards], places, ends)

    @override
    def answering(self, batches: Sequence[Pending], timeout_s: float) -> list[int]:
        if not self.has_waited:
            self.has_waited = True
            self.clock.sleep(timeout_s + 0.001)
            return []
        calls = cast("Sequence[Call]", batches)
        if self.order:
            wanted = self.order.pop(0)
            return [next(n for n, call in enumerate(calls) if (call.name, len(call.shards)) == wanted)]
        return [0]

    @override
    def close(self) -> None:
        pass


def damaged(call: Call) -> BatchReply:
    call.bring([bytes(SIZE)] * len(call.samples))  # what a server sends whose disk fails in the middle
    raise MemberError(call.name, "a shard could not be read", is_well=True)


def cut_off(call: Call) -> BatchReply:
    call.bring([b"?" * SIZE] * len(call.samples))
    raise MemberError(call.name, "another answer than was asked for")


def busy(call: Call) -> BatchReply:
    call.bring([b"?" * SIZE] * len(call.samples))
    raise MemberBusyError(call.name)


def wrong(call: Call) -> BatchReply:
    return call.bring([b"?" * SIZE] * len(call.samples))


def index_of(samples: dict[str, bytes]) -> Index:
    """Return as much of an index as a fleet looks at: a sample of SIZE bytes in each shard."""
    count = len(samples)
    found: Any = SimpleNamespace(
        shard=np.arange(count, dtype=np.uint32),
        block=np.zeros(count, np.uint32),
        offset=np.zeros(count, np.uint32),
        lengths=np.full(count, SIZE, np.uint64),
        checksums=np.array([xxhash.xxh3_64_intdigest(data) for data in samples.values()], np.uint64),
        shards=[SimpleNamespace(id=shard) for shard in samples],
        key=str,
    )
    return cast("Index", found)


def test_a_batch_is_let_go_of_at_once_and_not_when_the_garbage_is_next_collected() -> None:
    one, other = two_shards()
    samples = {one: b"A" * SIZE, other: b"B" * SIZE}
    clock = ManualClock()
    transport = Racing(clock, [], lambda call: call.bring(call.samples), samples, has_waited=True)
    members = [Member(name, f"127.0.0.1:{port}") for port, name in enumerate(NAMES, start=1)]
    fleet = MemberPool(index_of(samples), members, transport, clock, deadline_s=1.5)
    batch = Batch.empty(np.full(2, SIZE))
    gc.disable()
    try:
        assert fleet.fill(np.array([0, 1]), np.array([0, 1]), batch).missing.tolist() == []
        arena = weakref.ref(batch.arena)
        del batch
        assert arena() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("ends", [damaged, cut_off, busy, wrong])
def test_a_late_answer_that_ends_badly_does_not_undo_what_another_copy_brought(
    ends: Callable[[Call], BatchReply],
) -> None:
    one, other = two_shards()
    samples = {one: b"A" * SIZE, other: b"B" * SIZE}
    clock = ManualClock()
    order = [(ranked(one)[1], 1), (ranked(one)[0], 2)]
    transport = Racing(clock, order, ends, samples)
    members = [Member(name, f"127.0.0.1:{port}") for port, name in enumerate(NAMES, start=1)]
    fleet = MemberPool(index_of(samples), members, transport, clock, deadline_s=1.5)
    batch = Batch.empty(np.full(2, SIZE))
    outcome = fleet.fill(np.array([0, 1]), np.array([0, 1]), batch)
    assert not order
    assert outcome.missing.tolist() == []
    assert [bytes(view) for view in batch.views()] == [b"A" * SIZE, b"B" * SIZE]
    # The one that had come was not asked for again.
    assert [shards for _, shards in transport.asked].count([one]) == 1


def test_a_member_asks_the_other_owner_first_though_one_nearer_in_the_order_fails_with_itself() -> None:
    # By score a, b, c; but a and b fail together, so c is the second owner. That a asks must not change it.
    shard = next(shard for shard in (f"{n:040x}" for n in range(50)) if ranked(shard) == tuple(NAMES))
    members = [
        Member(name, f"127.0.0.1:{port}", 1, domain)
        for port, (name, domain) in enumerate(zip(NAMES, "xxy", strict=True))
    ]
    clock = ManualClock()
    transport = Racing(clock, [], lambda call: call.bring(call.samples), {shard: b"A" * SIZE}, has_waited=True)
    fleet = MemberPool(index_of(transport.samples), members, transport, clock, deadline_s=1.5, node=NAMES[0])
    assert not fleet.fill(np.array([0]), np.array([0]), Batch.empty(np.full(1, SIZE))).missing.tolist()
    assert transport.asked == [("c", [shard])]
