"""What came may pass by itself: is it over? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.rules.sickness import counting

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def is_over(kind: IncidentKind, node: NodeName | None, leaf: str, sight: Snapshot, policy: WatchPolicy) -> bool:  # noqa: PLR0911 - one for each kind
    """Whether what was judged before, and is not judged now, is seen to be over; not seen is not over."""
    there = sight.nodes.get(node) if node else None
    if node and there is None:
        return True  # Slurm knows no such node any more
    match kind:
        case IncidentKind.NODE_SICK:
            return there is not None and _tells(there, policy) and not counting(there, storage_frozen=False)
        case IncidentKind.SLURMD_LOST:
            return there is not None and not there.down and _has_slurmd(there)
        case IncidentKind.STORAGE_FROZEN:
            return any(_tells(one, policy) for one in sight.nodes.values()) or bool(sight.jobs)
        case IncidentKind.GRES_LEAKED:
            return not any(one.leaked_gpus for one in sight.nodes.values())
        case IncidentKind.SWITCH_SUSPECT:
            below = [one for one in sight.nodes.values() if one.leaf == leaf]
            return all(_has_slurmd(one) and not one.down and not one.of_leaf for one in below)
        case _:
            return True


def _tells(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    return node.heard_s is not None and node.heard_s < policy.told_s


def _has_slurmd(node: NodeSnapshot) -> bool:
    return node.slurmd is ProbeResult.ANSWERS or (node.slurmd is ProbeResult.UNKNOWN and node.responding)
