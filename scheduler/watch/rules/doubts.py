"""Is it us? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult, long_mute, mute_launchers

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def doubts(sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why we should not believe our own eyes now; empty when we may."""
    away = () if sight.controller else (f"slurmctld does not answer: {sight.controller_problem}",)
    return (*away, *cut_off(sight), *_deaf(sight, policy))


def cut_off(sight: Snapshot) -> tuple[str, ...]:
    """Return why our own network may be at fault; empty where nothing speaks for that."""
    tried = [
        node
        for node in sight.nodes.values()
        if node.slurmd is not ProbeResult.UNKNOWN and not node.down and not _given_up(node, sight)
    ]
    away = [node for node in tried if node.slurmd.away]
    if len(away) * 2 <= len(tried):
        return ()
    return (f"{len(away)} of {len(tried)} nodes do not answer us: more likely our own network is at fault",)


def unheard(sight: Snapshot, policy: WatchPolicy) -> tuple[JobSnapshot, ...]:
    """Return the jobs of which no launcher is heard, though not all their hosts are away: it may be our ears."""
    mute = mute_launchers(sight.jobs, policy)
    return mute if any(_may_live(job.batch_host, sight) for job in mute) else ()


def _deaf(sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why we may hear nobody; not for ever: after minutes it is only their silence that is not believed."""
    mute = unheard(sight, policy)
    if not mute or long_mute(mute):
        return ()
    return (f"none of {len(mute)} launchers is heard, yet not all their hosts are away: perhaps we are deaf",)


def _may_live(host: NodeName | None, sight: Snapshot) -> bool:
    """Whether a launcher's host is not known to be gone; a login node, under salloc, is none of Slurm's."""
    node = sight.nodes.get(host) if host else None
    return node is not None and not (node.slurmd.away or node.down)


def _given_up(node: NodeSnapshot, sight: Snapshot) -> bool:
    """Whether its silence is proved, and known for what it is: it says nothing of us.

    While a job is being taken off such nodes they alone may be probed.
    """
    lately = node.name in sight.dead_lately or (bool(node.leaf) and node.leaf in sight.leaves_lately)
    return node.slurmd.away and lately
