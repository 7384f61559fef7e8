"""Is it a switch? Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import ProbeResult
from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.rules.deaths import node_remedy
from deeplink.scheduler.watch.rules.queries import long_away
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.watch.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


def silent_leaves(nodes: Mapping[NodeName, NodeSnapshot]) -> dict[str, tuple[NodeSnapshot, ...]]:
    """Return the leaves with two nodes or more of which none answers: their switch is the simpler explanation.

    Nodes given up before (down, or drained by us) do not count: two deaths far apart are no switch. Those given up
    in the leaf's own name do: it is silent still. Where an agent is heard, the switch carries it.
    """
    members = defaultdict(list)
    for node in nodes.values():
        if node.leaf and (node.of_leaf or not (node.down or node.ours)):
            members[node.leaf].append(node)
    return {
        leaf: tuple(sorted(those, key=lambda node: node.name))
        for leaf, those in sorted(members.items())
        if len(those) > 1 and all(map(_silent, those)) and any(node.slurmd is ProbeResult.SILENT for node in those)
    }


def _silent(node: NodeSnapshot) -> bool:
    # What is down is not probed any more.
    silent = node.slurmd is ProbeResult.SILENT or (node.down and node.slurmd is ProbeResult.UNKNOWN)
    return silent and not node.heard_since


def _misses(job: JobSnapshot, leaf: set[NodeName], policy: WatchPolicy) -> bool:
    """Whether a job is the second witness: its launcher misses an agent there, or ran there and is silent."""
    if job.beat_age_s >= policy.tense_beat_s:
        return job.batch_host in leaf and job.silent_s >= policy.silence_s
    return any(job.agents_silent.get(name, 0.0) >= policy.silence_s for name in leaf)


def about_leaf(leaf: tuple[NodeSnapshot, ...], sight: Snapshot, policy: WatchPolicy, leaves: int) -> list[Verdict]:
    """Return what is to be said and done about a silent leaf, one of so many; empty while too early, or done.

    Nodes that a job of ours has are given up in the leaf's name: a job whose nodes cannot be reached is started
    again only when Slurm has given them up (docs/decisions/0021). One leaf at a time.
    """
    names = [node.name for node in leaf]
    hit = [job for job in sight.jobs if job.live and set(names) & set(job.nodes)]
    watched = [node for node in leaf if not node.down]
    if not hit or not watched or not all(long_away(node, policy) for node in watched):
        return []
    long = all(node.away_s >= policy.silence_s for node in watched)
    if not long and not any(_misses(job, set(names), policy) for job in hit):
        return []
    name = leaf[0].leaf
    who = f"all {len(names)} nodes of {name} ({', '.join(names)})"
    since = max(node.away_s for node in watched)
    verdict = Verdict(
        kind=IncidentKind.SWITCH_SUSPECT,
        remedy=Remedy.NOTHING,
        reasons=(f"{who} are silent for {since:.1f} s, others answer: the switch",),
        attempt=hit[0].attempt,
        leaf=name,
        since_s=since,
    )
    lately = sight.leaves_lately - {name}
    if leaves > 1 or lately:
        said = (
            f"brake: {leaves + len(lately)} leaves within {policy.brake_window_s:.0f} s; one at a time is believed"
        )
        return [replace(verdict, reasons=(*verdict.reasons, said))]
    if not policy.act_on_switch:
        return [verdict]
    down = [
        replace(verdict, remedy=node_remedy(node.name, sight, policy, set(names)), node=node.name)
        for node in watched
        if any(node.name in job.nodes for job in hit)
    ]
    return [verdict, *down]
