"""Is it us? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import Answer, mute_launchers
from deeplink.scheduler.watch.rules.seen import is_away

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import NodeSight, Policy, Sight


def doubts(sight: Sight, policy: Policy) -> tuple[str, ...]:
    """Return why we should not believe our own eyes now; empty when we may."""
    away = () if sight.controller else (f"slurmctld does not answer: {sight.controller_problem}",)
    return (*away, *network_doubts(sight, policy))


def network_doubts(sight: Sight, policy: Policy) -> tuple[str, ...]:
    """Return why it may be our own network that is at fault; empty where nothing speaks for that."""
    tried = [
        node
        for node in sight.nodes.values()
        if node.slurmd is not Answer.UNKNOWN and not node.down and not _given_up(node, sight)
    ]
    away = [node for node in tried if node.slurmd.away]
    if len(away) * 2 > len(tried):
        return (f"{len(away)} of {len(tried)} nodes do not answer us: more likely our own network is at fault",)
    mute = mute_launchers(sight.jobs, policy)
    if any(not is_away(job.batch_host, sight) for job in mute):
        return (f"none of {len(mute)} launchers is heard, yet not all their hosts are away: perhaps we are deaf",)
    return ()


def _given_up(node: NodeSight, sight: Sight) -> bool:
    """Whether its silence is proved, and known for what it is: it says nothing of us.

    While a job is being taken off such nodes they alone may be probed.
    """
    lately = node.name in sight.dead_lately or (bool(node.leaf) and node.leaf in sight.leaves_lately)
    return node.slurmd.away and lately
