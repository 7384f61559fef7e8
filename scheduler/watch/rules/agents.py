"""Are all agents silent at once? Then it is what they share, not they. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


BOOT_SEEN_S = 5.0
"""We may have read of a boot so long before Slurm ended the agents for it."""


def silent_agents(sight: Snapshot, policy: WatchPolicy) -> list[Verdict]:
    """Return that agents are silent at once though their nodes are not: one verdict at most; nothing is done."""
    standing = [node for node in sight.nodes.values() if _stands(node)]
    quiet = [node for node in standing if (node.attended_s or 0.0) >= policy.attend_s and not node.slurmd.away]
    reasons = []
    if len(standing) > 1 and len(quiet) * 2 > len(standing):
        reasons.append(f"{len(quiet)} of {len(standing)} standing agents are not heard any more")
    deaf = [job for job in sight.jobs if agents_are_silent(job, sight, policy) and _is_news(job, sight, policy)]
    reasons += [
        f"the launcher of job {job.name} misses {len(_silent(job, policy))} of its "
        f"{len(_agents(job))} agents at once"
        for job in deaf
    ]
    if not reasons:
        return []
    alone = deaf[0].attempt if len(deaf) == 1 and not quiet else None
    return [Verdict(kind=IncidentKind.AGENTS_SILENT, remedy=Remedy.NOTHING, reasons=tuple(reasons), attempt=alone)]


def _is_news(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> bool:
    """Whether there is no simpler reason for it.

    While ranks start, agents may be starved for seconds. And Slurm itself ends all agents of a job when one of its
    nodes boots anew: that is the incident of that node.
    """
    silent = _silent(job, policy).values()
    if job.progress_age_s is None and min(silent, default=0.0) < policy.starved_s:
        return False
    # Not of that node's own agent, which may be up again by now.
    longest = max(silent, default=0.0)
    return not any(_booted_since(sight.nodes[name], longest) for name in job.nodes if name in sight.nodes)


def _booted_since(node: NodeSnapshot, silent_s: float) -> bool:
    anew = [ago for ago in (node.booted_s, node.slurmd_anew_s) if ago is not None]
    return any(ago <= silent_s + BOOT_SEEN_S for ago in anew)


def _stands(node: NodeSnapshot) -> bool:
    # One of which only the journal knows may have been taken away while nobody listened.
    return node.attended_s is not None and node.heard_s is not None and not node.down


def agents_are_silent(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> bool:
    """Whether the job's launcher lives and misses most of its agents at once, though their nodes answer."""
    if not job.live or job.beat_age_s >= policy.tense_beat_s:
        return False
    silent = _silent(job, policy)
    answering = [
        name for name in silent if name in sight.nodes and sight.nodes[name].slurmd is ProbeResult.ANSWERS
    ]
    return len(silent) > 1 and len(answering) * 2 > len(_agents(job))


def be_patient(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> bool:
    """Whether to wait for the agents of this job to be heard again before anything is done about it."""
    # Of those that are silent: that its own host's is heard, as a rule, says nothing of them.
    shortest = min(_silent(job, policy).values(), default=0.0)
    return agents_are_silent(job, sight, policy) and shortest < policy.patience_s


def _silent(job: JobSnapshot, policy: WatchPolicy) -> dict[NodeName, float]:
    return {name: silent_s for name, silent_s in _agents(job).items() if silent_s >= policy.silence_s}


def _agents(job: JobSnapshot) -> dict[NodeName, float]:
    """Return for how long each agent is silent, without those of nodes that the job has lost for good."""
    return {name: silent_s for name, silent_s in job.agents_silent.items() if name in job.nodes}
