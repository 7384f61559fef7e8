"""`deeplink topology`: read what the nodes hang on, from files or Slurm; draw, check and export it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import flag, grouped, json_option, option, path_option
from deeplink.cli.output import console, print_json
from deeplink.core.finding import Severity
from deeplink.core.publish import write_output
from deeplink.core.text import counted, printable
from deeplink.scheduler.topology.network import DeviceHealth, tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.text import Text
    from rich.tree import Tree

    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName
    from deeplink.scheduler.topology.graph import Branch
    from deeplink.scheduler.topology.network import FabricLink, Inside, Network
    from deeplink.scheduler.topology.sources.gathering import Reading

_SOURCES = """
FILE is a topology.conf, what `scontrol show topology`, `ibnetdiscover` or `nvidia-smi topo -m` printed, NetQ's
JSON, a description of ours in YAML, or names of nodes; `-` is standard input. Several make one fabric. Without one
Slurm is asked.
"""
_GROUP_EPILOG = (
    _SOURCES
    + """
\b
Examples:
  deeplink topology show                            what Slurm knows
  ibnetdiscover | deeplink topology check -         the InfiniBand fabric, cable by cable
  deeplink topology export fabric.yaml -o /etc/slurm/topology.conf
"""
)
_STYLES = {
    DeviceHealth.OK: "green",
    DeviceHealth.UNKNOWN: "dim",
    DeviceHealth.DEGRADED: "yellow",
    DeviceHealth.DOWN: "bold red",
}
_BAD = {DeviceHealth.DEGRADED, DeviceHealth.DOWN}
_FORMATS = ("slurm", "ibnetdiscover", "netq", "yaml", "names", "nvidia-smi")


@click.group("topology", epilog=_GROUP_EPILOG)
def command() -> None:
    """Discover, draw, check and export the fabric the nodes hang on."""


@dataclass(frozen=True, slots=True)
class _Sources:
    files: tuple[Path, ...]
    format: str | None
    inside: tuple[str, ...]
    storage: tuple[str, ...]

    def read(self, *, say: bool = True) -> Reading:
        """Return the fabric; say on standard error what is wrong with it."""
        from deeplink.ops.topology_reading import read_all

        reading = read_all(self.files, self.format, self.inside, self.storage)
        if say:
            _say(reading.findings, err=True)
        return reading


_FILE = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
_sources = grouped(
    "sources",
    _Sources,
    click.argument("files", nargs=-1, metavar="[FILE]...", type=_FILE),
    option("--format", "The format of all FILEs. [default: seen]", type=click.Choice(_FORMATS)),
    option(
        "--inside NODES=FILE",
        "`nvidia-smi topo -m` of some nodes. As a FILE it counts for all. Repeatable.",
        multiple=True,
    ),
    option(
        "--storage PATTERN",
        "Adapters (`oss* mlx5_*`) that lead to storage, in ibnetdiscover's output. Repeatable.",
        multiple=True,
    ),
)


@command.command(
    epilog=_SOURCES
    + """
\b
Examples:
  deeplink topology discover                           ask Slurm
  deeplink topology discover plane-*.ibnet -o fabric.json
  deeplink topology discover fabric.out --inside 'n[0-7]=topo.txt' --json | jq .switches
"""
)
@_sources
@path_option("-o --output", "Write the graph to a file.", dir_okay=False)
@json_option("Print the graph as JSON (which `discover` reads again).")
def discover(*, sources: _Sources, output: Path | None, as_json: bool) -> None:
    """Find out what the nodes hang on, and print or write it; fails where nothing is found."""
    import json

    from deeplink.scheduler.topology.sources.document import document_of

    if str(output) == "-":
        output, as_json = None, True
    network = sources.read().network
    found = bool(network.nodes)
    text = json.dumps(document_of(network), indent=1) + "\n"
    # A graph of nothing is written over no good one.
    if output is not None and found:
        write_output(output, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        click.echo(_summary(network) + (f"; written to {output}" if output and found else ""))
    if not found:
        click.echo("no node was found" + ("; nothing is written" if output else ""), err=True)
        raise click.exceptions.Exit(1)


@command.command(
    epilog=_SOURCES
    + """
