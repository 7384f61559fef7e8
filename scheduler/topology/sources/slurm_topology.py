"""Slurm's own view: topology.conf, read and written, and what `scontrol show topology` says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import fold_for_files
from deeplink.scheduler.slurm.parse import SwitchRow, parse_switch, parse_topology
from deeplink.scheduler.topology.graph import Fabric, fabric_of, natural, tree_of
from deeplink.scheduler.topology.network import Cable, Node, Switch, TopologyCheck
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading, is_name, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deeplink.core.types import NodeName
    from deeplink.scheduler.topology.graph import Branch
    from deeplink.scheduler.topology.network import Network

_SPEED_NOT_GIVEN = 1  # what scontrol prints then
_SETS = ("nodes", "switches")
_KEYS = {"switchname", "blockname", "level", "linkspeed", *_SETS}
_EQUALS = re.compile(r"(?<!\s)\s*=(?:\s+(?!\w+\s*=))?", re.ASCII)
_QUOTED = re.compile(r'="([^"\s]*)"(?!\S)')
_BLOCKS_TOLD = re.compile(r"^(?:Aggregated)?Block(?:Name)?=\S+ BlockIndex=", re.MULTILINE | re.IGNORECASE)
_BLOCK_SETS = ("nodes=", "aggregatedblock=")
Lines = dict[str, int]  # where each switch was named, for messages


def read_slurm(text: str, source: str) -> Reading:
    """Read topology.conf, or a saved `scontrol show topology`; a block (topology/block) counts as a leaf."""
    gathering = GraphBuilder(source)
    if _BLOCKS_TOLD.search(text):
        return _read_blocks(text, gathering)
    rows: dict[str, SwitchRow] = {}
    lines: Lines = {}
    levels_told = False
    for number, line in _logical_lines(text):
        row = _row(line, number, gathering)
        if row is None:
            continue
        if row.name in rows:
            gathering.duplicate(f"switch {row.name} is also on line {lines[row.name]}", number)
            continue
        levels_told = levels_told or "level=" in line.casefold()
        rows[row.name], lines[row.name] = row, number
    _gather(rows.values(), gathering, lines, levels_told=levels_told)
    return gathering.reading()


def _read_blocks(text: str, gathering: GraphBuilder) -> Reading:
    """Read what scontrol says of topology/block, which has lines of its own for blocks that are joined."""
    good: list[str] = []
    for number, line in _logical_lines(text):
        sets = [word.partition("=")[2] for word in line.split() if word.casefold().startswith(_BLOCK_SETS)]
        if not all(gathering.affordable(value, number) for value in sets):
            continue
        try:
            parse_switch(line)
        except DeepLinkError as problem:
            gathering.unreadable(str(problem)[:200], number)
        else:
            good.append(line)
    gathering.say(TopologyCheck.TAKEN, "blocks of topology/block are taken as leaf switches", 1)
    _gather(parse_topology("\n".join(good)), gathering, {}, levels_told=True)
    return gathering.reading()


def read_switches(rows: Iterable[SwitchRow], source: str) -> Reading:
    """Make the graph of what slurmctld said."""
    gathering = GraphBuilder(source)
    _gather(list(rows), gathering, {}, levels_told=True)
    return gathering.reading()


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield what Slurm takes for one line, joined at backslashes and without comments, with its first's number."""
    begun, first = "", 0
    for number, raw in enumerate(text.split("\n"), start=1):
        # Slurm: a `#` ends the line unless a backslash stands before it; topology files have no use for that.
        line = raw.partition("#")[0].rstrip()
        first = first or number
        if line.endswith("\\"):
            begun += line[:-1]  # Slurm puts nothing between: a list of names may go on in the next line
            continue
        if (begun + line).strip():
            yield first, begun + line
        begun, first = "", 0
    if begun.strip():
        yield first, begun


def _row(line: str, number: int, gathering: GraphBuilder) -> SwitchRow | None:
    # Slurm takes blanks around `=` (not before another setting: that is an empty value), and quotes.
    line = _QUOTED.sub(r"=\1", _EQUALS.sub("=", line))
    settings = [(key.casefold(), value) for key, _, value in (word.partition("=") for word in line.split())]
    keys = [key for key, _ in settings]
    if keys == ["blocksizes"]:
        return None
    if "blockname" in keys:
        gathering.say(TopologyCheck.TAKEN, "a block of topology/block is taken as a leaf switch", number)
        line = re.sub(r"(?i)\bblockname=", "SwitchName=", line)
    unknown = [key for key in keys if key not in _KEYS]
    if unknown:
        gathering.unreadable(f"{short(unknown[0])} is not a setting of a switch", number)
    if len(set(keys)) < len(keys):
        gathering.unreadable("a setting is there twice", number)
        return None
    if not all(gathering.affordable(value, number) for key, value in settings if key in _SETS):
        return None
    try:
        row = parse_switch(line, level=None if "level" in keys else 0)
    except (DeepLinkError, ValueError) as problem:  # ValueError: a number of thousands of digits
        gathering.unreadable(str(problem)[:200], number)
        return None
    bad = [name for name in (row.name, *row.nodes, *row.switches) if not is_name(name)]
    if bad:
        gathering.unreadable(f"{short(bad[0])} is no name", number)
    if not is_name(row.name):
        return None
    speed = row.link_speed
    if not 0 <= speed < 2**32:  # Slurm keeps it in 32 bits
        gathering.unreadable("LinkSpeed is a whole number from 0 to 4294967295", number)
        speed = _SPEED_NOT_GIVEN
    nodes, switches = tuple(filter(is_name, row.nodes)), tuple(filter(is_name, row.switches))
    return replace(row, link_speed=speed, nodes=nodes, switches=switches)


