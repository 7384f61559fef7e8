"""Selects the network that a job's agents and ranks use, and the fabric of their nodes.

Slurm's name for a node stands for one of its addresses, on a node with several often that of the slow network
for management. What all nodes have in common is looked for instead, the fastest first: a network that every node
has an address in, or an interface of one name from which the routes of every node lead to that of every other.

The fabric is the site's own description of it, or Slurm's.
"""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass, field, replace
from socket import inet_aton
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.tcp import connect_all
from deeplink.core.text import counted, listed
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.topology.graph import Fabric, fabric_from_addresses, fabric_of, failure_domains, natural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from deeplink.core.types import NodeName
    from deeplink.rpc.resolving import InterfaceAddress, Route
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.topology.network import Inside, Network

log = logging.getLogger(__name__)

SLURMS = "the addresses Slurm knows the nodes by"
# On a network for MPI or NCCL an answer takes less than a millisecond; a lost packet is sent again after 1 s.
CONNECT_S = 1.5


@dataclass(frozen=True, slots=True)
class SharedNetwork:
    """One way for all nodes of a job to reach each other."""

    name: str  # of the network or the interface, for people
    links: Mapping[NodeName, InterfaceAddress]  # what each node uses
    speed_mbps: int = 0  # of the slowest link; 0 where one of them is unknown

    @override
    def __str__(self) -> str:
        interfaces = sorted({link.interface for link in self.links.values()}, key=natural)
        speed = f", {self.speed_mbps / 1000:g} Gb/s" if self.speed_mbps else ""
        return f"{self.name} ({', '.join(interfaces[:4])}{', ...' if len(interfaces) > 4 else ''}{speed})"  # noqa: PLR2004


def shared_networks(facts: Mapping[NodeName, NodeFacts]) -> tuple[SharedNetwork, ...]:
    """Return every network that the routes of all nodes lead over, the best first."""
    # Fast before slow and unknown; among equals the one that Slurm uses, then by name. An address that several
    # nodes have (a bridge of containers, say) joins none of them.
    found: dict[tuple[InterfaceAddress, ...], SharedNetwork] = {}
    ways = {node: _Ways(one.routes) for node, one in facts.items()}
    for shared in (*_of_one_name(facts, "network"), *_of_one_name(facts, "interface")):
        if _led_over(shared, ways):
            found.setdefault(tuple(shared.links.values()), shared)

    def order(one: SharedNetwork) -> tuple[object, ...]:
        is_slurms = all(facts[node].host == link.ip for node, link in one.links.items())
        return -one.speed_mbps, not is_slurms, natural(one.name)

    return tuple(sorted(found.values(), key=order))


def _of_one_name(facts: Mapping[NodeName, NodeFacts], what: str) -> Iterator[SharedNetwork]:
    """Yield what all nodes have a link in: networks, or interfaces of one name."""
    by_name: dict[str, dict[NodeName, InterfaceAddress]] = {}
    for node, one in facts.items():
        for link in one.links:
            by_name.setdefault(getattr(link, what), {}).setdefault(node, link)
    for name, links in by_name.items():
        if len(links) == len(facts) == len({link.ip for link in links.values()}):
            yield _shared(name, links)


def _shared(name: str, links: Mapping[NodeName, InterfaceAddress]) -> SharedNetwork:
    return SharedNetwork(name, links, min((link.speed_mbps for link in links.values()), default=0))


def _led_over(shared: SharedNetwork, ways: Mapping[NodeName, _Ways]) -> bool:
    # Peers in one network are reached by one route: two stand for all, one of which is not the node itself.
    peers: dict[str, list[int]] = {}
    for link in shared.links.values():
        peers.setdefault(link.network, []).append(_as_number(link.ip))
    some = [(ips[0], ips[1] if len(ips) > 1 else None) for ips in peers.values()]
    for node, link in shared.links.items():
        own, towards = _as_number(link.ip), ways[node].towards
        for one, other in some:
            peer = other if one == own else one
            if peer is not None and towards(peer) != link.interface:
                return False
    return True


def _as_number(ip: str) -> int:
    return int.from_bytes(inet_aton(ip), "big")


class _Ways:
    """A node's routes, to be asked very often: of a thousand nodes each may have a network of its own."""

    def __init__(self, routes: Iterable[Route]) -> None:
        by_mask: dict[int, dict[int, str]] = {}
        for route in routes:  # the narrowest first, and of equals the one that counts
            base, _, length = route.network.partition("/")
            mask = 0xFFFFFFFF << (32 - int(length)) & 0xFFFFFFFF
            by_mask.setdefault(mask, {}).setdefault(_as_number(base), route.interface)
        self._by_mask = tuple(by_mask.items())

    def towards(self, ip: int) -> str | None:
        """Return the interface through which packets to an address leave."""
        for mask, interfaces in self._by_mask:
            interface = interfaces.get(ip & mask)
            if interface is not None:
                return interface
        return None


def wanted_network(facts: Mapping[NodeName, NodeFacts], wanted: str) -> SharedNetwork:
    """Return the network that was asked for."""
    fits = _fitting(wanted)
    chosen = {node: link for node, one in facts.items() if (link := next(filter(fits, one.links), None))}
    missing = sorted(facts.keys() - chosen.keys(), key=natural)
    if missing:
        first = next(one for node, one in facts.items() if node not in chosen)
        there = ", ".join(f"{link.interface} ({link.ip})" for link in first.links) or "none but loopback"
        raise LaunchError(
            f"interface {wanted}: not on {listed(missing)}, which has {there}",
            "Give --interface (DEEPLINK_INTERFACE) the name of an interface that is up on every node of "
            "the job, or a network such as 10.1.0.0/16; or leave it out, and one is chosen.",
        )
    return _shared(wanted, chosen)


