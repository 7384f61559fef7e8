"""Whom a strike of the storm hits: which job, which node, which rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.watchdog import gate
from benchmarks.watchdog.facts import newest_step
from deeplink.scheduler.testbed.lab.laboratory import How
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from benchmarks.watchdog.slots import Run
    from benchmarks.watchdog.strikes import Strike, Struck

REST_S = 60.0
"""So long a node is left alone after it was lost: lost again in the same minute it may be the same incident."""
OF_ALL = frozenset({"storage-frozen", "agents-silent"})


def aim(
    strike: Strike, chance: random.Random, runs: Sequence[Run], struck: Sequence[Struck]
) -> tuple[Run | None, str, How]:
    """Return whom it hits, where, and how.

    Args:
        strike: the fault.
        chance: draws.
        runs: jobs that have not ended.
        struck: all faults so far.
    """
    running = [run for run in runs if newest_step(run.stand.lines()) >= gate.WARM]
    run = chance.choice(running) if running else None
    if run and strike.fault == "slurmd-killed":  # seen by the job's own agents, which are to be there still
        run = min(running, key=lambda one: newest_step(one.stand.lines()))
    if strike.fault in {"controller-down", "controller-frozen", "watchdog-killed"}:
        return run, CTL, How()
    if strike.fault in OF_ALL or run is None:
        return run, "", How()
    nodes = _nodes(run)
    rested = {one.target for one in struck if time.time() < max(one.over_unix, one.hit_unix) + REST_S}
    rank = chance.choice(sorted(rank for rank, node in nodes.items() if node not in rested) or sorted(nodes))
    if strike.fault == "rank-exit":
        return run, str(run.stand.folder), How(rank=rank)
    if strike.fault == "checkpoints-unreadable":
        return run, str(run.stand.folder / "checkpoints"), How()
    resting = sorted(node for one in running if one.slot.spares for node in _resting(one))
    if strike.fault == "node-drained" and resting and chance.random() < 2 / 3:
        return run, chance.choice(resting), How()
    return run, nodes[rank], How(rank=rank if "rank" in strike.fault else None, share=0.6)


def _nodes(run: Run) -> dict[int, str]:
    """Return the node of each rank of a job's newest attempt."""
    lines = run.stand.lines()
    newest = max(line.attempt for line in lines)
    return {line.rank: line.node for line in lines if line.attempt == newest}


def _resting(run: Run) -> set[str]:
    """Return the nodes of a job that run no rank of it."""
    return {*run.allocated.get(max(run.allocated, default=0), ())} - {*_nodes(run).values()}
