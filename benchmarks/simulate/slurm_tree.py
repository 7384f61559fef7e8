"""The nodes that Slurm 22.05 chooses with topology/tree and select/cons_tres, as measured; pure.

`benchmarks/scheduler/emulation.py` asks a real slurmctld for its choice in random states and compares; the rules
below are those that gave its answers. It takes one leaf after another until it has enough nodes, of each leaf the
first nodes by name. Which leaf is next:

- Of two leaves the one below a tighter fit is better. To compare them, go up from both until one of the two
  switches has room for what is still wanted, or both hang below the same switch. If both have room, the one with
  less is better; if one has, that one; if none has, the one with more.
- Of all leaves, in the order of topology.conf, one takes the place of the best so far if it is better and no
  farther from the leaves taken already, or nearer and no worse. Farther means more hops, summed over them.

Room above the leaves is counted once, before any leaf is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.simulate.floor import first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulate.floor import Floor


def slurm_choice(floor: Floor, able: int, wanted: int) -> int | None:
    """Return the nodes that Slurm would take, or None where there are too few.

    Args:
        floor: the nodes and switches.
        able: the nodes that can run the job now.
        wanted: how many it asks for.
    """
    if able.bit_count() < wanted:
        return None
    room = [(switch.below & able).bit_count() for switch in floor.switches]
    open_leaves = [leaf for leaf in range(len(floor.leaves)) if room[leaf]]
    hops = [0] * len(floor.leaves)
    chosen = 0
    while True:
        leaf = _next_leaf(floor.above, room, open_leaves, hops, wanted)
        taken = first(floor.leaves[leaf].below & able, wanted)
        chosen |= taken
        wanted -= taken.bit_count()
        if not wanted:
            return chosen
        open_leaves.remove(leaf)
        for other in open_leaves:
            hops[other] += floor.hops(leaf, other)


def _next_leaf(
    above: Sequence[int], room: Sequence[int], leaves: Sequence[int], hops: Sequence[int], wanted: int
) -> int:
    best, *others = leaves
    for leaf in others:
        better = _better(above, room, leaf, best, wanted)
        if (better > 0 and hops[leaf] <= hops[best]) or (better == 0 and hops[leaf] < hops[best]):
            best = leaf
    return best


def _better(above: Sequence[int], room: Sequence[int], one: int, other: int, wanted: int) -> int:
    """Return more than 0 where `one` is better than `other`, 0 where it is as good."""
    while room[one] < wanted and room[other] < wanted and above[one] != above[other]:
        one, other = above[one], above[other]
    if room[one] >= wanted and room[other] >= wanted:
        return room[other] - room[one]
    return room[one] - room[other]
