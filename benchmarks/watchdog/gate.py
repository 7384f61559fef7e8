"""When a strike of the storm may come: by the faults before it, the jobs and the nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.watchdog.facts import newest_step
from benchmarks.watchdog.slots import SLOTS
from benchmarks.watchdog.strikes import KINDRED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.watchdog.slots import Run
    from benchmarks.watchdog.strikes import Kindred, Struck
    from deeplink.scheduler.slurm.parse import NodeRow

WARM = 40
"""Steps a job has made before a fault hits it: a launcher knows by then how long its steps take."""
EARLY = 400
"""Steps of a job, of some 900, before which it has surely half a minute left."""
LONE_APART_S = 12.0
"""From the end of a fault that the watchdog alone tells of to the next such: it looks again by then."""
APART_S = 15.0
"""From one fault that takes something away to the next: so long it may take until anybody sees it."""
AFTER_S = 8.0
"""From its end to the next: an agent that was silent is heard by then."""


def too_early(kindred: Kindred, past: Sequence[Struck], current: Sequence[Struck], runs: Sequence[Run]) -> str:
    """Return why a fault of this kind is not to come yet, as far as its likes and the jobs say; empty when it may.

    Args:
        kindred: its kind.
        past: faults that are over.
        current: those that are in effect.
        runs: jobs that have not ended.
    """
    if kindred.lone and any(
        KINDRED[one.strike.fault].lone and not one.missed and time.time() < one.over_unix + LONE_APART_S
        for one in (*past, *current)
    ):
        return "another that the watchdog alone tells of is in effect, or was just now"
    told = [run for run in runs if run.slot.nodes > 2]  # noqa: PLR2004 - the others miss one agent at most
    if kindred.early and not any(newest_step(run.stand.lines()) < EARLY for run in told):
        return "the job that is to tell of it may end soon"
    return ""


def out_of_service(nodes: Sequence[NodeRow], current: Sequence[Struck]) -> list[NodeRow]:
    """Return the nodes that are drained, down or silent, but for the one that the storm itself had drained."""
    drained = {one.target for one in current if one.strike.fault == "node-drained"}
    return [
        node
        for node in nodes
        if node.down or not node.responding or (node.drained and str(node.name) not in drained)
    ]


def ill(past: Sequence[Struck], current: Sequence[Struck], runs: Sequence[Run], out: Sequence[NodeRow]) -> str:
    """Return why not all is well; empty when it is.

    Args:
        past: faults that are over.
        current: those that are in effect.
        runs: jobs that have not ended.
        out: nodes out of service.
    """
    taken = [one for one in (*past, *current) if KINDRED[one.strike.fault].taking and not one.missed]
    lasting = [one.strike.fault for one in taken if one in current]
    if lasting:
        return f"{', '.join(lasting)} in effect"
    if taken and time.time() < max(max(one.began_unix + APART_S, one.over_unix + AFTER_S) for one in taken):
        return f"{taken[-1].strike.fault} came just now"
    if out:
        return f"nodes out of service: {', '.join(f'{node.name} ({node.reason})' for node in out)}"
    now = time.time()
    still = [
        run.stand.job
        for run in runs
        if not any(line.what == "step" and line.unix > now - 5.0 for line in run.stand.lines()[-40:])
    ]
    if still:
        return f"jobs without a step for 5 s: {', '.join(map(str, still))}"
    cold = [run.stand.job for run in runs if newest_step(run.stand.lines()) < WARM]
    if cold:
        return f"jobs that have only begun: {', '.join(map(str, cold))}"
    return "" if len(runs) == len(SLOTS) else "a job is missing"