\b
Examples:
  deeplink topology show
  deeplink topology show fabric.out
  deeplink topology show topology.conf --json | jq .tree
"""
)
@_sources
@json_option("Print the tree and the graph as JSON.")
def show(*, sources: _Sources, as_json: bool) -> None:
    """Draw the fabric as a tree, with the health of its cables; fails where nothing is found."""
    from deeplink.scheduler.topology.sources.document import document_of

    network = sources.read().network
    if as_json:
        print_json({"tree": _plain_tree(network), "graph": document_of(network)}, indent=1)
    else:
        click.echo(_summary(network))
        _draw(network)
    if not (network.nodes or network.switches):
        raise click.exceptions.Exit(1)


@command.command(
    epilog=_SOURCES
    + """
Exit code 0: nothing to mend; 1: there is, or it cannot be found out (Slurm does not answer, say). Notes alone
(uneven uplinks, ports without a name, ...) are 0.

\b
Examples:
  deeplink topology check                              Slurm's topology against Slurm's nodes
  deeplink topology check topology.conf --nodes 'n[0-63]'
  ibnetdiscover | deeplink topology check - --slurm --json
"""
)
@_sources
@option("--nodes SET", "The nodes there should be (`n[0-63]`).")
@flag("--slurm", "Slurm's nodes are those there should be.", name="ask_slurm")
@json_option("Print the findings as JSON.")
def check(*, sources: _Sources, nodes: str | None, ask_slurm: bool, as_json: bool) -> None:
    """List what is wrong with the fabric: duplicates, missing and unknown nodes, loose parts, degraded cables."""
    from deeplink.scheduler.topology.graph import checked

    cluster, whose = _cluster(nodes, ask_slurm=ask_slurm or not (sources.files or nodes is not None))
    reading = sources.read(say=False)
    findings = sorted(
        dict.fromkeys([*reading.findings, *checked(reading.network, cluster, whose)]),
        key=lambda finding: -finding.severity,
    )
    problems = sum(finding.severity > Severity.NOTE for finding in findings)
    if as_json:
        listed = [
            {
                "kind": finding.check,
                "problem": finding.severity > Severity.NOTE,
                "source": finding.where,
                "line": finding.line,
                "text": finding.text,
            }
            for finding in findings
        ]
        print_json({"problems": problems, "findings": listed}, indent=1)
    else:
        _say(findings, err=False)
        notes = len(findings) - problems
        click.echo(f"{_summary(reading.network)}: {counted(problems, 'problem')}, {counted(notes, 'note')}")
    if problems:
        raise click.exceptions.Exit(1)


@command.command(
    epilog=_SOURCES
    + """
\b
Examples:
  ibnetdiscover | deeplink topology export - -o topology.conf
  deeplink topology export fabric.yaml | diff /etc/slurm/topology.conf -
"""
)
@_sources
@path_option("-o --output", "Write to a file, whole or not at all.", dir_okay=False)
def export(*, sources: _Sources, output: Path | None) -> None:
    """Write the fabric as Slurm's topology.conf (topology/tree), to standard output or a file."""
    from deeplink.scheduler.topology.sources.slurm_topology import topology_conf

    network = sources.read().network
    text = topology_conf(network)
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    write_output(output, text)
    click.echo(f"{_summary(network)}; written to {output}")


def _cluster(nodes: str | None, *, ask_slurm: bool) -> tuple[tuple[NodeName, ...] | None, str]:
    """Return the nodes that there should be, and who says so."""
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold

    if nodes is not None and ask_slurm:
        raise click.UsageError("give --nodes or --slurm, not both")
    if nodes is not None:
        try:
            wanted = unfold(nodes)
        except NodeSetError as problem:
            raise click.UsageError(f"--nodes: {problem}") from problem
        if not wanted:
            raise click.UsageError("--nodes names no node")
        return wanted, "--nodes"
    return (tuple(row.name for row in Slurm().nodes()), "Slurm") if ask_slurm else (None, "")


