"""Finds the network that all nodes of the job share, and their place on the fabric."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.launch.network import SLURMS, first_reached, settled, shared_networks, wanted_network
from deeplink.scheduler.launch.site import known_fabric
from deeplink.scheduler.launch.tcp_check import all_reached
from deeplink.scheduler.topology.graph import Fabric
from deeplink.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.network import SharedNetwork
    from deeplink.scheduler.launch.site import SiteFabric
    from deeplink.types import NodeName

log = logging.getLogger(__name__)


def found_network(
    facts: Mapping[NodeName, NodeFacts], wanted: str, chronicle: EventLog
) -> dict[NodeName, NodeFacts]:
    """Return the nodes with the addresses they are to be reached by.

    Args:
        facts: the nodes as their agents told of them.
        wanted: the interface or network that was asked for; empty where it is ours to choose.
        chronicle: who is told.

    Raises:
        NoInterfaceError: a node has none of what was asked for.
    """
    if not any(one.links for one in facts.values()):
        return settled(facts, None)  # agents on loopback: one machine
    shared: SharedNetwork | None
    if wanted:
        shared = wanted_network(facts, wanted)
        if first_reached([shared], facts, all_reached) is None:
            log.warning("not every node answers over %s, which was asked for", shared)
    elif len(facts) == 1:
        shared = None  # nobody to be reached: a bridge for containers would do as well as the fabric
    else:
        shared = first_reached(shared_networks(facts), facts, all_reached)
    found = settled(facts, shared)
    chronicle.event(
        "network",
        network=SLURMS if shared is None else shared.name,
        interfaces=sorted({one.interface for one in found.values()}),
        speed_mbps=0 if shared is None else shared.speed_mbps,
    )
    return found


def on_fabric(
    order: LaunchSpec, backend: Backend, site: SiteFabric | None, nodes: Mapping[NodeName, str]
) -> LaunchSpec:
    """Return the order with the fabric that is known.

    Args:
        order: what to run.
        backend: asked where nobody else can say.
        site: the site's description of the fabric, if there is one.
        nodes: those of the job, each with its SLURM_TOPOLOGY_ADDR, which may be empty.
    """
    return replace(order, fabric=fabric_below(nodes, site, backend.fabric))


def fabric_below(
    nodes: Mapping[NodeName, str], site: SiteFabric | None, ask_slurm: Callable[[], Fabric]
) -> Fabric:
    """Return the fabric that is known, as `known_fabric` does; where nobody can tell, an empty one."""
    known = known_fabric(nodes, site, lambda: _asked(ask_slurm))
    if site is not None and known.source != site.source:
        log.warning("%s has none of the job's nodes: the fabric is what Slurm says", site.source)
    elif known.missing and len(known.missing) < len(nodes):
        lacking = counted(len(known.missing), "node")
        log.warning("%s lacks %s of the job (%s)", known.source, lacking, listed(known.missing, 5))
    return known.fabric


def _asked(ask_slurm: Callable[[], Fabric]) -> Fabric:
    try:
        return ask_slurm()
    except DeepLinkError as problem:
        # An order by name is worse, not wrong: no reason not to run.
        log.warning("the fabric is not known: %s", problem)
        return Fabric({})
