"""Which of the nodes we drained may come back? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import PROCESSES, may_return
from deeplink.scheduler.watch.records import HealthFinding, HealthSeverity, IncidentKind
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot, WatchPolicy


def returning(sight: Snapshot, policy: WatchPolicy) -> list[Verdict]:
    """Return the nodes that we drained and that are well again: by policy, or given up in their leaf's name."""
    return [
        Verdict(
            kind=IncidentKind.NODE_BACK,
            remedy=Remedy.RESUME,
            reasons=(f"we drained it; it answers for {node.answering_s:.0f} s and is registered", *_checks(node)),
            node=name,
        )
        for name, node in sorted(sight.nodes.items())
        if may_return(node, policy) and _is_back(node, policy)
    ]


def _is_back(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    if not node.drained or node.answering_s < policy.resume_s:
        return False
    needed_s = policy.resume_sick_s if node.of_leaf or node.sick else policy.resume_s
    if any(map(bars_return, node.findings)):
        return False
    # Where a standing agent is known, its own word is needed, and has to last.
    return (node.answering_s if node.attended_s is None else node.well_s) >= needed_s


def bars_return(finding: HealthFinding) -> bool:
    """Whether a node with this finding is not to come back: it is grave, or what was left there still runs."""
    if finding.severity is HealthSeverity.UNKNOWN:
        return False
    return finding.severity is not HealthSeverity.OBSERVE or finding.check == PROCESSES


def _checks(node: NodeSnapshot) -> tuple[str, ...]:
    return (f"its checks find nothing against it for {node.well_s:.0f} s",) if node.attended_s is not None else ()
