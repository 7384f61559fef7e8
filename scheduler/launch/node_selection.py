"""Selects the nodes that the next attempt may use. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from deeplink.scheduler.launch.agent_monitor import Silence
    from deeplink.types import NodeName


def select_nodes(
    usable: Sequence[NodeName],
    count: int,
    *,
    silence: Mapping[NodeName, Silence],
    doubt_s: float,
    here: NodeName | None = None,
    suspects: Collection[NodeName] = (),
    sick: Collection[NodeName] = (),
    out: Collection[NodeName] = (),
) -> list[NodeName]:
    """Return the nodes to choose `count` from: all good ones, and only as many others as are missing.

    Nodes in doubt are left out, unless too few are left: who fell silent just now is seen by the next attempt.

    Args:
        usable: nodes that were not lost, in the order they are to be preferred in.
        count: how many are wanted; there may be fewer.
        silence: of these nodes.
        doubt_s: who answered longer ago is in doubt.
        here: the node we run on; since we do, it lives.
        suspects: nodes that ranks failed or hung on.
        sick: nodes that are unfit by their own checks.
        out: nodes that are drained, or down, by Slurm's word.
    """
    fit = [node for node in usable if node == here or silence[node].answer_s < doubt_s]
    serving = [node for node in fit if node not in out]
    chosen = [node for node in serving if node not in suspects and node not in sick]
    suspected = [node for node in serving if node in suspects and node not in sick]
    unfit = [node for node in serving if node in sick]
    drained = [node for node in fit if node in out]
    doubtful = [node for node in usable if node not in fit]
    for others in (suspected, unfit, drained, doubtful):
        chosen += others[: max(0, count - len(chosen))]
    return chosen
