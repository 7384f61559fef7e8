"""How far apart jobs must come to keep a cluster as busy as is wanted; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.simulate.errors import SimulationValueError
from benchmarks.simulate.trace import LONGEST_S
from deeplink.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulate.state import JobShape
    from benchmarks.simulate.trace import TraceJob

_HALVINGS = 50


def stretch_for(load: float, jobs: Sequence[tuple[TraceJob, JobShape]], gpus: int) -> float:
    """Return by how much to stretch the times between submissions.

    From the first submission to the last the jobs then have that share of all GPUs in the mean, did none wait.
    What they run after the last submission counts for nothing: in a short trace that may be nearly all of it.

    Args:
        load: the share wanted; above 1 where a queue is to grow.
        jobs: in order of submission.
        gpus: of the cluster.

    Raises:
        SimulationValueError: no such load can be had of these jobs.
    """
    first, last = jobs[0][0].submit_s, jobs[-1][0].submit_s
    span = last - first
    if not span:
        raise SimulationValueError("all jobs come at one moment: no load can be set", "Leave out --load.")
    known = [(shape.all_gpus, job.duration_s, last - job.submit_s) for job, shape in jobs]
    most = sum(count * left for count, _, left in known) / (gpus * span)
    if most <= load:
        raise SimulationValueError(
            f"{counted(len(jobs), 'job')} keep {counted(gpus, 'GPU')} busy to {most:.0%} at most",
            "Take more jobs or a smaller cluster, or ask for a smaller load.",
        )
    # It falls as they come slower; there, if it counted all that they run, it would be what is wanted.
    low, high = 0.0, sum(count * duration for count, duration, _ in known) / (gpus * load * span)
    if high * span > LONGEST_S:
        problem = f"for a load of {load:g} the jobs would have to come {high:g} times as slowly"
        raise SimulationValueError(problem, "Ask for a greater load.")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        busy = sum(count * min(duration, left * middle) for count, duration, left in known)
        if busy > load * gpus * span * middle:
            low = middle
        else:
            high = middle
    return high
