"""Evidence -> verdicts, each with its reasons. Pure: no clock, no process, no wire, no memory.

The order of thought: is it us? is it a switch? the storage? all agents at once? are there more dead than can be
believed? Only then is a node called dead, sick or without its slurmd, or a job restarted.
docs/decisions/0006-recovery-ladder.md and 0021-whom-to-blame.md say why each rule is as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import IncidentKind
from deeplink.scheduler.watch.rules.agents import silent_agents
from deeplink.scheduler.watch.rules.deaths import blamed, brake, dead_nodes
from deeplink.scheduler.watch.rules.doubts import doubts
from deeplink.scheduler.watch.rules.endings import endings
from deeplink.scheduler.watch.rules.jobs import Around, about_job
from deeplink.scheduler.watch.rules.leaks import leaked_gpus
from deeplink.scheduler.watch.rules.resume import returning
from deeplink.scheduler.watch.rules.sickness import sick_nodes
from deeplink.scheduler.watch.rules.slurmds import lost_slurmds
from deeplink.scheduler.watch.rules.storage import frozen_storage
from deeplink.scheduler.watch.rules.switches import about_leaf, silent_leaves
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import Snapshot, WatchPolicy
    from deeplink.types import NodeName


def judge(sight: Snapshot, policy: WatchPolicy) -> tuple[Verdict, ...]:
    """Return what is wrong, the gravest first; empty when all is well or too little is known."""
    us = doubts(sight, policy)
    if us:
        return (Verdict(kind=IncidentKind.WATCHDOG_PARTITIONED, remedy=Remedy.NOTHING, reasons=us),)
    leaves = silent_leaves(sight.nodes)
    switches = [verdict for leaf in leaves.values() for verdict in about_leaf(leaf, sight, policy, len(leaves))]
    storage = frozen_storage(sight.nodes, sight.jobs, policy)
    frozen = storage is not None
    cut_off = {node.name for leaf in leaves.values() for node in leaf}
    dead = dead_nodes(sight, policy, cut_off)
    held = brake(dead, sight, policy)
    deaths = [blamed(sight, policy, node, why, held) for node, why in dead.items()]
    lost: set[NodeName | None] = {*cut_off, *dead}
    around = Around(
        given_up={
            **{verdict.node: verdict.leaf for verdict in switches if verdict.node},
            **dict.fromkeys(dead, ""),
        },
        storage_frozen=frozen,
    )
    return (
        *switches,
        *([storage] if storage else []),
        *silent_agents(sight, policy),
        *deaths,
        *lost_slurmds(sight, policy, lost),
        *sick_nodes(sight, policy, lost, storage_frozen=frozen),
        *([] if held else [verdict for job in sight.jobs for verdict in about_job(job, sight, policy, around)]),
        *endings(sight),
        *leaked_gpus(sight, policy),
        *([] if held else returning(sight, policy)),
    )
