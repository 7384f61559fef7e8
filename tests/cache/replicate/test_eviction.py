"""Which shards leave: rules that hold for whatever an SSD may hold."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.replicate.budget import Budget, HeldShard, budget_of, in_order, to_evict, unused
from deeplink.core.types import ShardId

HELD = st.lists(
    st.builds(
        HeldShard,
        id=st.text("0123456789abcdef", min_size=40, max_size=40).map(ShardId),
        bytes=st.integers(1, 1000),
        used_unix=st.floats(0, 1e9),
        needed=st.booleans(),
        next_use=st.none() | st.integers(0, 100),
        replaceable=st.booleans(),
    ),
    max_size=30,
    unique_by=lambda shard: shard.id,
)
BUDGETS = st.builds(
    lambda most, low, reserve: Budget(bytes=most, low=min(low, most), reserve=reserve),
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.integers(0, 1000),
)


@given(HELD, st.integers(-10, 20_000))
def test_what_is_needed_or_cannot_be_had_again_never_leaves(held: list[HeldShard], excess: int) -> None:
    known = {shard.id: shard for shard in held}
    gone = to_evict(held, excess)
    assert all(known[shard].replaceable and not known[shard].needed for shard in gone)
    assert len(set(gone)) == len(gone)


@given(HELD, st.integers(-10, 20_000))
def test_no_more_leave_than_must(held: list[HeldShard], excess: int) -> None:
    size = {shard.id: shard.bytes for shard in held}
    gone = to_evict(held, excess)
    assert not gone if excess <= 0 else sum(size[shard] for shard in gone[:-1]) < excess
    if 0 < excess > sum(size[shard] for shard in gone):
        assert len(gone) == len(in_order(held))  # all that may leave


@given(HELD)
def test_who_leaves_first_is_wanted_last(held: list[HeldShard]) -> None:
    order = in_order(held)
    announced = [shard.next_use is not None for shard in order]
    assert announced == sorted(announced)
    assert [s.used_unix for s in order if s.next_use is None] == sorted(
        s.used_unix for s in order if s.next_use is None
    )
    distances = [shard.next_use for shard in order if shard.next_use is not None]
    assert distances == sorted(distances, reverse=True)


@given(HELD, st.floats(0, 1e9))
def test_what_somebody_has_announced_is_not_unused(held: list[HeldShard], before: float) -> None:
    known = {shard.id: shard for shard in held}
    for shard in unused(held, before):
        assert known[shard].next_use is None
        assert known[shard].used_unix < before


@given(BUDGETS, st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 5000))
def test_once_the_excess_is_gone_there_is_room(budget: Budget, held: int, free: int, coming: int) -> None:
    excess = budget.excess(held, free, coming)
    assert excess >= 0
    if excess == 0:
        assert held + coming <= budget.bytes
        assert free - coming >= budget.reserve
    elif excess <= held:
        assert budget.excess(held - excess, free + excess, coming) == 0


def lru_misses(order: list[int], room: int) -> int:
    kept: list[int] = []
    misses = 0
    for shard in order:
        if shard in kept:
            kept.remove(shard)
        else:
            misses += 1
            if len(kept) == room:
                kept.pop(0)
        kept.append(shard)
    return misses


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(2, 8))
def test_two_epochs_known_in_advance_miss_no_more_than_least_recently_used(
    first: list[int], second: list[int], room: int
) -> None:
    """Belady's order, with every shard evictable at any time: the least misses there can be."""
    order = [*first, *second]
    kept: dict[int, HeldShard] = {}
    misses = 0
    for now, shard in enumerate(order):
        if shard not in kept:
            misses += 1
            ahead = order[now + 1 :]
            held = [
                replace(one, next_use=ahead.index(number) if number in ahead else None)
                for number, one in kept.items()
            ]
            gone = to_evict(held, len(kept) + 1 - room)
            kept = {number: one for number, one in kept.items() if one.id not in gone}
            kept[shard] = HeldShard(id=ShardId(f"{shard:040x}"), bytes=1, used_unix=float(now), replaceable=True)
        else:
            kept[shard] = replace(kept[shard], used_unix=float(now))
        assert len(kept) <= room
    assert misses <= lru_misses(order, room)


def test_a_budget_is_the_setting_or_most_of_the_disk() -> None:
    assert budget_of(0, 1000 << 30) == Budget(bytes=900 << 30, low=810 << 30, reserve=4 << 30)
    assert budget_of(100 << 30, 1000 << 30).bytes == 100 << 30
    assert budget_of(0, 10 << 30).reserve == int((10 << 30) * 0.02)
