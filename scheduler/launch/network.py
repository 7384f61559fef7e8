"""Which network the agents and the ranks of a job talk over; pure.

Slurm's name for a node stands for one of its addresses, on a node with several often that of the slow network
for management. What all nodes have in common is looked for instead, the fastest first: a network that every node
has an address in, or an interface of one name from which the routes of every node lead to that of every other.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from socket import inet_aton
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.scheduler.topology.graph import natural
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from deeplink.links import InterfaceAddress, Route
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.types import NodeName

SLURMS = "the addresses Slurm knows the nodes by"


class NoInterfaceError(DeepLinkError):
    """A node has no interface of the name, or in the network, that was asked for."""

    exit_code = 2

    def __init__(self, wanted: str, nodes: Collection[NodeName], there: Collection[str]) -> None:
        names = sorted(nodes, key=natural)
        super().__init__(
            f"interface {wanted}: not on {listed(names)}, which has {', '.join(there) or 'none but loopback'}",
            remedy="Give --interface (DEEPLINK_INTERFACE) the name of an interface that is up on every node of "
            "the job, or a network such as 10.1.0.0/16; or leave it out, and one is chosen.",
        )
        self.wanted, self.nodes, self.there = wanted, tuple(nodes), tuple(there)


@dataclass(frozen=True, slots=True)
class SharedNetwork:
    """One way for all nodes of a job to reach each other.

    Attributes:
        name: of the network or the interface, for people.
        links: what each node uses.
        speed_mbps: of the slowest link; 0 where one of them is unknown.
    """

    name: str
    links: Mapping[NodeName, InterfaceAddress]
    speed_mbps: int = 0

    @override
    def __str__(self) -> str:
        interfaces = sorted({link.interface for link in self.links.values()}, key=natural)
        speed = f", {self.speed_mbps / 1000:g} Gb/s" if self.speed_mbps else ""
        return f"{self.name} ({', '.join(interfaces[:4])}{', ...' if len(interfaces) > 4 else ''}{speed})"  # noqa: PLR2004


def shared_networks(facts: Mapping[NodeName, NodeFacts]) -> tuple[SharedNetwork, ...]:
    """Return every network that the routes of all nodes lead over, the best first.

    Fast before slow and unknown; among equals the one that Slurm uses, then by name. An address that several nodes
    have (a bridge of containers, say) joins none of them.
    """
    found: dict[tuple[InterfaceAddress, ...], SharedNetwork] = {}
    ways = {node: _Ways(one.routes) for node, one in facts.items()}
    for shared in (*_of_one_name(facts, "network"), *_of_one_name(facts, "interface")):
        if _led_over(shared, ways):
            found.setdefault(tuple(shared.links.values()), shared)
    return tuple(
        sorted(found.values(), key=lambda one: (-one.speed_mbps, not _slurms(one, facts), natural(one.name)))
    )


def wanted_network(facts: Mapping[NodeName, NodeFacts], wanted: str) -> SharedNetwork:
    """Return the network that was asked for.

    Args:
        facts: the nodes.
        wanted: the name of an interface, or a network as `10.1.0.0/16`.

    Raises:
        NoInterfaceError: a node has none of it.
    """
    fits = _fitting(wanted)
    chosen = {node: next(filter(fits, one.links), None) for node, one in facts.items()}
    missing = [node for node, link in chosen.items() if link is None]
    if missing:
        there = [f"{link.interface} ({link.ip})" for link in facts[missing[0]].links]
        raise NoInterfaceError(wanted, missing, there)
    return _shared(wanted, {node: link for node, link in chosen.items() if link is not None})


def settled(facts: Mapping[NodeName, NodeFacts], shared: SharedNetwork | None) -> dict[NodeName, NodeFacts]:
    """Return the nodes with the addresses they have there; with those they told where `shared` is None.

    What they told of their links is left out: it has served its purpose, and ranks carry the rest in one variable.
    """
    bare = {node: replace(one, links=(), routes=()) for node, one in facts.items()}
    if shared is None:
        return bare
    return {
        node: replace(one, address=f"{link.ip}:{one.address.rpartition(':')[2]}", interface=link.interface)
        for node, one in bare.items()
        for link in [shared.links[node]]
    }


def _fitting(wanted: str) -> Callable[[InterfaceAddress], bool]:
    try:
        network = ipaddress.IPv4Network(wanted)
    except ValueError:
        return lambda link: link.interface == wanted
    return lambda link: ipaddress.IPv4Address(link.ip) in network


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


def _slurms(shared: SharedNetwork, facts: Mapping[NodeName, NodeFacts]) -> bool:
    return all(facts[node].host == link.ip for node, link in shared.links.items())


def first_reached(
    candidates: Iterable[SharedNetwork],
    facts: Mapping[NodeName, NodeFacts],
    reached: Callable[[Collection[tuple[str, int]]], bool],
) -> SharedNetwork | None:
    """Return the first network over which every agent accepts connections; None where there is none.

    Args:
        candidates: the best first.
        facts: the nodes.
        reached: tells whether something listens at each of these addresses, in bounded time.
    """
    for shared in candidates:
        if reached(
            [(link.ip, int(facts[node].address.rpartition(":")[2])) for node, link in shared.links.items()]
        ):
            return shared
    return None
