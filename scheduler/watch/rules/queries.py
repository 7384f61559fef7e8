"""What the rules ask of the evidence again and again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.records import Phase

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def answers(name: NodeName | None, sight: Snapshot) -> bool:
    """Whether the node's slurmd answered us just now."""
    return name is not None and name in sight.nodes and sight.nodes[name].slurmd is ProbeResult.ANSWERS


def long_away(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    """Whether our probes of the node failed often and long enough."""
    long = node.away_probes >= policy.away_probes and node.away_s >= policy.away_s
    return node.slurmd.away and not node.down and long


def jobs_on(name: NodeName, sight: Snapshot) -> list[JobSnapshot]:
    """Return the live jobs that have the node."""
    return [job for job in sight.jobs if job.live and name in job.nodes]


def missed(job: JobSnapshot, policy: WatchPolicy) -> set[NodeName]:
    """Return the nodes whose agent the job's launcher misses."""
    return {name for name, silent_s in job.agents_silent.items() if silent_s >= policy.witness_s}


def is_lost(
    job: JobSnapshot, sight: Snapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> bool:
    """Whether the launcher is gone: its host is given up, or it is silent for long though its host answers."""
    # Under salloc the launcher runs outside of the allocation, or Slurm does not say where: no lost node ends it.
    host = sight.nodes.get(job.batch_host) if job.batch_host else None
    if host and (host.name in given_up or host.name not in job.nodes or host.down):
        return job.beat_age_s >= policy.silence_s
    # One that we never heard may have ended while we were away, and its script may have gone on to something else.
    return job.heard and job.silent_s >= policy.launcher_lost_s


def needs_rescue(
    job: JobSnapshot, sight: Snapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> bool:
    """Whether the job cannot help itself, or does not, should these nodes be lost."""
    return (
        job.phase is Phase.STRANDED
        or is_lost(job, sight, policy, given_up)
        or bool(waits_for(job, policy, given_up))
    )


def waits_for(
    job: JobSnapshot, policy: WatchPolicy, given_up: AbstractSet[NodeName | None]
) -> tuple[NodeName, ...]:
    """Return the lost nodes for which a launcher waits that has had time to go on without them.

    Where most of its nodes are silent at once, a launcher cannot know whether it is they or itself: it touches
    nothing for a minute. We know.
    """
    if job.phase not in {Phase.STARTING, Phase.RUNNING} or job.beat_age_s >= policy.tense_beat_s:
        return ()
    return tuple(
        name
        for name in job.rank_nodes
        if name in given_up and job.agents_silent.get(name, 0.0) >= policy.help_itself_s
    )
