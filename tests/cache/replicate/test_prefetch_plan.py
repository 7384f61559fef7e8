"""Who is to bring which shards, ahead of a job or of a drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache import membership
from deeplink.cache.format.index import Index
from deeplink.cache.replicate.warming import for_job, off_node
from deeplink.core.types import Member, NodeName, ShardId

NODES = tuple(NodeName(f"n{number}") for number in range(5))
MEMBERS = tuple(Member(name, f"{name}:1", 1) for name in NODES)


@dataclass(frozen=True)
class Entry:
    id: ShardId
    bytes: int


@dataclass(frozen=True)
class Shards:
    shards: tuple[Entry, ...]
    version: str = "ab"


INDEX = cast("Index", Shards(tuple(Entry(ShardId(f"{number:040x}"), 10 + number) for number in range(20))))
held = st.fixed_dictionaries(
    {
        node: st.none() | st.dictionaries(st.sampled_from([entry.id for entry in INDEX.shards]), st.booleans())
        for node in NODES
    }
)


@given(held, st.sets(st.sampled_from(NODES), min_size=1), st.integers(1, 3))
def test_afterwards_each_of_the_jobs_nodes_holds_what_it_owns(
    there: dict[NodeName, dict[ShardId, bool] | None], nodes: set[NodeName], replicas: int
) -> None:
    moves = for_job("d", INDEX, nodes, MEMBERS, there, replicas=replicas)
    assert set(moves.numbers) <= nodes
    assert not set(moves.numbers) & set(moves.silent)
    for number, entry in enumerate(INDEX.shards):
        for owner in membership.ranked(entry.id, sorted(nodes), membership.standing(MEMBERS))[:replicas]:
            has = there[owner]
            if has is None:
                assert owner in moves.silent
            else:
                assert has.get(entry.id, False) != (number in moves.numbers.get(owner, ()))
    assert moves.bytes == sum(INDEX.shards[n].bytes for those in moves.numbers.values() for n in those)
    assert moves.copies == len(INDEX.shards) * min(replicas, len(nodes))


@given(held)
def test_afterwards_nothing_lies_on_the_drained_node_alone(
    there: dict[NodeName, dict[ShardId, bool] | None],
) -> None:
    node = NODES[0]
    moves = off_node("d", INDEX, node, MEMBERS, there)
    assert node not in moves.numbers
    others = [has for name, has in there.items() if name != node and has is not None]
    own = there[node] or {}
    alone = {
        number
        for number, entry in enumerate(INDEX.shards)
        if entry.id in own and not any(has.get(entry.id) for has in others)
    }
    assert moves.copies == len(alone)
    brought = [number for those in moves.numbers.values() for number in those]
    assert sorted(brought) == (sorted(alone) if others else [])


def test_a_node_without_an_agent_is_named() -> None:
    moves = for_job("d", INDEX, {NODES[0], NodeName("x9")}, MEMBERS, {NODES[0]: {}}, replicas=1)
    assert moves.silent == ("x9",)
