"""A layout in words."""

from __future__ import annotations

import pytest

from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.order import Order, lay_out
from deeplink.types import Attempt, NodeName


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
    order = Order(command=("true",), per_node=per_node, count=count)
    assert str(lay_out(order, Attempt(7, 0, 0), facts, port=1)) == said
