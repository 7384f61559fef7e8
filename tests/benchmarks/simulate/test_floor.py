"""Sets of nodes, and the switches above them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate.floor import Floor, bits, first
from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import Fabric

FABRIC = Fabric(
    {
        NodeName("n2"): ("core", "s0", "a"),
        NodeName("n10"): ("core", "s0", "b"),
        NodeName("n1"): ("core", "s1", "c"),
        NodeName("n3"): ("core", "s0", "a"),
    }
)


def test_nodes_are_numbered_by_natural_name() -> None:
    floor = Floor(FABRIC.paths, FABRIC)
    assert floor.nodes == ("n1", "n2", "n3", "n10")
    assert floor.names(0b1010) == ("n2", "n10")
    assert floor.chosen([NodeName("n10"), NodeName("n1")]) == 0b1001
    assert floor.chosen([NodeName("n3")]) == 1 << 2


def test_leaves_come_first_and_each_switch_knows_the_one_above() -> None:
    floor = Floor(FABRIC.paths, FABRIC)
    assert [leaf.path[-1] for leaf in floor.leaves] == ["a", "b", "c"]
    assert [floor.names(leaf.below) for leaf in floor.leaves] == [("n2", "n3"), ("n10",), ("n1",)]
    above = [floor.switches[floor.above[number]].path for number in range(len(floor.leaves))]
    assert above == [("core", "s0"), ("core", "s0"), ("core", "s1")]
    assert floor.leaf_of == (2, 0, 0, 1)


def test_hops_and_spread() -> None:
    floor = Floor(FABRIC.paths, FABRIC)
    assert [floor.hops(0, other) for other in range(3)] == [0, 2, 4]
    assert [floor.spread(chosen) for chosen in (0b0110, 0b1110, 0b1111)] == [1, 2, 3]


def test_nodes_that_hang_nowhere_are_on_one_leaf() -> None:
    floor = Floor([NodeName("x"), NodeName("y")], Fabric({}))
    assert floor.spread(floor.everyone) == 1


@given(chosen=st.integers(0, 1 << 200), count=st.integers(0, 40))
def test_the_first_of_a_set(chosen: int, count: int) -> None:
    listed = [place for place in range(chosen.bit_length()) if chosen >> place & 1]
    assert list(bits(chosen)) == listed
    assert list(bits(first(chosen, count))) == listed[:count]
