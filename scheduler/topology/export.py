"""The graph as Slurm's topology.conf for topology/tree; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import fold_for_files
from deeplink.scheduler.topology.tree import tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.topology.network import Network
    from deeplink.scheduler.topology.tree import Branch


class NothingToExportError(DeepLinkError):
    """No node hangs on any switch, so topology.conf would say nothing, and Slurm would not start with it."""

    def __init__(self) -> None:
        super().__init__(
            "no node hangs on a switch: there is nothing to write",
            remedy="Without a topology Slurm needs no TopologyPlugin; `deeplink topology check` tells more.",
        )


def topology_conf(network: Network) -> str:
    """Return topology.conf: leaves with their nodes, then what joins them; every node once, as Slurm needs it.

    Switches that are one branch of the tree (all spines that every leaf reaches, the leaves of one host's rails)
    are one line under the name of the first; what was left out is said in comments.

    Raises:
        NothingToExportError: no node hangs on a switch.
    """
    tree = tree_of(network)
    lines = ["# Written by `deeplink topology export`."]
    named = {*network.switches, *(branch.name for branch in tree.roots)}
    branches = [branch for branch in tree.walk() if branch.populated]
    if not branches:
        raise NothingToExportError
    for branch in sorted(branches, key=lambda branch: branch.level):
        lines.extend(_lines(branch, network, named))
    empty = [branch.name for branch in tree.walk() if not branch.populated]
    if empty:
        lines.append(f"# Without nodes, and left out: {', '.join(empty)}")
    if tree.loose:
        lines.append(f"# On no switch: {fold_for_files(tree.loose)}")
    return "\n".join(lines) + "\n"


def _lines(branch: Branch, network: Network, named: set[str]) -> Iterator[str]:
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
