"""Residency counts what is verified, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format.index import Index
from deeplink.cache.replicate.residency import residency
from deeplink.core.types import NodeName, ShardId


@dataclass
class _Entry:
    id: ShardId
    bytes: int


@dataclass
class _Version:
    """As much of an index as residency looks at."""

    shards: list[_Entry]


def version(*sizes: int) -> Index:
    return cast("Index", _Version([_Entry(ShardId(f"{i:040x}"), size) for i, size in enumerate(sizes)]))


A, B, OTHER = ShardId(f"{0:040x}"), ShardId(f"{1:040x}"), ShardId("f" * 40)
N0, N1 = NodeName("n0"), NodeName("n1")


def test_present_is_not_verified() -> None:
    found = residency(version(100, 300), {N0: {A: True, B: False, OTHER: True}}, replicas=2)
    assert (found.percent, found.cached_shards, found.whole_shards, found.copies) == (25.0, 1, 1, 1)
    node = found.nodes[0]
    assert (node.present, node.verified, node.bytes, node.verified_bytes) == (2, 1, 400, 100)


def test_a_member_that_does_not_answer_holds_nothing() -> None:
    found = residency(version(100, 300), {N0: {A: True, B: True}, N1: None}, replicas=2)
    assert (found.percent, found.cached_shards, found.whole_shards, found.copies) == (100.0, 2, 0, 2)
    assert [(node.node, node.answered, node.owned) for node in found.nodes] == [(N0, True, 2), (N1, False, 2)]


def test_a_hundred_per_cent_means_all() -> None:
    found = residency(version(10**12, 1), {N0: {A: True}}, replicas=1)
    assert found.percent == 99.9
    assert residency(version(), {N0: {}}, replicas=1).percent == 100.0


HELD = st.dictionaries(st.sampled_from([f"{i:040x}" for i in range(8)]).map(ShardId), st.booleans())


@given(
    st.dictionaries(st.sampled_from("abcd").map(NodeName), st.none() | HELD, min_size=1),
    st.integers(1, 4),
    st.lists(st.integers(1, 1000), max_size=6),
)
def test_the_sums_agree(
    stats: dict[NodeName, dict[ShardId, bool] | None], replicas: int, sizes: list[int]
) -> None:
    index = version(*sizes)
    found = residency(index, stats, replicas=replicas)
    assert found.whole_shards <= found.cached_shards <= found.shards == len(sizes)
    assert found.cached_bytes <= found.bytes == sum(sizes)
    assert (found.percent == 100.0) == (found.cached_shards == found.shards)
    assert sum(node.owned for node in found.nodes) == len(sizes) * min(replicas, len(stats))
    for node in found.nodes:
        assert node.owned_verified <= node.verified <= node.present
        assert node.verified_bytes <= node.bytes
