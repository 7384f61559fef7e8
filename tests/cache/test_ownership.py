from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.ownership import owners, ranked, weight_of, weights
from deeplink.types import Member, NodeName, ShardId, format_members, parse_members

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


WEIGHTED = st.dictionaries(
    st.integers(0, 99).map(lambda i: NodeName(f"n{i}")),
    st.integers(0, 12).map(lambda k: 1 << k),
    min_size=2,
    max_size=8,
)


@given(SHARD, WEIGHTED, st.data())
def test_with_weights_too_a_member_that_leaves_moves_only_what_it_owned(
    shard: ShardId, weight: dict[NodeName, int], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(weight)))
    left = {member: value for member, value in weight.items() if member != gone}
    before = ranked(shard, weight, weight)
    assert ranked(shard, left, left) == tuple(member for member in before if member != gone)


@given(SHARD, WEIGHTED, st.data())
def test_a_member_that_becomes_larger_only_gains(
    shard: ShardId, weight: dict[NodeName, int], data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(sorted(weight)))
    before, after = ranked(shard, weight, weight), ranked(shard, weight, {**weight, grown: 2 * weight[grown]})
    assert after.index(grown) <= before.index(grown)
    assert [m for m in after if m != grown] == [m for m in before if m != grown]


@given(SHARD, MEMBERS, st.integers(1, 1 << 20))
def test_equal_weights_are_no_weights(shard: ShardId, members: set[NodeName], weight: int) -> None:
    assert ranked(shard, members, dict.fromkeys(members, weight)) == ranked(shard, members)


@pytest.mark.parametrize("weight", [(1, 1, 2, 4), (1, 8), (16, 16, 16, 1)])
def test_shards_are_spread_by_weight(weight: tuple[int, ...]) -> None:
    members = {NodeName(f"n{i}"): value for i, value in enumerate(weight)}
    shards = [ShardId(f"{i:040x}") for i in range(4000)]
    counts = dict.fromkeys(members, 0)
    for shard in shards:
        counts[ranked(shard, members, members)[0]] += 1
    for member, value in members.items():
        share = len(shards) * value / sum(weight)
        assert (
            abs(counts[member] - share) < 5 * share**0.5
        )  # five standard deviations; the hash is fixed, so is this


def test_a_lost_members_share_goes_to_all_the_others_by_weight() -> None:
    members = {NodeName(f"n{i}"): value for i, value in enumerate((4, 1, 1, 2))}
    shards = [ShardId(f"{i:040x}") for i in range(4000)]
    lost = [shard for shard in shards if ranked(shard, members, members)[0] == "n0"]
    left = {member: value for member, value in members.items() if member != "n0"}
    counts = dict.fromkeys(left, 0)
    for shard in lost:
        counts[ranked(shard, left, left)[0]] += 1
    for member, value in left.items():
        share = len(lost) * value / sum(left.values())
        assert abs(counts[member] - share) < 5 * share**0.5


def test_budgets_that_differ_a_little_weigh_the_same() -> None:
    assert weight_of(1000 << 30) == weight_of(960 << 30) == weight_of(1023 << 30) == 512
    assert weight_of(0) == weight_of(1 << 30) == 1


def test_weights_travel_in_the_list_of_members() -> None:
    members = (Member(NodeName("n0"), "10.0.0.1:7", 512), Member(NodeName("n1"), "[::1]:7", 1))
    assert format_members(members) == "n0=10.0.0.1:7*512,n1=[::1]:7*1"
    assert parse_members(format_members(members)) == members
    assert weights(members) == {"n0": 512, "n1": 1}
    alike = tuple(Member(member.name, member.address, 64) for member in members)
    assert format_members(alike) == "n0=10.0.0.1:7,n1=[::1]:7"


@pytest.mark.parametrize(
    "text", ["n0=h:1*0", "n0=h:1*x", "n0=h:1*", "n0=h:1*-4", "n0=h:1*2,n1=h:2", "n0=h:1*2147483648"]
)
def test_a_list_with_odd_weights_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="weight"):
        parse_members(text)
