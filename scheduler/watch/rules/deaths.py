"""Which nodes are dead, by how many witnesses, and are there more than can be believed? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.rules.queries import jobs_on, long_away, needs_rescue
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.watch.evidence import NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def dead_nodes(
    sight: Snapshot, policy: WatchPolicy, on_silent_leaf: set[NodeName]
) -> dict[NodeName, tuple[str, ...]]:
    """Return the nodes proved dead, each with the proof; those of a silent leaf are not looked at."""
    dead = {}
    for name, node in sorted(sight.nodes.items()):
        if name in on_silent_leaf or not long_away(node, policy) or not _others_answer(node, sight):
            continue
        witnesses = _witnesses(node, sight, policy)
        if witnesses:
            said = "refuses connections" if node.slurmd is ProbeResult.REFUSES else "is silent"
            dead[name] = (f"slurmd {said} for {node.away_s:.1f} s ({node.away_probes} probes)", *witnesses)
    return dead


def _others_answer(node: NodeSnapshot, sight: Snapshot) -> bool:
    mates = [
        other
        for other in sight.nodes.values()
        if other.leaf == node.leaf and other.leaf and other.name != node.name and not other.down and not other.ours
    ]
    witnesses = mates or [other for other in sight.nodes.values() if other.name != node.name]
    return any(other.slurmd is not ProbeResult.UNKNOWN and not _silent(other) for other in witnesses) and any(
        other.slurmd is ProbeResult.ANSWERS for other in sight.nodes.values()
    )


def _silent(node: NodeSnapshot) -> bool:
    return node.slurmd is ProbeResult.SILENT


def _witnesses(node: NodeSnapshot, sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return who else misses the node; empty when nobody does, or when one hears it, or it is not our business."""
    if node.heard_since:
        return ()
    jobs = jobs_on(node.name, sight)
    said = []
    for job in jobs:
        silent = job.agents_silent.get(node.name)
        heard = job.beat_age_s < policy.tense_beat_s
        if silent is not None and heard and silent < policy.witness_s:
            return ()
        if silent is not None and heard and silent >= policy.silence_s:
            said.append(f"the launcher of job {job.name} misses its agent for {silent:.1f} s")
        if job.batch_host == node.name and job.silent_s >= policy.silence_s:
            said.append(f"it is the batch host of job {job.name}, not heard for {job.silent_s:.1f} s")
    if jobs and not node.responding and _silent(node) and node.away_s >= policy.silence_s:
        said.append("slurmctld misses it too")
    return tuple(said)


def node_remedy(
    name: NodeName, sight: Snapshot, policy: WatchPolicy, together: AbstractSet[NodeName | None] = frozenset()
) -> Remedy:
    """Return DRAIN_DOWN where a job of ours needs it and no other job loses by it; `together` is given up too.

    DOWN ends what runs there.
    """
    jobs = jobs_on(name, sight)
    needed = [job for job in jobs if needs_rescue(job, sight, policy, {name, *together})]
    used = [job for job in jobs if job not in needed and name in job.rank_nodes]
    return Remedy.DRAIN_DOWN if needed and not used and not sight.nodes[name].strangers else Remedy.DRAIN


def blamed(
    sight: Snapshot, policy: WatchPolicy, name: NodeName, why: tuple[str, ...], held: tuple[str, ...]
) -> Verdict:
    """Return the verdict on a dead node; nothing is done where the brake holds us back."""
    jobs = jobs_on(name, sight)
    needy = [job for job in jobs if needs_rescue(job, sight, policy, {name})]
    silences = [job.agents_silent.get(name, 0.0) for job in jobs]
    return Verdict(
        kind=IncidentKind.NODE_DEAD,
        remedy=Remedy.NOTHING if held else node_remedy(name, sight, policy),
        reasons=(*why, *held),
        attempt=(needy or jobs)[0].attempt,
        node=name,
        since_s=max(sight.nodes[name].away_s, *silences),
    )


def brake(dead: Mapping[NodeName, object], sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why so many deaths at once are not believed; empty when they are."""
    count = len(set(dead) | sight.dead_lately)
    most = max(policy.most_dead, len(sight.nodes) // 10)
    if not dead or count <= most:
        return ()
    return (f"brake: {count} dead nodes within {policy.brake_window_s:.0f} s are more than the {most} believed",)
