"""Is it us? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import Answer
from deeplink.scheduler.watch.rules.seen import answers, live

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import NodeSight, Policy, Sight


def doubts(sight: Sight, policy: Policy) -> tuple[str, ...]:
    """Return why we should not believe our own eyes now; empty when we may."""
    if not sight.controller:
        return (f"slurmctld does not answer: {sight.controller_problem}",)
    tried = [
        node
        for node in sight.nodes.values()
        if node.slurmd is not Answer.UNKNOWN and not node.down and not _given_up(node, sight)
    ]
    away = [node for node in tried if node.slurmd.away]
    if len(away) * 2 > len(tried):
        return (f"{len(away)} of {len(tried)} nodes do not answer us: more likely our own network is at fault",)
    heard = [job for job in sight.jobs if live(job) and job.heard]
    mute = [job for job in heard if job.beat_age_s >= policy.tense_beat_s]
    reachable = [job for job in mute if answers(job.batch_host, sight)]
    if len(heard) > 1 and len(mute) == len(heard) and reachable:
        return (
            f"none of {len(heard)} launchers is heard, though their hosts answer: our own ears may be at fault",
        )
    return ()


def _given_up(node: NodeSight, sight: Sight) -> bool:
    """Whether its silence is proved, and known for what it is: it says nothing of us.

    While a job is being taken off such nodes they alone may be probed.
    """
    lately = node.name in sight.dead_lately or (bool(node.leaf) and node.leaf in sight.leaves_lately)
    return node.slurmd.away and lately
