"""Which nodes a job that starts again is kept off: few, known, for no longer than there is reason to; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import HealthSeverity

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


_HARMLESS = frozenset({HealthSeverity.UNKNOWN, HealthSeverity.OBSERVE})


def bounded(
    wanted: Iterable[NodeName],
    place: JobPlace,
    partition: AbstractSet[NodeName],
    nodes: Mapping[NodeName, NodeRow],
    silent: AbstractSet[NodeName] = frozenset(),
) -> tuple[NodeName, ...]:
    """Return as many of the nodes, the first ones first, as may be excluded.

    Of those that could serve: a tenth of the partition at most, or four nodes where that is more, never so many
    that too few would be left for the job. Nodes that do not answer, or that Slurm has given up, take no room, so
    that a whole leaf that is cut off is left out. Names that the cluster does not know are not passed on.

    Args:
        wanted: whom to exclude, without the user's own exclusions.
        place: what the job asks for.
        partition: the nodes it may run on.
        nodes: all nodes of the cluster.
        silent: nodes that do not answer now.
    """
    lost = {name for name, row in nodes.items() if row.down or row.drained or name in silent}
    serving = partition & nodes.keys() - lost - {*place.excluded}
    room = min(max(LEAST, len(partition) // 10), len(serving) - place.nodes)
    kept: list[NodeName] = []
    for name in dict.fromkeys(wanted):
        costs = name in serving
        if name in nodes and (not costs or room > 0):
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
