"""Requests that cannot be met say which limit is in the way."""

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
    refuse,
)
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


@pytest.mark.parametrize(
    ("request_", "limit", "there", "later", "said"),
    [
        (PlacementRequest(nodes=5), "nodes", 4, False, "5 nodes wanted; the cluster has 4"),
        (
            PlacementRequest(nodes=4, excluded=frozenset(N[:1])),
            "excluded",
            3,
            False,
            "without the excluded ones there are 3",
        ),
        (
            PlacementRequest(nodes=4, gpus_per_node=4),
            "gpus",
            3,
            False,
            "4 nodes wanted; with 4 GPUs each there are 3",
        ),
        (PlacementRequest(nodes=2, gpus_per_node=4), "busy", 1, True, "of those that would do, idle are now 1"),
        (PlacementRequest(nodes=3, gpus_per_node=4, exclusive=False), "busy", 2, True, "free are now 2"),
        (
            PlacementRequest(nodes=1, required=frozenset(N[:2])),
            "required",
            1,
            False,
            "1 node wanted, and 2 required by name",
        ),
        (
            PlacementRequest(nodes=1, required=frozenset({NodeName("x")})),
            "required",
            0,
            False,
            "not in the cluster: x",
        ),
        (
            PlacementRequest(nodes=1, required=frozenset(N[:1]), excluded=frozenset(N[:1])),
            "required",
            0,
            False,
            "excluded as well: n0",
        ),
        (
            PlacementRequest(nodes=1, required=frozenset(N[3:]), gpus_per_node=8, exclusive=False),
            "required",
            0,
            False,
            "with fewer than 8 GPUs: n3",
        ),
        (PlacementRequest(nodes=2, required=frozenset(N[1:2])), "required", 0, True, "not free now: n1"),
    ],
)
def test_the_first_limit_that_is_not_met_is_named(
    request_: PlacementRequest, limit: str, there: int, *, later: bool, said: str
) -> None:
    with pytest.raises(NoPlacementError) as caught:
        refuse(CLUSTER, request_)
    error = caught.value
    assert (error.limit, error.there, error.later) == (limit, there, later)
    assert said in str(error)
    assert ("Wait" in error.remedy) == later
    assert error.exit_code == 2


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
