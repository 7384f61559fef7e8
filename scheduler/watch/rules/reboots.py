"""Which nodes rebooted under a job, perhaps before Slurm noticed? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.rules.seen import answers

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import JobSight, NodeSight, Policy, Sight
    from deeplink.types import NodeName


def rebooted(job: JobSight, sight: Sight, policy: Policy) -> tuple[NodeName, ...]:
    """Return the job's nodes that have another kernel than it began with, and that its launcher misses.

    A node whose agent its launcher hears has not rebooted since, whatever else is said of kernels: slurmd alone,
    started again, may show another boot time.
    """
    return tuple(
        name
        for name in job.nodes
        if name in sight.nodes and _another_kernel(job, sight.nodes[name]) and is_missed(job, name, policy)
    )


def _another_kernel(job: JobSight, node: NodeSight) -> bool:
    before = job.boots.get(node.name, "")
    if before and node.boot_id and before != node.boot_id:
        return True
    return node.booted_s is not None and node.booted_s < job.known_s


def is_missed(job: JobSight, name: NodeName, policy: Policy) -> bool:
    """Whether the launcher misses its agent on the node; or ran there itself, and is silent."""
    if name == job.batch_host:
        return job.beat_age_s >= policy.silence_s
    return job.beat_age_s < policy.tense_beat_s and job.agents_silent.get(name, 0.0) >= policy.witness_s


def beyond_help(job: JobSight, name: NodeName, sight: Sight, policy: Policy) -> bool:
    """Whether the launcher has had its time to recover from the loss of a node that answers again, and has not."""
    if not answers(name, sight):
        return False
    return name == job.batch_host or job.agents_silent.get(name, 0.0) >= policy.help_itself_s
