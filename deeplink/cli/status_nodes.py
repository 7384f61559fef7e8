"""The nodes of one job on the part of the switch tree that they hang on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.topology.graph import Fabric, Path
    from deeplink.scheduler.view.picture import JobNode

MOST_LEAVES = 24
MOST_TROUBLED = 12


def drawn(seats: Sequence[JobNode], fabric: Fabric) -> Tree | Text:
    """Return the tree above a job's nodes; nodes of a leaf whose ranks follow one another share a line."""
    leaves: dict[Path, list[JobNode]] = {}
    for seat in seats:
        leaves.setdefault(fabric.path(seat.node), []).append(seat)  # type: ignore[arg-type] # names are NodeNames
    if set(leaves) == {()}:
        tree = Tree(Text("on no known switch", style="dim"), guide_style="dim")
        _hang(tree, seats)
        return tree
    common = _common([path for path in leaves if path])
    root = Tree(Text(".".join(common) or "fabric", style="bold"), guide_style="dim")
    places: dict[Path, Tree] = {common: root}
    shown = list(leaves.items())[:MOST_LEAVES]
    for path, below in shown:
        _hang(_place(path, places, common) if path else root.add(Text("on no known switch", style="dim")), below)
    rest = [seat for _, below in list(leaves.items())[MOST_LEAVES:] for seat in below]
    if rest:
        more = root.add(Text(f"{len(leaves) - MOST_LEAVES} more leaves with {counted(len(rest), 'node')}"))
        for seat in [seat for seat in rest if seat.trouble][:MOST_TROUBLED]:
            more.add(_line([seat]))
    return root


def on_leaves(seats: Sequence[JobNode], fabric: Fabric) -> str:
    """Return on how many leaves the ranks are, as the end of a sentence; empty where that is not known."""
    paths = {fabric.path(seat.node) for seat in seats if not seat.spare}  # type: ignore[arg-type]
    if not paths or () in paths:
        return ""
    return f"; its ranks are on {counted(len(paths), 'leaf')}"


def _common(paths: Sequence[Path]) -> Path:
    """Return the lowest switch that all hang below (with one leaf: that leaf), as the path to it."""
    common = paths[0]
    for path in paths[1:]:
        same = 0
        while same < min(len(common), len(path)) and common[same] == path[same]:
            same += 1
        common = common[:same]
    return common


def _place(path: Path, places: dict[Path, Tree], root: Path) -> Tree:
    if path in places:
        return places[path]
    if len(path) <= len(root):
        return places[root]
    above = _place(path[:-1], places, root)
    places[path] = above.add(Text(printable(path[-1]), style="bold"))
    return places[path]


def _hang(place: Tree, seats: Sequence[JobNode]) -> None:
    """Put seats below a switch: those with trouble one by one, others that go on from one another in one line."""
    row: list[JobNode] = []
    for seat in seats:
        if row and (seat.trouble or not _goes_on(row[-1], seat)):
            place.add(_line(row))
            row = []
        if seat.trouble:
            place.add(_line([seat]))
        else:
            row.append(seat)
    if row:
        place.add(_line(row))


def _goes_on(before: JobNode, seat: JobNode) -> bool:
    if before.spare != seat.spare:
        return False
    if before.ranks is None or seat.ranks is None:
        return before.ranks is None and seat.ranks is None
    return seat.ranks[0] == before.ranks[1] + 1


def _line(seats: Sequence[JobNode]) -> Text:
    names = [seat.node for seat in seats]
    # Folded the order is lost, which few names can keep.
    told = ", ".join(names) if len(names) <= 4 else fold(names)  # noqa: PLR2004
    first, last = seats[0].ranks, seats[-1].ranks
    text = Text(told)
    if first and last:
        text.append(f"  rank {first[0]}" if first[0] == last[1] else f"  ranks {first[0]}-{last[1]}", style="cyan")
    elif seats[0].spare:
        text.append("  spare", style="dim")
    if seats[0].trouble:
        text.append(f"  {printable(seats[0].trouble)}", style="bold red")
    return text
