"""Evidence -> verdicts, each with its reasons. Pure: no clock, no process, no wire, no memory.

The order of thought: is it us? is it a switch? are there more dead than can be believed? Only then is a node
called dead or a job restarted. docs/decisions/0006-recovery-ladder.md says why each rule is as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Kind
from deeplink.scheduler.watch.rules.deaths import blamed, brake, dead_nodes
from deeplink.scheduler.watch.rules.doubts import doubts
from deeplink.scheduler.watch.rules.jobs import about_job
from deeplink.scheduler.watch.rules.returns import returning
from deeplink.scheduler.watch.rules.switches import about_leaf, silent_leaves
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from deeplink.scheduler.watch.evidence import Policy, Sight
    from deeplink.types import NodeName


def judge(sight: Sight, policy: Policy) -> tuple[Verdict, ...]:
    """Return what is wrong, the gravest first; empty when all is well or too little is known."""
    us = doubts(sight, policy)
    if us:
        return (Verdict(kind=Kind.SELF_IN_DOUBT, remedy=Remedy.NOTHING, reasons=us),)
    leaves = silent_leaves(sight.nodes)
    switches = [verdict for leaf in leaves.values() for verdict in about_leaf(leaf, sight, policy, len(leaves))]
    given_up: set[NodeName | None] = {verdict.node for verdict in switches if verdict.node}
    dead = dead_nodes(sight, policy, {node.name for leaf in leaves.values() for node in leaf})
    held_back = brake(dead, sight, policy)
    if held_back:
        return (*switches, *(blamed(sight, policy, node, why, held_back) for node, why in dead.items()))
    given_up |= set(dead)
    return (
        *switches,
        *(blamed(sight, policy, node, why, ()) for node, why in dead.items()),
        *(verdict for job in sight.jobs for verdict in about_job(job, sight, policy, given_up)),
        *(returning(sight, policy)),
    )