def _gather(rows: Iterable[SwitchRow], gathering: GraphBuilder, lines: Lines, *, levels_told: bool) -> None:
    named = {row.name: row for row in rows}
    below: dict[str, tuple[str, ...]] = {}
    for row in named.values():
        unknown = [child for child in row.switches if child not in named]
        if unknown:
            text = f"switch {row.name} is above {', '.join(unknown[:5])}, which no line describes"
            gathering.say(TopologyCheck.UNKNOWN, text, lines.get(row.name, 0))
        below[row.name] = tuple(child for child in row.switches if child in named)
    levels, looped = gathering.levels_of(below, lines)
    for name in looped:
        below[name] = tuple(child for child in below[name] if child not in looped)
    for row in named.values():
        speed = row.link_speed if row.link_speed != _SPEED_NOT_GIVEN else None
        gathering.switches[row.name] = Switch(row.name, levels[row.name], link_speed=speed)
        for child in below[row.name]:
            gathering.connect(child, row.name, host=False, cables=[Cable()])
    _hang_nodes(named.values(), gathering, lines, levels_told=levels_told)


def _hang_nodes(rows: Iterable[SwitchRow], gathering: GraphBuilder, lines: Lines, *, levels_told: bool) -> None:
    at: dict[NodeName, str] = {}
    # Of a circle no switch has a level of its own: what has no switches below is the leaf.
    for row in sorted(rows, key=lambda row: (gathering.switches[row.name].level, bool(row.switches))):
        own = row.nodes
        if row.switches and not levels_told and own:
            text = f"switch {row.name} has nodes and switches; Slurm takes one or the other"
            gathering.unreadable(text, lines.get(row.name, 0))
        if row.switches and levels_told:
            own = tuple(node for node in own if node not in at)  # scontrol names all nodes below
        again: dict[str, list[NodeName]] = {}
        for node in own:
            if node in at:
                again.setdefault(at[node], []).append(node)
                continue
            at[node] = row.name
            gathering.nodes[node] = Node(node)
            gathering.connect(node, row.name, host=True, cables=[Cable()])
        for other, nodes in again.items():
            listed = ", ".join(sorted(nodes, key=natural)[:5])
            text = f"{listed} of switch {row.name} also on {other}; only the latter counts here"
            gathering.duplicate(text, lines.get(row.name, 0))


def fabric_from_switches(switches: Iterable[SwitchRow]) -> Fabric:
    """Build the fabric from what `scontrol show topology` says."""
    return fabric_of(read_switches(switches, "scontrol show topology").network)


def topology_conf(network: Network) -> str:
    """Return topology.conf: leaves with their nodes, then what joins them; every node once, as Slurm needs it.

    Switches that are one branch of the tree (all spines that every leaf reaches, the leaves of one host's rails)
    are one line under the name of the first; what was left out is said in comments.
    """
    tree = tree_of(network)
    lines = ["# Written by `deeplink topology export`."]
    named = {*network.switches, *(branch.name for branch in tree.roots)}
    branches = [branch for branch in tree.walk() if branch.populated]
    if not branches:
        raise DeepLinkError(
            "no node hangs on a switch: there is nothing to write",
            remedy="Without a topology Slurm needs no TopologyPlugin; `deeplink topology check` tells more.",
        )
    for branch in sorted(branches, key=lambda branch: branch.level):
        lines.extend(_conf_lines(branch, network, named))
    empty = [branch.name for branch in tree.walk() if not branch.populated]
    if empty:
        lines.append(f"# Without nodes, and left out: {', '.join(empty)}")
    if tree.loose:
        lines.append(f"# On no switch: {fold_for_files(tree.loose)}")
    return "\n".join(lines) + "\n"


def _conf_lines(branch: Branch, network: Network, named: set[str]) -> Iterator[str]:
    if len(branch.switches) > 1:
        yield f"# {branch.name} stands for {', '.join(branch.switches)}"
    elif not branch.switches:
        yield f"# {branch.name} is no switch: cables between those below join them"
    below = [one.name for one in branch.below if one.populated]
    if branch.nodes and below:
        # Slurm takes either nodes or switches on a line.
        own = f"{branch.name}-own"
        while own in named:
            own += "-"
        named.add(own)
        yield f"SwitchName={own} Nodes={fold_for_files(branch.nodes)}"
        below.append(own)
    speed = network.switches[branch.name].link_speed if branch.switches else None
    told = f" LinkSpeed={speed}" if speed is not None else ""
    what = f"Switches={fold_for_files(below)}" if below else f"Nodes={fold_for_files(branch.nodes)}"
    yield f"SwitchName={branch.name} {what}{told}"
