"""Nothing but names: what a cloud gives, or `sinfo -h -N -o %N`. Nobody knows what parts the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.topology.finding import TopologyFindingKind
from deeplink.scheduler.topology.network import Node
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, Reading
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.types import NodeName


def read_names(text: str, source: str) -> Reading:
    """Read names of nodes, folded or not, on one line or many; `#` begins a comment."""
    gathering = GraphBuilder(source)
    lines: dict[NodeName, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for word in line.partition("#")[0].split():
            again: dict[int, list[NodeName]] = {}
            for name in gathering.names(word.strip(","), number):
                if lines.setdefault(name, number) != number:
                    again.setdefault(lines[name], []).append(name)
            for earlier, names in again.items():
                text = f"{names[0]} is" if len(names) == 1 else f"{counted(len(names), 'name')} of it are"
                gathering.say(TopologyFindingKind.DUPLICATE, f"{text} also on line {earlier}", number)
    return _flat(gathering, lines)


def read_node_names(names: Iterable[NodeName], source: str) -> Reading:
    """Make the graph of nodes of which nothing but the names is known."""
    return _flat(GraphBuilder(source), names)


def _flat(gathering: GraphBuilder, names: Iterable[NodeName]) -> Reading:
    gathering.nodes.update({name: Node(name) for name in names})
    if gathering.nodes:
        gathering.say(
            TopologyFindingKind.FLAT,
            f"{counted(len(gathering.nodes), 'node')} without a topology: all count as neighbours",
        )
    return gathering.reading()
