"""How idle nodes lie on leaves."""

from __future__ import annotations

import pytest

from benchmarks.simulate.fragmentation import Fragmentation, fragmentation
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.request import NodeCapacity
from deeplink.scheduler.topology.graph import Fabric


def rooms(idle: str) -> dict[NodeName, NodeCapacity]:
    return {NodeName(f"n{number}"): NodeCapacity(idle=mark == "i") for number, mark in enumerate(idle)}


@pytest.mark.parametrize(
    ("idle", "whole", "on_whole", "largest", "scattered"),
    [("iiiiii", 3, 6, 2, 0.0), ("i.i.i.", 0, 0, 1, 1.0), ("iii...", 1, 2, 2, 1 / 3), ("......", 0, 0, 0, 0.0)],
)
def test_idle_nodes_of_three_leaves_of_two(
    idle: str, whole: int, on_whole: int, largest: int, scattered: float
) -> None:
    fabric = Fabric({NodeName(f"n{number}"): ("core", f"leaf{number // 2}") for number in range(6)})
    found = fragmentation(fabric, rooms(idle))
    assert found == Fragmentation(idle=idle.count("i"), leaves=3, whole=whole, on_whole=on_whole, largest=largest)
    assert found.scattered == pytest.approx(scattered)


def test_nodes_on_no_known_leaf_are_idle_and_on_none() -> None:
    found = fragmentation(Fabric({}), rooms("ii."))
    assert found == Fragmentation(idle=2, leaves=0, whole=0, on_whole=0, largest=0)
    assert found.scattered == 1.0


def test_a_leaf_of_one_node_is_not_whole() -> None:
    assert fragmentation(Fabric({NodeName("n0"): ("leaf",)}), rooms("i")).whole == 0
