"""Which nodes rebooted under a job, perhaps before Slurm noticed? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import FORGOTTEN_S, HEARD_SINCE_S
from deeplink.scheduler.watch.rules.queries import answers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def rebooted(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> tuple[NodeName, ...]:
    """Return the job's nodes that have another kernel than it began with, and that its launcher misses.

    A node whose agent its launcher hears has not rebooted since, whatever else is said of kernels: slurmd alone,
    started again, may show another boot time.
    """
    return tuple(
        name for name in job.nodes if name in sight.nodes and _another_kernel(job, sight.nodes[name], policy)
    )


def began_anew(job: JobSnapshot, sight: Snapshot) -> tuple[NodeName, ...]:
    """Return the nodes that a job which is in the queue again last had, and that booted since it fell silent.

    Not of one that waits for long: its user may have put it off, and nodes boot for other reasons.
    """
    if job.unheard_s > FORGOTTEN_S:
        return ()
    names = {*job.rank_nodes, *job.spares, *job.agents_silent}
    nodes = [node for name, node in sight.nodes.items() if name in names]
    if not job.heard:
        return _lost_its_script(job, nodes)
    return tuple(
        node.name
        for node in nodes
        if any(age is not None and age <= job.beat_age_s for age in (node.booted_s, node.slurmd_anew_s))
    )


def _lost_its_script(job: JobSnapshot, nodes: Sequence[NodeSnapshot]) -> tuple[NodeName, ...]:
    """Return the batch host, if its slurmd was started while we were not there to see it, and others' were not.

    Slurm requeues a job for that node alone: the first one, in its own order. Where all were started, that was
    maintenance, or somebody's will.
    """
    anew = [node for node in nodes if node.slurmd_age_s is not None and node.slurmd_age_s <= job.unheard_s]
    if not anew or anew[0] is not nodes[0] or 1 < len(nodes) == len(anew):
        return ()
    return (nodes[0].name,)


def _another_kernel(job: JobSnapshot, node: NodeSnapshot, policy: WatchPolicy) -> bool:
    silent_s = _missed_s(job, node.name, policy)
    if silent_s is None:
        return False
    before = job.boots.get(node.name, "")
    if before and node.boot_id and before != node.boot_id:
        return True
    if before and node.heard_s is not None and silent_s - node.heard_s >= HEARD_SINCE_S:
        return False  # an agent was heard there since, and told of the same kernel
    if node.booted_s is not None and node.booted_s <= silent_s:
        return True
    # Without anybody to tell its kernel: what fell silent was followed by a new slurmd.
    anew = node.slurmd_anew_s is not None and node.slurmd_anew_s <= silent_s
    return anew and silent_s >= policy.help_itself_s


def _missed_s(job: JobSnapshot, name: NodeName, policy: WatchPolicy) -> float | None:
    """Return for how long the launcher misses its agent there, or we miss it, if it ran there; None: not."""
    if name == job.batch_host:
        return job.beat_age_s if job.silent_s >= policy.silence_s else None
    silent_s = job.agents_silent.get(name, 0.0)
    return silent_s if job.beat_age_s < policy.tense_beat_s and silent_s >= policy.witness_s else None


def beyond_help(job: JobSnapshot, name: NodeName, sight: Snapshot, policy: WatchPolicy) -> bool:
    """Whether the launcher has had its time to recover from the loss of a node that answers again, and has not."""
    if not answers(name, sight):
        return False
    return name == job.batch_host or job.agents_silent.get(name, 0.0) >= policy.help_itself_s
