"""Which nodes a job that starts again is kept off: few, known, and only while there is reason to; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.finding import Severity
from deeplink.scheduler.slurm.nodeset import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.records import NodeRecord
    from deeplink.scheduler.slurm.parse import JobPlace, NodeRow

KEPT_OFF_S = 3_600.0  # A suspicion against a node that nothing has confirmed is forgotten after so long
LOOKED_AT_S = 60.0  # what a node's agent says so long after the suspicion is about the node as it is since
LEAST = 4  # so many nodes may be excluded in a partition however small, as far as the job could still start


def still_suspected(
    since: Mapping[NodeName, float], told: Mapping[NodeName, NodeRecord], now_unix: float
) -> tuple[NodeName, ...]:
    """Return the nodes that an earlier restart excluded and this one does, too; the newest suspicion first."""
    # Not those whose agent has been heard since without anything to find fault with, nor any after an hour.

    def cleared(name: NodeName, unix: float) -> bool:
        node = told.get(name)
        heard = node is not None and node.seen_unix - node.silent_s > unix + LOOKED_AT_S
        return node is not None and heard and all(finding.severity in _HARMLESS for finding in node.health)

    kept = [name for name, unix in since.items() if now_unix - unix < KEPT_OFF_S and not cleared(name, unix)]
    return tuple(sorted(kept, key=lambda name: (-since[name], name)))


_HARMLESS = frozenset({Severity.UNKNOWN, Severity.NOTE})


def bounded(
    wanted: Iterable[NodeName],
    place: JobPlace,
    partition: AbstractSet[NodeName],
    nodes: Mapping[NodeName, NodeRow],
    silent: AbstractSet[NodeName] = frozenset(),
) -> tuple[NodeName, ...]:
    """Return as many of the nodes, the first ones first, as may be excluded."""
    # Of those that could serve: a tenth of the partition at most, or four nodes where that is more, never so many
    # that too few would be left for the job. Nodes that do not answer, or that Slurm has given up, take no room,
    # so that a whole leaf that is cut off is left out. Names that the cluster does not know are not passed on.
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
    """Return what of the nodes that a job must run on to ask for still; None where that need not change."""
    # A list of all its nodes is a hint of the day it was submitted, and binds it to where it ran: all of it goes.
    # Of a shorter one, which only its user can have meant, the excluded nodes go.
    if not excluded & {*place.required}:
        return None
    rest = tuple(name for name in place.required if name not in excluded)
    return rest if len(place.required) < place.nodes else ()


def release_changes(
    place: JobPlace, wanted: AbstractSet[NodeName], required: tuple[NodeName, ...] | None
) -> dict[str, str]:
    """Return what to change, in scontrol's words, about the nodes a job may not, and must, start on."""
    changes = {} if wanted == {*place.excluded} else {"ExcNodeList": fold(sorted(wanted)) if wanted else ""}
    if required is not None:  # it starts nowhere if it must run on a node that it must not run on
        changes["ReqNodeList"] = fold(required) if required else ""
    return changes
