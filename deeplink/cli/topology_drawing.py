"""The fabric as a tree in the terminal, and as plain values."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Drawing

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.topology.check import cable_text
from deeplink.scheduler.topology.network import DeviceHealth, tier
from deeplink.scheduler.topology.tree import tree_of
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.topology.inside import Inside
    from deeplink.scheduler.topology.network import FabricLink, Network
    from deeplink.scheduler.topology.tree import Branch
    from deeplink.types import NodeName

_STYLES = {
    DeviceHealth.OK: "green",
    DeviceHealth.UNKNOWN: "dim",
    DeviceHealth.DEGRADED: "yellow",
    DeviceHealth.DOWN: "bold red",
}
_BAD = {DeviceHealth.DEGRADED, DeviceHealth.DOWN}
_WIDE = 4096  # into a pipe or a file nothing is cut off


def draw(network: Network) -> None:
    """Print the tree."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    tree = tree_of(network)
    up = _uplinks(network)
    for root in tree.roots:
        drawing = Drawing(_label(root, up), guide_style="dim")
        # Not by recursion: what people write may be as deep as they like.
        waiting = [(root, drawing)]
        while waiting:
            branch, place = waiting.pop()
            _hang(place, branch, network, up)
            waiting.extend((below, place.add(_label(below, up))) for below in branch.below)
        console.print(drawing)
    if tree.loose:
        console.print(Text(f"on no switch: {fold(tree.loose)}"))
    for inside, names in network.insides():
        console.print(Text(f"in {fold(names)}: {printable(_inside_text(inside))}"))


def _uplinks(network: Network) -> Mapping[str, list[FabricLink]]:
    """Return the links from each switch up, and under an empty name plus the node's those of each node."""
    up: dict[str, list[FabricLink]] = {}
    for link in network.links:
        if not link.host or link.compute:
            up.setdefault(_key(link.below, host=link.host), []).append(link)
    return up


def _key(name: str, *, host: bool) -> str:
    return f"/{name}" if host else name  # no name begins so


def _label(branch: Branch, up: Mapping[str, list[FabricLink]]) -> Text:
    count = len(branch.switches)
    kind = tier(branch.level)
    what = counted(count, kind) if count > 1 else kind if count else "no switch, only cables between those below"
    label = Text(branch.name, style="bold").append(f" ({what})", style="not bold")
    links = [link for switch in branch.switches for link in up.get(switch, ())]
    if links:
        label.append("  up: ", style="not bold dim").append_text(_cables(links))
    return label


def _cables(links: Iterable[FabricLink]) -> Text:
    """Tell how many cables there are, at what rates, and whether they are well."""
    cables = [cable for link in links for cable in link.cables]
    rates = Counter(cable.gbps for cable in cables if cable.gbps is not None)
    told = " + ".join(f"{count} x {gbps:g} Gb/s" for gbps, count in sorted(rates.items(), reverse=True))
    text = Text(told or counted(len(cables), "cable"), style="not bold")
    bad = Counter(cable.health for cable in cables if cable.health in _BAD)
    if bad:
        for health, count in bad.items():
            text.append(f" {count} {health.value}", style=_STYLES[health])
    elif rates:
        text.append(" ok", style=_STYLES[DeviceHealth.OK])
    return text


def _hang(place: Drawing, branch: Branch, network: Network, up: Mapping[str, list[FabricLink]]) -> None:
    """Put below a branch its bad cables and its nodes: bad ones one by one, others that are alike in one line."""
    for switch in branch.switches:
        _bad_cables(place, up.get(switch, ()))
    alike: dict[tuple[str, str], list[NodeName]] = {}
    for name in branch.nodes:
        node, links = network.nodes[name], up.get(_key(name, host=True), [])
        cables = _cables(links)
        if node.health in _BAD or any(link.health in _BAD for link in links):
            said = f" {node.health.value}" if node.health in _BAD else ""
            bad = place.add(Text(name).append(said, style=_STYLES[node.health]).append("  ").append_text(cables))
            _bad_cables(bad, links)
            continue
        told = cables.plain if links and any(link.gbps is not None for link in links) else ""
        alike.setdefault((told, node.domain), []).append(name)
    for (cables_told, domain), names in alike.items():
        label = Text(fold(names)).append(f" ({counted(len(names), 'node')}")
        label.append(f", NVLink domain {printable(domain)})" if domain else ")")
        if cables_told:
            label.append(f"  each {cables_told}", style="dim")
        place.add(label)


def _bad_cables(place: Drawing, links: Iterable[FabricLink]) -> None:
    for link in links:
        for cable in link.cables:
            if cable.health in _BAD:
                place.add(
                    Text(
                        f"{cable.health.value}: {printable(cable_text(link, cable))}", style=_STYLES[cable.health]
                    )
                )


def _inside_text(inside: Inside) -> str:
    gpus = [gpu.name for gpu in inside.gpus]
    ways = Counter(str(joined) for (one, other), joined in inside.pairs.items() if one in gpus and other in gpus)
    pairs = ", ".join(f"{count} pairs {way}" if count > 1 else f"1 pair {way}" for way, count in ways.items())
    parts = [counted(len(gpus), "GPU") + (f" ({pairs})" if pairs else "")]
    near: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        cards = tuple(f"{nic.device} {inside.between(gpu, nic.name)}" for nic in inside.nearest_nics(gpu))
        near.setdefault(cards, []).append(gpu)
    parts += [f"{' '.join(names)} nearest to {', '.join(cards)}" for cards, names in near.items() if cards]
    if inside.far_nics():
        parts.append(f"near to no GPU: {', '.join(nic.device for nic in inside.far_nics())}")
    return "; ".join(parts)


def plain_tree(network: Network) -> dict[str, Any]:
    """Return the tree as plain values: branches from the roots down, each with the name of the one above."""
    tree = tree_of(network)
    up = _uplinks(network)
    above = {below.name: branch.name for branch in tree.walk() for below in branch.below}
    return {
        "branches": [
            {
                "name": branch.name,
                "tier": tier(branch.level),
                "level": branch.level,
                "above": above.get(branch.name),
                "switches": list(branch.switches),
                "nodes": list(branch.nodes),
                "up": _plain_cables(link for switch in branch.switches for link in up.get(switch, ())),
            }
            for branch in tree.walk()
        ],
        "loose": list(tree.loose),
    }


def _plain_cables(links: Iterable[FabricLink]) -> dict[str, Any]:
    cables = [cable for link in links for cable in link.cables]
    health = Counter(cable.health.value for cable in cables)
    told = [cable.gbps for cable in cables if cable.gbps is not None]
    return {"cables": len(cables), "gbps": sum(told) if told else None, "health": dict(health)}
