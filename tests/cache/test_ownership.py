from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.ownership import owners, ranked
from deeplink.types import NodeName, ShardId

SHARD = st.text("0123456789abcdef", min_size=40, max_size=40).map(ShardId)
MEMBERS = st.sets(st.integers(0, 999).map(lambda i: NodeName(f"n{i}")), min_size=1, max_size=12)


@given(SHARD, MEMBERS, st.integers(1, 5))
def test_owners_are_distinct_members_and_as_many_as_can_be(
    shard: ShardId, members: set[NodeName], replicas: int
) -> None:
    chosen = owners(shard, members, replicas)
    assert len(set(chosen)) == len(chosen) == min(replicas, len(members))
    assert set(chosen) <= members


@given(SHARD, MEMBERS, st.data())
def test_a_member_that_leaves_moves_only_what_it_owned(
    shard: ShardId, members: set[NodeName], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(members)))
    before = ranked(shard, members)
    assert ranked(shard, members - {gone}) == tuple(member for member in before if member != gone)


@given(SHARD, MEMBERS)
def test_the_order_does_not_depend_on_how_members_are_listed(shard: ShardId, members: set[NodeName]) -> None:
    assert ranked(shard, sorted(members)) == ranked(shard, sorted(members, reverse=True))


def test_shards_are_spread_evenly() -> None:
    members = [NodeName(f"n{i}") for i in range(4)]
    counts = dict.fromkeys(members, 0)
    for i in range(4000):
        for owner in owners(ShardId(f"{i:040x}"), members, 2):
            counts[owner] += 1
    assert all(1800 < count < 2200 for count in counts.values())  # 2,000 each; the hash is fixed, so is this
