"""Several readings to one graph."""

from __future__ import annotations

from dataclasses import replace

from deeplink.core.types import NodeName
from deeplink.scheduler.topology.graph import fabric_of, rails_of
from deeplink.scheduler.topology.network import (
    Cable,
    DeviceHealth,
    End,
    FabricLink,
    Network,
    Node,
    Role,
    Switch,
    TopologyCheck,
)
from deeplink.scheduler.topology.sources.assemble import THIS_NODE, NodeInternals, assembled, with_usual_rates
from deeplink.scheduler.topology.sources.document import read_document
from deeplink.scheduler.topology.sources.gathering import read_names
from tests.scheduler.topology.fabrics import INSIDE


def both(gbps: float) -> Cable:
    return Cable(lower=End(gbps=gbps), upper=End(gbps=gbps))


def leaf_with(*rates: float) -> Network:
    """A leaf with an uplink of each rate to a spine of its own."""
    switches = {"leaf": Switch("leaf", 0)} | {f"s{n}": Switch(f"s{n}", 1) for n in range(len(rates))}
    links = tuple(FabricLink("leaf", f"s{n}", False, (both(rate),)) for n, rate in enumerate(rates))
    return with_usual_rates(Network({}, switches, links))


def health(graph: Network) -> list[DeviceHealth]:
    return [link.health for link in graph.links]


def test_an_uplink_slower_than_the_others_of_its_switch_is_degraded() -> None:
    assert health(leaf_with(400, 400, 100)) == [DeviceHealth.OK, DeviceHealth.OK, DeviceHealth.DEGRADED]
    assert health(leaf_with(400, 100)) == [DeviceHealth.OK, DeviceHealth.DEGRADED]


def test_a_switch_that_is_slower_as_a_whole_is_older_not_degraded() -> None:
    fast, slow = leaf_with(400, 400), leaf_with(200, 200)
    older = tuple(replace(link, below="older") for link in slow.links)
    switches = {**fast.switches, "older": Switch("older", 0)}
    graph = with_usual_rates(Network({}, switches, (*fast.links, *older)))
    assert health(graph) == [DeviceHealth.OK] * 4


def test_single_uplinks_are_held_against_those_of_their_level() -> None:
    switches = {f"leaf{n}": Switch(f"leaf{n}", 0) for n in range(3)} | {"top": Switch("top", 1)}
    links = tuple(FabricLink(f"leaf{n}", "top", False, (both(rate),)) for n, rate in enumerate((400, 400, 200)))
    assert health(with_usual_rates(Network({}, switches, links)))[2] is DeviceHealth.DEGRADED


def test_a_host_is_held_against_hosts_named_alike() -> None:
    rates = {"gpu1": 400, "gpu2": 400, "gpu3": 100, "login1": 100}
    links = tuple(FabricLink(name, "leaf", True, (both(rate),)) for name, rate in rates.items())
    graph = Network({NodeName(name): Node(NodeName(name)) for name in rates}, {"leaf": Switch("leaf", 0)}, links)
    assert health(with_usual_rates(graph)) == [
        DeviceHealth.OK,
        DeviceHealth.OK,
        DeviceHealth.DEGRADED,
        DeviceHealth.OK,
    ]


def test_two_planes_are_one_fabric() -> None:
    planes = [read_document(f"switches: {{leaf-{p}: {{nodes: 'n[0-1]', gbps: 400}}}}", p) for p in "ab"]
    graph = assembled(planes).network
    assert rails_of(graph) == {"n0": ("leaf-a", "leaf-b"), "n1": ("leaf-a", "leaf-b")}
    assert fabric_of(graph).paths == {"n0": ("leaf-a",), "n1": ("leaf-a",)}


def test_what_one_source_leaves_open_another_tells() -> None:
    bare = read_document("switches: {leaf: {nodes: n0}}", "bare")
    fuller = read_document(
        "switches: {leaf: {nodes: n0, gbps: 400}}\nnodes: {n0: {domain: r, health: ok}}", "fuller"
    )
    graph = assembled([bare, fuller]).network
    assert graph.links[0].gbps == 400
    assert graph.nodes[NodeName("n0")] == Node(NodeName("n0"), "r", DeviceHealth.OK)


