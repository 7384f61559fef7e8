"""Is it the shared storage? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import MOUNT
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.verdict import Remedy, Verdict
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, WatchPolicy
    from deeplink.types import NodeName


def frozen_storage(
    nodes: Mapping[NodeName, NodeSnapshot], jobs: tuple[JobSnapshot, ...], policy: WatchPolicy
) -> Verdict | None:
    """Return that shared storage is frozen, where nodes or launchers say so at once; None where that is not said.

    One node's stuck mount is that node's. Several at once have one reason, and it is not they: nothing is drained
    or requeued for it, for on every other node it would be the same.
    """
    stuck = sorted(name for name, node in nodes.items() if _stuck(node))
    telling = [node for node in nodes.values() if _tells(node, policy)]
    everywhere = 1 < len(stuck) == len(telling)
    waiting = [job for job in jobs if job.live and IncidentKind.STORAGE_FROZEN in job.told]
    if len(stuck) < policy.most_frozen and not everywhere and not waiting:
        return None
    reasons = []
    if stuck:
        (example, *_) = (one.problem for one in nodes[stuck[0]].findings if one.check == MOUNT)
        where = f"{len(stuck)} of {len(telling)} nodes at once ({listed(stuck)})"
        reasons.append(f"a mount is stuck on {where}: {example}")
    if waiting:
        reasons.append(f"writes hang, say the launchers of {', '.join(job.name for job in waiting)}")
    alone = waiting[0].attempt if len(waiting) == 1 and not stuck else None
    return Verdict(kind=IncidentKind.STORAGE_FROZEN, remedy=Remedy.NOTHING, reasons=tuple(reasons), attempt=alone)


def _tells(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    return bool(node.findings) or (node.heard_s is not None and node.heard_s < policy.told_s)


def _stuck(node: NodeSnapshot) -> bool:
    # Unknown counts here: it does nobody harm to be taken for frozen, and a hanging look is how a freeze shows.
    return any(finding.check == MOUNT for finding in node.findings)
