"""Which network the nodes of a job share."""

from __future__ import annotations

import pytest

from deeplink.core.types import NodeName
from deeplink.rpc.resolving import InterfaceAddress, Route
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.shared_network import first_reached, settled, shared_networks, wanted_network

SLOW, FAST = 1_000, 100_000


def node(
    number: int, *links: InterfaceAddress, routes: tuple[Route, ...] | None = None, slurms: str = ""
) -> NodeFacts:
    if routes is None:
        routes = tuple(Route(link.network, link.interface) for link in links)
    ip = slurms or links[0].ip
    return NodeFacts(
        node=f"n{number}", address=f"{ip}:{4000 + number}", interface="eth0", links=links, routes=routes
    )


def facts(*nodes: NodeFacts) -> dict[NodeName, NodeFacts]:
    return {one.name: one for one in nodes}


def management(number: int) -> InterfaceAddress:
    return InterfaceAddress("eth0", f"192.168.1.{number}", "192.168.1.0/24", SLOW)


def fabric(number: int, interface: str = "ib0") -> InterfaceAddress:
    return InterfaceAddress(interface, f"10.1.0.{number}", "10.1.0.0/16", FAST)


def bridge(number: int) -> InterfaceAddress:
    return InterfaceAddress("docker0", "172.17.0.1", "172.17.0.0/16", 400_000)


def test_the_fastest_network_that_all_share_comes_first_and_slurms_own_second() -> None:
    found = shared_networks(facts(*(node(n, management(n), fabric(n)) for n in range(1, 4))))
    assert [shared.name for shared in found] == ["10.1.0.0/16", "192.168.1.0/24"]
    assert str(found[0]) == "10.1.0.0/16 (ib0, 100 Gb/s)"


def test_interfaces_of_one_network_may_have_other_names_on_other_nodes() -> None:
    shared = shared_networks(facts(node(1, management(1), fabric(1)), node(2, fabric(2, "ibs3"), management(2))))[
        0
    ]
    assert {name: link.interface for name, link in shared.links.items()} == {"n1": "ib0", "n2": "ibs3"}


def test_what_one_node_lacks_is_no_network_of_all() -> None:
    found = shared_networks(facts(node(1, management(1), fabric(1)), node(2, management(2))))
    assert [shared.name for shared in found] == ["192.168.1.0/24"]


def test_an_address_that_every_node_has_joins_none() -> None:
    found = shared_networks(facts(*(node(n, management(n), bridge(n)) for n in (1, 2))))
    assert [shared.name for shared in found] == ["192.168.1.0/24"]


def test_where_speeds_are_equal_or_unknown_slurms_own_is_first() -> None:
    nodes = [
        node(
            n,
            InterfaceAddress("a0", f"10.0.0.{n}", "10.0.0.0/24"),
            InterfaceAddress("b0", f"10.0.1.{n}", "10.0.1.0/24"),
            slurms=f"10.0.1.{n}",
        )
        for n in (1, 2)
    ]
    assert [shared.name for shared in shared_networks(facts(*nodes))] == ["10.0.1.0/24", "10.0.0.0/24"]


def routed(number: int, through: str) -> NodeFacts:
    """A node of a rack with a network of its own, whose routes to the other racks lead through an interface."""
    rack = InterfaceAddress("eth1", f"10.{number}.0.1", f"10.{number}.0.0/24", FAST)
    others = (Route(rack.network, "eth1"), Route("10.0.0.0/8", through), Route("0.0.0.0/0", "eth0"))
    return node(number, management(number), rack, routes=(*others, Route("192.168.1.0/24", "eth0")))


def test_a_network_for_each_rack_is_one_way_where_the_routes_lead_over_it() -> None:
    found = shared_networks(facts(*(routed(n, "eth1") for n in (1, 2, 3))))
    assert [shared.name for shared in found] == ["eth1", "192.168.1.0/24"]
    found = shared_networks(facts(routed(1, "eth1"), routed(2, "eth0")))
    assert [shared.name for shared in found] == ["192.168.1.0/24"], "one node's way to the other is not that way"


def test_the_management_network_behind_the_default_route_is_found_by_its_own_route() -> None:
    routes = (Route("192.168.1.0/24", "eth0"), Route("0.0.0.0/0", "eth0"))
    found = shared_networks(facts(*(node(n, management(n), routes=routes) for n in (1, 2))))
    assert [shared.name for shared in found] == ["192.168.1.0/24"]


@pytest.mark.parametrize("wanted", ["eth0", "192.168.1.0/24", "192.168.0.0/16"])
def test_what_was_asked_for_is_taken_by_name_or_by_network(wanted: str) -> None:
    shared = wanted_network(facts(*(node(n, fabric(n), management(n)) for n in (1, 2))), wanted)
    assert [link.ip for link in shared.links.values()] == ["192.168.1.1", "192.168.1.2"]


@pytest.mark.parametrize("wanted", ["eth", "10.2.0.0/16", "10.1.0.1/16"])
def test_what_a_node_lacks_is_an_error_that_says_what_it_has(wanted: str) -> None:
    with pytest.raises(LaunchError) as caught:
        wanted_network(facts(node(1, management(1), fabric(1))), wanted)
    assert str(caught.value).startswith(f"interface {wanted}: not on n1, ")
    assert "n1, which has eth0 (192.168.1.1), ib0 (10.1.0.1)" in str(caught.value)


def test_settled_nodes_have_their_address_there_at_their_own_port() -> None:
    nodes = facts(*(node(n, management(n), fabric(n)) for n in (1, 2)))
    found = settled(nodes, shared_networks(nodes)[0])
    assert [(one.address, one.interface) for one in found.values()] == [
        ("10.1.0.1:4001", "ib0"),
        ("10.1.0.2:4002", "ib0"),
    ]
    assert not any(one.links or one.routes for one in found.values())
    assert [one.address for one in settled(nodes, None).values()] == ["192.168.1.1:4001", "192.168.1.2:4002"]


def test_a_network_that_does_not_answer_gives_way_to_the_next() -> None:
    nodes = facts(*(node(n, management(n), fabric(n)) for n in (1, 2)))
    networks = shared_networks(nodes)
    asked: list[tuple[str, int]] = []

    def reached(addresses: object) -> bool:
        assert isinstance(addresses, list)
        asked.extend(addresses)
        return all(ip.startswith("192") for ip, _ in addresses)

    found = first_reached(networks, nodes, reached)
    assert found is not None
    assert found.name == "192.168.1.0/24"
    assert asked == [("10.1.0.1", 4001), ("10.1.0.2", 4002), ("192.168.1.1", 4001), ("192.168.1.2", 4002)]
    assert first_reached(networks, nodes, lambda _: False) is None


def test_a_thousand_nodes_each_with_a_network_of_its_own() -> None:
    nodes = []
    for number in range(1000):
        link = InterfaceAddress(
            "eth1", f"10.{number // 250}.{number % 250}.1", f"10.{number // 250}.{number % 250}.0/30", FAST
        )
        nodes.append(node(number, link, routes=(Route(link.network, "eth1"), Route("10.0.0.0/8", "eth1"))))
    assert [shared.name for shared in shared_networks(facts(*nodes))] == ["eth1"]
