"""What the placement benchmark measures with."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from benchmarks.scheduler import placement
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.request import NoPlacementError, PlacementRequest
from deeplink.scheduler.topology.graph import Fabric
from deeplink.scheduler.topology.rank_order import ring_crossings


def test_the_fewest_crossings_by_brute_force() -> None:
    nodes = [NodeName(f"n{number}") for number in range(6)]
    fabric = Fabric({node: (f"leaf{place % 3}",) for place, node in enumerate(nodes)})
    least = min(ring_crossings(order, fabric.leaf) for order in permutations(nodes))
    assert placement._least(nodes, fabric) == least == 3


@pytest.mark.parametrize("name", placement.STATES)
def test_every_state_has_room_for_the_job(name: str) -> None:
    cluster, request = placement.big_state(name, random.Random(1))  # noqa: S311 - a state, no secret
    assert (len(cluster.rooms), request.nodes) == (4096, 512)
    assert placement.one(name, 1)["leaves"] >= 1.0


def test_the_stream_is_the_same_whoever_chooses() -> None:
    asked: list[int] = []

    def none(_cluster: object, request: PlacementRequest) -> tuple[NodeName, ...]:
        asked.append(request.nodes)
        if len(asked) > 2:
            raise NoPlacementError("no")
        return tuple(NodeName(f"n{number}") for number in range(request.nodes))

    placement.stream(none, 3, 20)
    seen = list(asked)
    asked.clear()
    scattered, _ = placement.stream(none, 3, 20)
    assert asked == seen
    assert 0.0 <= scattered <= 1.0
    ours, names = (placement.stream(choose, 3, 20) for choose in (placement.by_us, placement.by_name))
    assert ours[1] <= names[1]
