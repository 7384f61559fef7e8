"""Is it a switch? Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.evidence import Answer
from deeplink.scheduler.watch.records import Kind
from deeplink.scheduler.watch.rules.deaths import node_remedy
from deeplink.scheduler.watch.rules.seen import live, long_away
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.watch.evidence import NodeSight, Policy, Sight
    from deeplink.types import NodeName


def silent_leaves(nodes: Mapping[NodeName, NodeSight]) -> dict[str, tuple[NodeSight, ...]]:
    """Return the leaves with two nodes or more of which none answers: their switch is the simpler explanation.

    Nodes given up before (down, or drained by us) do not count: two deaths far apart are no switch.
    """
    members = defaultdict(list)
    for node in nodes.values():
        if node.leaf and not node.down and not node.ours:
            members[node.leaf].append(node)
    return {
        leaf: tuple(sorted(those, key=lambda node: node.name))
        for leaf, those in sorted(members.items())
        if len(those) > 1 and all(node.slurmd is Answer.SILENT for node in those)
    }


def about_leaf(leaf: tuple[NodeSight, ...], sight: Sight, policy: Policy, leaves: int) -> list[Verdict]:
    """Return what is to be said and done about a silent leaf, one of so many; empty while it is too early."""
    names = [node.name for node in leaf]
    hit = [job for job in sight.jobs if live(job) and set(names) & set(job.nodes)]
    if not hit or not all(long_away(node, policy) and node.away_s >= policy.silence_s for node in leaf):
        return []
    name = leaf[0].leaf
    why = f"all {len(names)} nodes of {name} ({', '.join(names)}) are silent for {leaf[0].away_s:.1f} s"
    since = max(node.away_s for node in leaf)
    verdict = Verdict(
        kind=Kind.SWITCH_SUSPECT,
        remedy=Remedy.NOTHING,
        reasons=(f"{why}, others answer: the switch",),
        attempt=hit[0].attempt,
        leaf=name,
        since_s=since,
    )
    if not policy.act_on_switch or leaves > 1:
        return [verdict]
    down = [
        replace(verdict, remedy=node_remedy(node.name, sight, policy), node=node.name)
        for node in leaf
        if any(node.name in job.nodes for job in hit)
    ]
    return [verdict, *down]
