"""Where a job's samples come from as it begins, from how much of its data its nodes hold; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.model.job import Read

if TYPE_CHECKING:
    from deeplink.scheduler.model.constants import ReadSpeeds


def reads_of(known: ReadSpeeds, held: float, nodes: int) -> tuple[Read, ...] | None:
    """Return the places that a job's samples are read from, and the share of each.

    Samples are drawn evenly from all the data, and what the nodes hold is dealt over them evenly: a node holds one
    of `nodes` parts of it itself, and reads the others from its peers. What none of them holds comes from the
    source; so it is until the job has brought it.

    Args:
        known: how fast each place is.
        held: the share of the data that the nodes hold, together.
        nodes: how many there are.

    Returns:
        None where a place that such a job may read from was not timed: of two choices of nodes one cannot be
        compared with the other then.
    """
    if known.local is None or known.source is None or (known.peer is None and nodes > 1):
        return None
    # As fast as the slower limit of the two lets it.
    crowded = known.source_of_all / nodes < known.source
    source = Read(
        name="source",
        share=1.0 - held,
        bandwidth=known.source_of_all if crowded else known.source,
        shared=crowded,
    )
    mine = Read(name="local", share=held / nodes, bandwidth=known.local)
    if known.peer is None:
        return mine, source
    return mine, Read(name="peer", share=held - mine.share, bandwidth=known.peer), source
