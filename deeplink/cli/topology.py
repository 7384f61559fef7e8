"""`deeplink topology`: what the nodes hang on, from whoever knows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.topology.finding import TopologyFinding
    from deeplink.scheduler.topology.network import Network
    from deeplink.types import NodeName

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
_Command = TypeVar("_Command", bound="Callable[..., Any]")
_FORMATS = ("slurm", "ibnetdiscover", "netq", "yaml", "names", "nvidia-smi")


@click.group("topology", epilog=_GROUP_EPILOG)
def command() -> None:
    """Discover, draw, check and export the fabric the nodes hang on."""


def _sources(function: _Command) -> _Command:
    """Give a command the arguments and options that say what to read."""
    files = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
    function = click.option(
        "--storage",
        multiple=True,
        metavar="PATTERN",
        help="Adapters (`oss* mlx5_*`) that lead to storage, in ibnetdiscover's output. Repeatable.",
    )(function)
    function = click.option(
        "--inside",
        multiple=True,
        metavar="NODES=FILE",
        help="`nvidia-smi topo -m` of some nodes. As a FILE it counts for all. Repeatable.",
    )(function)
    function = click.option(
        "--format", "told", type=click.Choice(_FORMATS), help="The format of all FILEs. [default: seen]"
    )(function)
    return click.argument("files", nargs=-1, metavar="[FILE]...", type=files)(function)


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
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the graph to a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the graph as JSON (which `discover` reads again).")
def discover(
    *,
    files: tuple[Path, ...],
    told: str | None,
    inside: tuple[str, ...],
    storage: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Find out what the nodes hang on, and tell or write it; fails where nothing is found."""
    import json

    from deeplink.cli.topology_reading import read_all
    from deeplink.files import write_output
    from deeplink.scheduler.topology.plain import document_of

    if str(output) == "-":
        output, as_json = None, True
    reading = read_all(files, told, inside, storage)
    _say(reading.findings, err=True)
    found = bool(reading.network.nodes)
    text = json.dumps(document_of(reading.network), indent=1) + "\n"
    # A graph of nothing is written over no good one.
    if output is not None and found:
        write_output(output, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        click.echo(_summary(reading.network) + (f"; written to {output}" if output and found else ""))
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
@click.option("--json", "as_json", is_flag=True, help="Print the tree and the graph as JSON.")
def show(
    *, files: tuple[Path, ...], told: str | None, inside: tuple[str, ...], storage: tuple[str, ...], as_json: bool
) -> None:
    """Draw the fabric as a tree, with the health of its cables; fails where nothing is found."""
    import json

    from deeplink.cli.topology_drawing import draw, plain_tree
    from deeplink.cli.topology_reading import read_all
    from deeplink.scheduler.topology.plain import document_of

    reading = read_all(files, told, inside, storage)
    _say(reading.findings, err=True)
    if as_json:
        told_of = {"tree": plain_tree(reading.network), "graph": document_of(reading.network)}
        click.echo(json.dumps(told_of, indent=1))
    else:
        click.echo(_summary(reading.network))
        draw(reading.network)
    if not (reading.network.nodes or reading.network.switches):
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
@click.option("--nodes", metavar="SET", help="The nodes there should be (`n[0-63]`).")
@click.option("--slurm", "ask_slurm", is_flag=True, help="Slurm's nodes are those there should be.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(
    *,
    files: tuple[Path, ...],
    told: str | None,
    inside: tuple[str, ...],
    storage: tuple[str, ...],
    nodes: str | None,
    ask_slurm: bool,
    as_json: bool,
) -> None:
    """List what is wrong with the fabric: duplicates, missing and unknown nodes, loose parts, degraded cables."""
    import json

    from deeplink.cli.topology_reading import read_all
    from deeplink.scheduler.topology.check import checked
    from deeplink.text import counted

    cluster, whose = _cluster(nodes, ask_slurm=ask_slurm or not (files or nodes is not None))
    reading = read_all(files, told, inside, storage)
    findings = sorted(
        dict.fromkeys([*reading.findings, *checked(reading.network, cluster, whose)]),
        key=lambda finding: not finding.kind.problem,
    )
    problems = sum(finding.kind.problem for finding in findings)
    if as_json:
        listed = [
            {
                "kind": finding.kind.value,
                "problem": finding.kind.problem,
                "source": finding.source,
                "line": finding.line,
                "text": finding.text,
            }
            for finding in findings
        ]
        click.echo(json.dumps({"problems": problems, "findings": listed}, indent=1))
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
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file, whole or not at all."
)
def export(
    *,
    files: tuple[Path, ...],
    told: str | None,
    inside: tuple[str, ...],
    storage: tuple[str, ...],
    output: Path | None,
) -> None:
    """Write the fabric as Slurm's topology.conf (topology/tree), to standard output or a file."""
    from deeplink.cli.topology_reading import read_all
    from deeplink.files import write_output
    from deeplink.scheduler.topology.export import topology_conf

    reading = read_all(files, told, inside, storage)
    _say(reading.findings, err=True)
    text = topology_conf(reading.network)
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    write_output(output, text)
    click.echo(f"{_summary(reading.network)}; written to {output}")


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


def _say(findings: Sequence[TopologyFinding], *, err: bool) -> None:
    for finding in findings:
        click.echo(f"{'problem' if finding.kind.problem else 'note':8}{finding}", err=err)


def _summary(network: Network) -> str:
    from collections import Counter

    from deeplink.scheduler.topology.network import tier
    from deeplink.text import counted

    tiers = Counter(tier(level) for level in sorted(switch.level for switch in network.switches.values()))
    gpus = sum(len(node.inside.gpus) for node in network.nodes.values() if node.inside)
    parts = [counted(len(network.nodes), "node"), *([counted(gpus, "GPU")] if gpus else [])]
    parts += [counted(count, name) for name, count in tiers.items()]
    cables = sum(len(link.cables) for link in network.links)
    return ", ".join([*parts, *([counted(cables, "cable")] if cables else [])])