def _say(findings: Sequence[Finding], *, err: bool) -> None:
    for finding in findings:
        click.echo(f"{'problem' if finding.severity > Severity.NOTE else 'note':8}{finding}", err=err)


def _summary(network: Network) -> str:
    tiers = Counter(tier(level) for level in sorted(switch.level for switch in network.switches.values()))
    gpus = sum(len(node.inside.gpus) for node in network.nodes.values() if node.inside)
    parts = [counted(len(network.nodes), "node"), *([counted(gpus, "GPU")] if gpus else [])]
    parts += [counted(count, name) for name, count in tiers.items()]
    cables = sum(len(link.cables) for link in network.links)
    return ", ".join([*parts, *([counted(cables, "cable")] if cables else [])])


def _draw(network: Network) -> None:
    from rich.text import Text
    from rich.tree import Tree

    from deeplink.scheduler.slurm.nodeset import fold
    from deeplink.scheduler.topology.graph import tree_of

    out, tree = console(), tree_of(network)
    up = _uplinks(network)
    for root in tree.roots:
        drawing = Tree(_label(root, up), guide_style="dim")
        # Not by recursion: what people write may be as deep as they like.
        waiting = [(root, drawing)]
        while waiting:
            branch, place = waiting.pop()
            _hang(place, branch, network, up)
            waiting.extend((below, place.add(_label(below, up))) for below in branch.below)
        out.print(drawing)
    if tree.loose:
        out.print(Text(f"on no switch: {fold(tree.loose)}"))
    for inside, names in network.insides():
        out.print(Text(f"in {fold(names)}: {printable(_inside_text(inside))}"))


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
    from rich.text import Text

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
    from rich.text import Text

    cables = [cable for link in links for cable in link.cables]
    rates = Counter(cable.gbps for cable in cables if cable.gbps is not None)
    by_rate = " + ".join(f"{count} x {gbps:g} Gb/s" for gbps, count in sorted(rates.items(), reverse=True))
    text = Text(by_rate or counted(len(cables), "cable"), style="not bold")
    bad = Counter(cable.health for cable in cables if cable.health in _BAD)
    if bad:
        for health, count in bad.items():
            text.append(f" {count} {health.value}", style=_STYLES[health])
    elif rates:
        text.append(" ok", style=_STYLES[DeviceHealth.OK])
    return text


def _hang(place: Tree, branch: Branch, network: Network, up: Mapping[str, list[FabricLink]]) -> None:
    """Put below a branch its bad cables and its nodes: bad ones one by one, others that are alike in one line."""
    from rich.text import Text

    from deeplink.scheduler.slurm.nodeset import fold

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
        shown = cables.plain if links and any(link.gbps is not None for link in links) else ""
        alike.setdefault((shown, node.domain), []).append(name)
    for (cables_told, domain), names in alike.items():
        label = Text(fold(names)).append(f" ({counted(len(names), 'node')}")
        label.append(f", NVLink domain {printable(domain)})" if domain else ")")
        if cables_told:
            label.append(f"  each {cables_told}", style="dim")
        place.add(label)


def _bad_cables(place: Tree, links: Iterable[FabricLink]) -> None:
    from rich.text import Text

    from deeplink.scheduler.topology.graph import cable_text

    for link in links:
        for cable in link.cables:
            if cable.health in _BAD:
                said = f"{cable.health.value}: {printable(cable_text(link, cable))}"
                place.add(Text(said, style=_STYLES[cable.health]))


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


def _plain_tree(network: Network) -> dict[str, Any]:
    """Return the branches from the roots down, each with the name of the one above."""
    from deeplink.scheduler.topology.graph import tree_of

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
    known = [cable.gbps for cable in cables if cable.gbps is not None]
    return {"cables": len(cables), "gbps": sum(known) if known else None, "health": dict(health)}
