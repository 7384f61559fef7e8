"""What a request asks of a node, and requests that cannot be met or cannot be."""

from __future__ import annotations

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.request import (
    DataResidency,
    NodeCapacity,
    NoPlacementError,
    PlacementCluster,
    PlacementRequest,
    Speeds,
    eligible,
)
from deeplink.scheduler.placement.search import place
from deeplink.scheduler.topology.graph import Fabric

N = [NodeName(f"n{number}") for number in range(4)]
CLUSTER = PlacementCluster(
    fabric=Fabric({}),
    rooms={
        N[0]: NodeCapacity(gpus=8, free_gpus=8),
        N[1]: NodeCapacity(gpus=8, free_gpus=4, idle=False),
        N[2]: NodeCapacity(gpus=8, free_gpus=0, idle=False),
        N[3]: NodeCapacity(gpus=2, free_gpus=2),
    },
)


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (PlacementRequest(nodes=1), {0, 3}),
        (PlacementRequest(nodes=1, gpus_per_node=8), {0}),
        (PlacementRequest(nodes=1, exclusive=False), {0, 1, 2, 3}),
        (PlacementRequest(nodes=1, gpus_per_node=4, exclusive=False), {0, 1}),
        (PlacementRequest(nodes=1, gpus_per_node=2, exclusive=False, excluded=frozenset(N[:1])), {1, 3}),
    ],
)
def test_who_could_be_had(request_: PlacementRequest, found: set[int]) -> None:
    assert set(eligible(CLUSTER.rooms.items(), request_)) == {N[number] for number in found}


def test_what_no_nodes_can_meet_is_refused_with_how_many_there_are() -> None:
    with pytest.raises(NoPlacementError, match="3 nodes wanted; 2 could be had now") as caught:
        place(CLUSTER, PlacementRequest(nodes=3, gpus_per_node=4, exclusive=False))
    assert caught.value.exit_code == 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DeepLinkError, match="5 of a node's 4 GPUs"):
        NodeCapacity(gpus=4, free_gpus=5)
    with pytest.raises(DeepLinkError, match="at least one node"):
        PlacementRequest(nodes=0)
    with pytest.raises(DeepLinkError, match=r"n0: 1\.5 is not a share"):
        Speeds({N[0]: 1.5})
    with pytest.raises(DeepLinkError, match="0 is not a share"):
        Speeds({}, {("core", "leaf"): 0.0})
    with pytest.raises(DeepLinkError, match="fewer than 0 bytes"):
        DataResidency({N[0]: -1}, 10)
