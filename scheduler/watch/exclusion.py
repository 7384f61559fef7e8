"""Which nodes a job that starts again is kept off: few, known, for no longer than there is reason to; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.slurm.parse import JobPlace, NodeRow
    from deeplink.scheduler.watch.records import NodeRecord
    from deeplink.types import NodeName

KEPT_OFF_S = 3_600.0
"""A suspicion against a node that nothing has confirmed is forgotten after so long."""
LOOKED_AT_S = 60.0
"""What a node's agent says so long after the suspicion is about the node as it is since."""
LEAST = 4
"""So many nodes may be excluded in a partition however small, as far as the job could still start."""


def still_suspected(
    since: Mapping[NodeName, float], told: Mapping[NodeName, NodeRecord], now_unix: float
) -> tuple[NodeName, ...]:
    """Return the nodes that an earlier restart excluded and this one does, too; the newest suspicion first.

    Not those whose agent has been heard since without anything to find fault with, nor any after an hour.
    """

    def cleared(name: NodeName, unix: float) -> bool:
        node = told.get(name)
        heard = node is not None and node.seen_unix - node.silent_s > unix + LOOKED_AT_S
        return node is not None and heard and all(finding.severity in _HARMLESS for finding in node.health)

    kept = [name for name, unix in since.items() if now_unix - unix < KEPT_OFF_S and not cleared(name, unix)]
    return tuple(sorted(kept, key=lambda name: (-since[name], name)))


_HARMLESS = frozenset({Severity.UNKNOWN, Severity.OBSERVE})


def bounded(
    wanted: Iterable[NodeName],
    place: JobPlace,
    partition: AbstractSet[NodeName],
    nodes: Mapping[NodeName, NodeRow],
) -> tuple[NodeName, ...]:
    """Return as many of the nodes, the first ones first, as may be excluded.

    A tenth of the partition at most, or four nodes where that is more, and never so many that what is left of the
    nodes in service would be too few for the job. Names that the cluster does not know are left out.

    Args:
        wanted: whom to exclude, without the user's own exclusions.
        place: what the job asks for.
        partition: the nodes it may run on.
        nodes: all nodes of the cluster.
    """
    known = [name for name in dict.fromkeys(wanted) if name in nodes]
    most = max(LEAST, len(partition) // 10)
    serving = {name for name in partition if name in nodes and not (nodes[name].down or nodes[name].drained)}
    room = len(serving - {*place.excluded}) - place.nodes
    kept: list[NodeName] = []
    for name in known:
        costs = name in serving and name not in place.excluded
        if len(kept) < most and (not costs or room > 0):
            kept.append(name)
            room -= costs
    return tuple(kept)


def required_without(place: JobPlace, excluded: AbstractSet[NodeName]) -> tuple[NodeName, ...] | None:
    """Return what of the nodes that a job must run on to ask for still; None where that need not change.

    A list of all its nodes is a wish of the day it was submitted, and binds it to where it ran: all of it goes. Of
    a shorter one, which only its user can have meant, the excluded nodes go.
    """
    if not excluded & {*place.required}:
        return None
    rest = tuple(name for name in place.required if name not in excluded)
    return rest if len(place.required) < place.nodes else ()
