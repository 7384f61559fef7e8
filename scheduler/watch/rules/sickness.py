"""Which nodes are sick by their own checks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import MOUNT, SLURMD
from deeplink.scheduler.watch.records import HealthSeverity, IncidentKind
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import NodeName

_REMEDIES = {HealthSeverity.COMMENT: Remedy.COMMENT, HealthSeverity.DRAIN: Remedy.DRAIN}
"""Nothing else makes a node sick: what is merely observed is in its record, for who looks at it."""


def sick_nodes(
    sight: Snapshot, policy: WatchPolicy, elsewhere: AbstractSet[NodeName | None], *, storage_frozen: bool
) -> list[Verdict]:
    """Return what the nodes' checks found, leaving out nodes that are `elsewhere`: another verdict's."""
    found = {
        name: those
        for name, node in sorted(sight.nodes.items())
        if name not in elsewhere and not node.down and (those := counting(node, storage_frozen=storage_frozen))
    }
    grave = {name for name, those in found.items() if those[0].severity is HealthSeverity.DRAIN}
    held = _brake(grave, sight, policy)
    return [_verdict(sight.nodes[name], those, held) for name, those in found.items()]


def counting(node: NodeSnapshot, *, storage_frozen: bool) -> tuple[HealthFinding, ...]:
    """Return the findings that speak of the node itself, the gravest first.

    A slurmd that is gone is a verdict of its own, a mount stuck everywhere is the storage's; what a check
    could not tell is never bad.
    """
    apart = {SLURMD, MOUNT} if storage_frozen else {SLURMD}
    known = [one for one in node.findings if one.severity in _REMEDIES and one.check not in apart]
    ladder = list(_REMEDIES)
    return tuple(sorted(known, key=lambda one: -ladder.index(one.severity)))


def _brake(grave: set[NodeName], sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """A site's check gone wrong finds fault with every node, one after another: it must not drain them all."""
    already = {name for name, node in sight.nodes.items() if node.sick}
    count, most = len(grave | already), max(policy.most_sick, len(sight.nodes) // 10)
    if count <= most:
        return ()
    return (f"brake: {count} nodes sick at once are more than the {most} believed; is a check at fault?",)


def _verdict(node: NodeSnapshot, findings: tuple[HealthFinding, ...], held: tuple[str, ...]) -> Verdict:
    """A drain that is braked, or that an administrator made already, leaves the milder remedy: the comment."""
    reasons = tuple(f"{one.check} ({one.severity}): {one.problem}" for one in findings)
    remedy = _REMEDIES[findings[0].severity]
    if remedy is Remedy.DRAIN and (held or (node.drained and not node.ours)):
        remedy, reasons = Remedy.COMMENT, (*reasons, *held)
    return Verdict(kind=IncidentKind.NODE_SICK, remedy=remedy, reasons=reasons, node=node.name)
