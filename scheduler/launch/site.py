"""What is known of the fabric when ranks are put in order: the site's own description of it, or Slurm's; pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.topology.domains import failure_domains
from deeplink.scheduler.topology.graph import Fabric, fabric_from_addresses
from deeplink.scheduler.topology.tree import fabric_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.topology.inside import Inside
    from deeplink.scheduler.topology.network import Network
    from deeplink.types import NodeName


@dataclass(frozen=True, slots=True)
class SiteFabric:
    """The site's fabric, as the setting `topology` describes it.

    Attributes:
        source: where it was read.
        hcas: by node, the cards NCCL is to use, as NCCL_IB_HCA has it; only nodes of which that is known.
    """

    source: str
    fabric: Fabric
    hcas: Mapping[NodeName, str] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, source: str) -> SiteFabric:
        """Take from a graph what a launch needs."""
        told = {node.name: near_hcas(node.inside) for node in network.nodes.values() if node.inside is not None}
        return cls(source, fabric_of(network), {node: hcas for node, hcas in told.items() if hcas})


def near_hcas(inside: Inside) -> str:
    """Return the InfiniBand cards of a node that are for its GPUs; empty where all are, or nobody can tell.

    Which of them a GPU uses NCCL finds out by itself; what it cannot know is that the others lead to the storage.
    """
    far = inside.far_nics()
    near = [nic.device for nic in inside.nics if nic not in far]
    return f"={','.join(near)}" if far and near and all(name.startswith("mlx") for name in near) else ""


@dataclass(frozen=True, slots=True)
class Known:
    """The fabric a launch goes by.

    Attributes:
        source: who told of it, for people; empty where nobody did.
        missing: the nodes it lacks. They count as neighbours of each other.
    """

    fabric: Fabric
    source: str
    missing: tuple[NodeName, ...]


def known_fabric(nodes: Mapping[NodeName, str], site: SiteFabric | None, ask_slurm: Callable[[], Fabric]) -> Known:
    """Return the fabric to go by: the site's, where it has any of the nodes, or what Slurm told them, or tells us.

    Never a mixture: two sources may call one switch by two names.

    Args:
        nodes: those of the job, each with its SLURM_TOPOLOGY_ADDR, which may be empty.
        site: the site's description, if there is one.
        ask_slurm: asked when nobody else can say.
    """
    if site is not None and (known := _lacking(site.fabric, nodes, site.source)).missing != tuple(nodes):
        return known
    if (told := fabric_from_addresses(nodes)).paths:
        return _lacking(told, nodes, "Slurm")
    return _lacking(ask_slurm(), nodes, "scontrol show topology")


def _lacking(fabric: Fabric, nodes: Mapping[NodeName, str], source: str) -> Known:
    return Known(fabric, source, tuple(node for node in nodes if not fabric.path(node)))


def with_hcas(facts: Mapping[NodeName, NodeFacts], site: SiteFabric | None) -> dict[NodeName, NodeFacts]:
    """Return the nodes with what the site says of their cards."""
    hcas = site.hcas if site is not None else {}
    return {node: replace(one, hcas=hcas.get(node, "")) for node, one in facts.items()}


def with_domains(facts: Mapping[NodeName, NodeFacts], fabric: Fabric) -> dict[NodeName, NodeFacts]:
    """Return the nodes with what each fails together with, for the copies of shards to lie apart."""
    domains = failure_domains(fabric, {node: one.weight for node, one in facts.items()})
    return {node: replace(one, domain=domains.get(node, "")) for node, one in facts.items()}
