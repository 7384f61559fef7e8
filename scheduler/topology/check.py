"""What is wrong with a fabric, or worth knowing about it; pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.topology.finding import TopologyFinding, TopologyFindingKind
from deeplink.scheduler.topology.graph import natural
from deeplink.scheduler.topology.network import DeviceHealth, tier
from deeplink.scheduler.topology.tree import parts_of, tree_of
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from deeplink.scheduler.topology.network import Cable, End, FabricLink, Network
    from deeplink.types import NodeName


def checked(
    network: Network, cluster: Collection[NodeName] | None = None, whose: str = "Slurm"
) -> list[TopologyFinding]:
    """Return what the graph itself shows, problems first.

    Args:
        network: the graph.
        cluster: the nodes there should be; None where nobody knows.
        whose: who says so, for messages.
    """
    findings = [
        *_compared(network, cluster, whose),
        *_connected(network),
        *_cables(network),
        *_nodes(network),
        *_uneven(network),
        *_empty(network),
    ]
    return sorted(findings, key=lambda finding: not finding.kind.problem)


def _compared(network: Network, cluster: Collection[NodeName] | None, whose: str) -> Iterator[TopologyFinding]:
    if cluster is None:
        return
    missing, unknown = set(cluster) - set(network.nodes), set(network.nodes) - set(cluster)
    if missing:
        yield TopologyFinding(TopologyFindingKind.MISSING, f"{_listed(missing)} of {whose} not in the topology")
    if unknown:
        yield TopologyFinding(
            TopologyFindingKind.UNKNOWN, f"{_listed(unknown)} in the topology, and no node of {whose}"
        )


def _listed(nodes: Collection[NodeName]) -> str:
    return f"{counted(len(nodes), 'node')} ({fold(nodes)})"


def _connected(network: Network) -> Iterator[TopologyFinding]:
    if not network.switches:
        return  # readers say where they found nothing
    loose = tree_of(network).loose
    if loose:
        yield TopologyFinding(TopologyFindingKind.LOOSE, f"{_listed(loose)} on no switch")
    nodes_at: dict[str, set[str]] = {}
    for link in network.host_links():
        nodes_at.setdefault(link.above, set()).add(link.below)
    with_nodes = [
        (min(part, key=lambda name: (-network.switches[name].level, natural(name))), nodes)
        for part in parts_of(network)
        if (nodes := {node for switch in part for node in nodes_at.get(switch, ())})
    ]
    if len(with_nodes) > 1:
        told = "; ".join(f"{counted(len(nodes), 'node')} below {top}" for top, nodes in with_nodes)
        yield TopologyFinding(
            TopologyFindingKind.DISCONNECTED, f"{len(with_nodes)} parts that no cable joins: {told}"
        )


def _cables(network: Network) -> Iterator[TopologyFinding]:
    for link in network.links:
        one_sided = 0
        for cable in link.cables:
            if cable.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN}:
                yield TopologyFinding(TopologyFindingKind.DEGRADED, cable_text(link, cable))
            one_sided += not (cable.lower.told and cable.upper.told)
        if one_sided:
            silent = next(cable for cable in link.cables if not (cable.lower.told and cable.upper.told))
            device, end = (link.above, silent.upper) if silent.lower.told else (link.below, silent.lower)
            text = (
                f"{_place(device, end)} was not heard; {link.below} - {link.above}, {counted(one_sided, 'cable')}"
            )
            yield TopologyFinding(TopologyFindingKind.ONE_SIDED, text)


def _place(device: str, end: End) -> str:
    return f"{device} port {end.port}" if end.port else device


def cable_text(link: FabricLink, cable: Cable) -> str:
    """Tell between what a cable is, and the rates its ends report."""
    lower, upper = cable.lower.gbps, cable.upper.gbps
    where = f"{_place(link.below, cable.lower)} - {_place(link.above, cable.upper)}"
    if lower is not None and upper is not None and lower != upper:
        rates = f"{lower:g} Gb/s at its lower end, {upper:g} at its upper"
    elif cable.gbps is not None:
        rates = f"{cable.gbps:g} Gb/s" + (", told by both ends" if None not in {lower, upper} else "")
    else:
        rates = cable.health.value
    usual = f"; usual here {cable.usual_gbps:g}" if cable.usual_gbps is not None else ""
    return f"{where}: {rates}{usual}"


def _nodes(network: Network) -> Iterator[TopologyFinding]:
    for node in network.nodes.values():
        if node.health in {DeviceHealth.DEGRADED, DeviceHealth.DOWN}:
            yield TopologyFinding(TopologyFindingKind.DEGRADED, f"node {node.name} is {node.health.value}")
        if node.inside is None:
            continue
        links = {gpu.name: node.inside.nvlinks(gpu.name) for gpu in node.inside.gpus}
        most = max(links.values(), default=0)
        for gpu, count in links.items():
            # In every NVLink machine each GPU has as many as the others, however they are dealt to its peers.
            if count < most:
                yield TopologyFinding(
                    TopologyFindingKind.DEGRADED,
                    f"{node.name} {gpu} has {counted(count, 'NVLink')}, others {most}",
                )


def _uneven(network: Network) -> Iterator[TopologyFinding]:
    """Tell switches with fewer cables up than most of their level; leaves without compute nodes aside."""
    with_nodes = {link.above for link in network.host_links()}
    up: Counter[str] = Counter()
    for link in network.trunks():
        if network.switches[link.below].level or link.below in with_nodes:
            up[link.below] += len(link.cables)
    for level in sorted({network.switches[name].level for name in up}):
        counts = {name: count for name, count in up.items() if network.switches[name].level == level}
        often = Counter(counts.values())
        usual = max(often, key=lambda count: (often[count], count))
        for name, count in sorted(counts.items(), key=lambda item: natural(item[0])):
            if count < usual:
                text = f"{tier(level)} {name} has {counted(count, 'cable')} up, most have {usual}"
                yield TopologyFinding(TopologyFindingKind.UNEVEN, text)


def _empty(network: Network) -> Iterator[TopologyFinding]:
    used = {link.above for link in network.links} | {other.switch for other in network.others}
    for name, switch in network.switches.items():
        if name not in used:
            yield TopologyFinding(TopologyFindingKind.EMPTY, f"{tier(switch.level)} {name} has nothing below it")
