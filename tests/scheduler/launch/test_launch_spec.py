"""A layout in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.launch_spec import LaunchSpec, lay_out


@pytest.mark.parametrize(
    ("addresses", "per_node", "count", "said"),
    [
        (("leaf0.n0",), 1, 1, "1 rank on n0; the ring stays on one leaf"),
        (("leaf0.n0", "leaf0.n1"), 2, 1, "2 ranks on n0; resting: n1; the ring stays on one leaf"),
        (
            ("leaf0.n0", "leaf1.n1", "leaf0.n2", "leaf1.n3"),
            1,
            4,
            "4 ranks on n0, n2, n1, n3; the ring crosses leaves 2 times (in Slurm's own order 4)",
        ),
    ],
)
def test_a_layout_says_how_many_ranks_where_and_how_the_ring_lies(
    addresses: tuple[str, ...], per_node: int, count: int, said: str
) -> None:
    facts = {
        NodeName(name): NodeFacts(node=name, address=f"{name}:1", topology_address=f"core.{address}")
        for address in addresses
        for name in [address.partition(".")[2]]
    }
    order = LaunchSpec(command=("true",), per_node=per_node, count=count)
    assert str(lay_out(order, Attempt(7, 0, 0), facts, port=1)) == said


def dealt(*leaves: int) -> dict[NodeName, NodeFacts]:
    """Nodes n0, n1, ... on leaves of these numbers."""
    return {
        NodeName(f"n{number}"): NodeFacts(
            node=f"n{number}", address=f"n{number}:1", topology_address=f"core.leaf{leaf}.n{number}"
        )
        for number, leaf in enumerate(leaves)
    }


def test_groups_stay_on_a_leaf_and_do_so_again_on_other_nodes() -> None:
    order = LaunchSpec(command=("true",), per_node=4, count=6, group_sizes=(4, 8))
    facts = dealt(0, 0, 0, 1, 1, 1, 1, 2)
    first = lay_out(order, Attempt(7, 0, 0), facts, port=1)
    assert first.active == ("n0", "n1", "n3", "n4", "n5", "n6")
    assert (first.crossings, first.cut, first.resting) == (2, (), ("n2", "n7"))
    assert str(first).endswith("; 6 groups of 4 ranks within a node each; 3 groups of 8 ranks within a leaf each")
    del facts[NodeName("n4")]
    again = lay_out(order, Attempt(7, 0, 1), facts, port=1, before=first.active)
    assert again.active == ("n0", "n1", "n2", "n3", "n5", "n6")
    assert again.cut_by_size == {4: 0, 8: 1}
    assert again.together[1] == (
        "1 of 3 groups of 8 ranks cut (ranks 8-15 are on 2 leaves: the job's nodes on a leaf do not divide "
        "into groups of 2 everywhere)"
    )


def test_where_no_topology_is_known_nothing_is_promised() -> None:
    order = LaunchSpec(command=("true",), per_node=4, count=4, group_sizes=(4, 8))
    facts = {NodeName(f"n{n}"): NodeFacts(node=NodeName(f"n{n}"), address=f"n{n}:1") for n in range(4)}
    assert lay_out(order, Attempt(7, 0, 0), facts, port=1).together == (
        "4 groups of 4 ranks within a node each",
        "2 groups of 8 ranks within a leaf each, if the 4 nodes that no topology is known of share one",
    )


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    order = LaunchSpec(command=("true",), per_node=1, count=3, group_sizes=(2,))
    with pytest.raises(DeepLinkError, match="do not divide into groups of 2"):
        lay_out(order, Attempt(7, 0, 0), dealt(0, 0, 0), port=1)


def test_nodes_that_differ_in_their_ranks_run_their_own_wherever_they_stand_in_the_order() -> None:
    each = {NodeName("n0"): 3, NodeName("n1"): 1, NodeName("n2"): 2}
    order = LaunchSpec(command=("true",), per_node=3, each=each, count=3, elastic=2)
    layout = lay_out(order, Attempt(7, 0, 0), dealt(0, 1, 0), port=1)
    assert layout.active == ("n0", "n2", "n1")
    assert (layout.launch.ranks, layout.launch.world_size) == ((3, 2, 1), 6)
    left = {node: facts for node, facts in dealt(0, 1, 0).items() if node != "n0"}
    again = lay_out(replace(order, count=2), Attempt(7, 0, 1), left, port=1, restarts=1, max_restarts=3)
    assert (set(again.active), again.launch.world_size) == ({"n1", "n2"}, 3)
    assert (again.launch.restarts, again.launch.max_restarts) == (1, 3)