def test_the_same_file_twice_is_the_same_graph() -> None:
    reading = read_document("switches: {leaf: {nodes: 'n[0-3]', gbps: 400}}", "one")
    assert assembled([reading, reading]).network == assembled([reading]).network


def test_two_switches_with_one_name_in_two_sources_are_told() -> None:
    planes = [read_document(f"switches: {{leaf: {{nodes: n0, id: S-0{p}}}}}", f"{p}") for p in range(2)]
    assert [finding.check for finding in assembled(planes).findings] == [TopologyCheck.DUPLICATE]


def test_where_sources_differ_in_what_is_above_the_first_counts() -> None:
    one = read_document("switches: {top: {switches: [leaf]}, leaf: {nodes: n0}}", "one")
    other = read_document("switches: {leaf: {switches: [top], gbps: 400}}", "other")
    links = [link for link in assembled([one, other]).network.links if not link.host]
    assert [(link.below, link.above, link.gbps) for link in links] == [("leaf", "top", 400)]


def test_names_beside_a_fabric_are_no_flat_cluster() -> None:
    names = read_names("n[0-3]", "names")
    fabric = read_document("switches: {leaf: {nodes: 'n[0-1]'}}", "fabric")
    assert [finding.check for finding in assembled([names]).findings] == [TopologyCheck.FLAT]
    assert assembled([names, fabric]).findings == ()


def test_an_inside_is_of_the_nodes_that_are_named_or_of_all() -> None:
    names = read_names("n[0-1]", "names")
    graph = assembled([names], [NodeInternals(INSIDE, (NodeName("n1"),))]).network
    assert [node.inside for node in graph.nodes.values()] == [None, INSIDE]
    graph = assembled([names], [NodeInternals(INSIDE)]).network
    assert [node.inside for node in graph.nodes.values()] == [INSIDE, INSIDE]
    assert assembled([], [NodeInternals(INSIDE)]).network.nodes[THIS_NODE].inside == INSIDE


def test_a_port_of_a_card_that_no_gpu_is_near_to_is_for_storage() -> None:
    text = """
    switches: {leaf: {}, depot: {}}
    links:
    - {below: n0, above: leaf, ports: [mlx5_0/1, "1"]}
    - {below: n0, above: depot, ports: [mlx5_2/1, "1"]}
    """
    graph = assembled([read_document(text, "fabric")], [NodeInternals(INSIDE)]).network
    assert [cable.role for link in graph.links for cable in link.cables] == [Role.COMPUTE, Role.STORAGE]
    assert rails_of(graph) == {"n0": ("leaf",)}


def test_hosts_of_an_older_leaf_are_not_degraded_though_named_as_newer_ones() -> None:
    def graph(**rates: tuple[float, ...]) -> Network:
        hosts = [(leaf, n, rate) for leaf, found in rates.items() for n, rate in enumerate(found)]
        links = tuple(FabricLink(f"{leaf}-gpu{n}", leaf, True, (both(rate),)) for leaf, n, rate in hosts)
        nodes = {NodeName(link.below): Node(NodeName(link.below)) for link in links}
        return with_usual_rates(Network(nodes, {leaf: Switch(leaf, 0) for leaf in rates}, links))

    assert health(graph(r1=(400, 400, 400), r2=(200, 200))) == [DeviceHealth.OK] * 5
    assert health(graph(r1=(400, 400, 400), r2=(200, 200, 100))) == [*[DeviceHealth.OK] * 5, DeviceHealth.DEGRADED]
    # Alone on its switch it is held against those elsewhere.
    assert health(graph(r1=(400, 400), r2=(200,))) == [DeviceHealth.OK, DeviceHealth.OK, DeviceHealth.DEGRADED]
