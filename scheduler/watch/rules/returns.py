"""Which of the nodes we drained may come back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Kind
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import Policy, Sight


def returning(sight: Sight, policy: Policy) -> list[Verdict]:
    """Return the nodes that we drained and that are well again; by policy only."""
    if not policy.resume:
        return []
    return [
        Verdict(
            kind=Kind.NODE_BACK,
            remedy=Remedy.RESUME,
            reasons=(f"we drained it; it answers for {node.answering_s:.0f} s and is registered",),
            node=name,
        )
        for name, node in sorted(sight.nodes.items())
        if node.ours and node.drained and node.responding and node.answering_s >= policy.resume_s
    ]