def _fitting(wanted: str) -> Callable[[InterfaceAddress], bool]:
    try:
        network = ipaddress.IPv4Network(wanted)
    except ValueError:
        return lambda link: link.interface == wanted
    return lambda link: ipaddress.IPv4Address(link.ip) in network


def settled(facts: Mapping[NodeName, NodeFacts], shared: SharedNetwork | None) -> dict[NodeName, NodeFacts]:
    """Return the nodes with the addresses they have there; with those they told where `shared` is None."""
    # What they told of their links is left out: it has served its purpose, and ranks carry the rest in one
    # variable.
    bare = {node: replace(one, links=(), routes=()) for node, one in facts.items()}
    if shared is None:
        return bare
    return {
        node: replace(one, address=f"{link.ip}:{one.address.rpartition(':')[2]}", interface=link.interface)
        for node, one in bare.items()
        for link in [shared.links[node]]
    }


def all_reached(addresses: Collection[tuple[str, int]], timeout_s: float = CONNECT_S) -> bool:
    """Tell whether every address accepts a connection within the time; many are tried at once."""
    return all(outcome == 0 for outcome in connect_all(list(addresses), timeout_s))


def first_reached(
    candidates: Iterable[SharedNetwork],
    facts: Mapping[NodeName, NodeFacts],
    reached: Callable[[Collection[tuple[str, int]]], bool] = all_reached,
) -> SharedNetwork | None:
    """Return the first network over which every agent accepts connections; None where there is none."""
    for shared in candidates:
        ports = {node: int(facts[node].address.rpartition(":")[2]) for node in shared.links}
        if reached([(link.ip, ports[node]) for node, link in shared.links.items()]):
            return shared
    return None


def found_network(facts: Mapping[NodeName, NodeFacts], wanted: str, events: EventLog) -> dict[NodeName, NodeFacts]:
    """Return the nodes with the addresses they are to be reached by."""
    if not any(one.links for one in facts.values()):
        return settled(facts, None)  # agents on loopback: one machine
    shared: SharedNetwork | None
    if wanted:
        shared = wanted_network(facts, wanted)
        if first_reached([shared], facts) is None:
            log.warning("not every node answers over %s, which was asked for", shared)
    elif len(facts) == 1:
        shared = None  # none to be reached: a bridge for containers would do as well as the fabric
    else:
        shared = first_reached(shared_networks(facts), facts)
    found = settled(facts, shared)
    events.event(
        "network",
        network=SLURMS if shared is None else shared.name,
        interfaces=sorted({one.interface for one in found.values()}),
        speed_mbps=0 if shared is None else shared.speed_mbps,
    )
    return found


@dataclass(frozen=True, slots=True)
class SiteFabric:
    """The site's fabric, as the setting `topology` describes it."""

    source: str  # where it was read
    fabric: Fabric
    # by node, the cards NCCL is to use, as NCCL_IB_HCA has it; only nodes of which that is known
    hcas: Mapping[NodeName, str] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, source: str) -> SiteFabric:
        """Take from a graph what a launch needs."""
        told = {node.name: near_hcas(node.inside) for node in network.nodes.values() if node.inside is not None}
        return cls(source, fabric_of(network), {node: hcas for node, hcas in told.items() if hcas})


def near_hcas(inside: Inside) -> str:
    """Return the InfiniBand cards of a node that are for its GPUs; empty where all are, or nobody can tell."""
    # Which of them a GPU uses NCCL finds out by itself; what it cannot know is that the others lead to the
    # storage.
    far = inside.far_nics()
    near = [nic.device for nic in inside.nics if nic not in far]
    return f"={','.join(near)}" if far and near and all(name.startswith("mlx") for name in near) else ""


def with_hcas(facts: Mapping[NodeName, NodeFacts], site: SiteFabric | None) -> dict[NodeName, NodeFacts]:
    """Return the nodes with what the site says of their cards."""
    hcas = site.hcas if site is not None else {}
    return {node: replace(one, hcas=hcas.get(node, "")) for node, one in facts.items()}


def with_domains(facts: Mapping[NodeName, NodeFacts], fabric: Fabric) -> dict[NodeName, NodeFacts]:
    """Return the nodes with what each fails together with, for the copies of shards to lie apart."""
    domains = failure_domains(fabric, {node: one.weight for node, one in facts.items()})
    return {node: replace(one, domain=domains.get(node, "")) for node, one in facts.items()}


def fabric_below(
    nodes: Mapping[NodeName, str], site: SiteFabric | None, ask_slurm: Callable[[], Fabric]
) -> Fabric:
    """Return the site's fabric, where it has any of the nodes, or Slurm's; an empty one where nobody can tell."""
    # Never a mixture: two sources may call one switch by two names. Nodes that it lacks count as neighbours.
    if site is not None and any(map(site.fabric.path, nodes)):
        fabric, source = site.fabric, site.source
    else:
        if site is not None:
            log.warning("%s has none of the job's nodes: the fabric is what Slurm says", site.source)
        fabric, source = fabric_from_addresses(nodes), "Slurm"
    if not fabric.paths:
        try:
            fabric, source = ask_slurm(), "scontrol show topology"
        except DeepLinkError as problem:
            # An order by name is worse, not wrong: no reason not to run.
            log.warning("the fabric is not known: %s", problem)
    missing = [node for node in nodes if not fabric.path(node)]
    if 0 < len(missing) < len(nodes):
        log.warning("%s lacks %s of the job (%s)", source, counted(len(missing), "node"), listed(missing, 5))
    return fabric
