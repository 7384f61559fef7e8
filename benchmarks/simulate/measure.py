"""What a run was like, in figures; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.simulate.fragmentation import fragmentation
from benchmarks.simulate.spread import quantile
from deeplink.scheduler.placement.model import NodeShare, Placement
from deeplink.scheduler.placement.predicted import predict
from deeplink.scheduler.topology.rank_order import rank_order, ring_crossings, tree_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulate.engine import Engine, JobOutcome
    from benchmarks.simulate.floor import Floor
    from benchmarks.simulate.policies import Chooser
    from benchmarks.simulate.state import JobShape
    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.model import Constants, Job
    from deeplink.scheduler.topology.graph import Path

SIZES = ((1, "1 GPU"), (7, "2-7 GPUs"), (8, "8 GPUs"), (64, "9-64 GPUs"), (1 << 30, "more than 64 GPUs"))
"""Size classes: the most GPUs of a job, and the name."""
WIDE = "jobs over one node"
CLUSTER = "the cluster"


class What(StrEnum):
    """What is measured."""

    WAIT_MEAN = "queueing delay, mean"
    WAIT_MEDIAN = "queueing delay, median"
    WAIT_P95 = "queueing delay, p95"
    JCT_MEAN = "completion time, mean"
    JCT_MEDIAN = "completion time, median"
    JCT_P95 = "completion time, p95"
    LEAVES = "leaves"
    CROSSINGS = "ring crossings"
    FEWEST_CROSSINGS = "ring crossings, had the ranks been ordered along the tree"
    STEP = "predicted step"
    STEP_OVER_BEST = "predicted step over that of the empty cluster"
    UTILISATION = "GPUs in use while jobs came"
    SCATTERED = "idle nodes that are on no idle leaf"
    SPAN = "from the first submission to the last end"


WAITS = (What.WAIT_MEAN, What.WAIT_MEDIAN, What.WAIT_P95)
JCTS = (What.JCT_MEAN, What.JCT_MEDIAN, What.JCT_P95)


class Figure(NamedTuple):
    """One figure: what, and of which jobs (a size class, `WIDE`) or of `CLUSTER`."""

    what: What
    of: str


class Sample(NamedTuple):
    """One moment: seconds since the trace began, share of GPUs in use, jobs that wait, scattered idle nodes."""

    at_s: float
    used: float
    waiting: int
    scattered: float


def size_class(shape: JobShape) -> str:
    """Return the name of a job's size class."""
    return next(name for most, name in SIZES if shape.all_gpus <= most)


@dataclass(slots=True)
class Sampler:
    """Looks at a run from event to event.

    Attributes:
        every_s: a sample so often.
        until_s: utilisation is measured until then: the last submission.
        samples: those taken.
    """

    every_s: float
    until_s: float
    samples: list[Sample] = field(default_factory=list)
    _last_s: float = 0.0
    _used: int = 0
    _gpu_seconds: float = 0.0

    def __call__(self, now: float, engine: Engine) -> None:
        """Be told of an event."""
        state = engine.state
        until = min(now, self.until_s)
        self._gpu_seconds += self._used * max(until - self._last_s, 0.0)
        self._last_s, self._used = now, state.used
        if now < len(self.samples) * self.every_s or now > self.until_s:
            return
        lie = fragmentation(state.floor.fabric, state.rooms)
        sample = Sample(now, state.used / state.gpus, engine.waiting, lie.scattered)
        # After a quiet time the next moment that is due lies in the past: it was like this all the while.
        self.samples.extend([sample] * (1 + int(now / self.every_s) - len(self.samples)))

    def utilisation(self, gpus: int) -> float:
        """Return the share of all GPUs that were in use."""
        return self._gpu_seconds / (gpus * self.until_s) if self.until_s else 0.0


class StepTimes:
    """Predicted steps of one model job on nodes of a cluster, each placement predicted once.

    Args:
        floor: the nodes.
        job: what is trained.
        constants: what the machines do.
    """

    def __init__(self, floor: Floor, job: Job, constants: Constants) -> None:
        self._floor, self._job, self._constants = floor, job, constants
        self._known: dict[tuple[int, tuple[Path, ...]], float] = {}
        self._best: dict[JobShape, float] = {}

    def of(self, order: Sequence[NodeName], gpus: int) -> float:
        """Return the step, in seconds, with so many ranks on each node, in this order."""
        paths = tuple(self._floor.fabric.path(node) for node in order)
        if (gpus, paths) not in self._known:
            placement = Placement(tuple(NodeShare(gpus, gpus, path) for path in paths))
            self._known[gpus, paths] = predict(self._job, placement, self._constants).step_s
        return self._known[gpus, paths]

    def best(self, shape: JobShape) -> float:
        """Return the step on the fullest leaves of the empty cluster, in the order of the tree."""
        if shape not in self._best:
            leaves = sorted(self._floor.leaves, key=lambda leaf: -leaf.below.bit_count())
            nodes = [node for leaf in leaves for node in self._floor.names(leaf.below)][: shape.nodes]
            self._best[shape] = self.of(tree_order(nodes, self._floor.fabric), shape.gpus)
        return self._best[shape]


def figures(
    outcomes: Sequence[JobOutcome], floor: Floor, chooser: Chooser, steps: StepTimes
) -> dict[Figure, float]:
    """Return the figures of all jobs, by size class, and of those over one node."""
    found: dict[Figure, float] = {}
    for _, name in SIZES:
        mine = [one for one in outcomes if size_class(one.work.shape) == name]
        if mine:
            found |= _times(WAITS, name, [one.start_s - one.work.submit_s for one in mine])
            found |= _times(JCTS, name, [one.end_s - one.work.submit_s for one in mine])
    wide: dict[What, list[float]] = {}
    for one in outcomes:
        if one.work.shape.nodes > 1:
            for what, value in _placed(one, floor, chooser, steps).items():
                wide.setdefault(what, []).append(value)
    return found | {Figure(what, WIDE): statistics.fmean(values) for what, values in wide.items()}


def _times(whats: tuple[What, ...], name: str, seconds: list[float]) -> dict[Figure, float]:
    seconds.sort()
    values = (statistics.fmean(seconds), quantile(seconds, 0.5), quantile(seconds, 0.95))
    return {Figure(what, name): value for what, value in zip(whats, values, strict=True)}


def _placed(one: JobOutcome, floor: Floor, chooser: Chooser, steps: StepTimes) -> dict[What, float]:
    shape = one.work.shape
    order = chooser.order(floor, one.nodes)
    step = steps.of(order, shape.gpus)
    return {
        What.LEAVES: floor.spread(one.nodes),
        What.CROSSINGS: ring_crossings(order, floor.fabric.leaf),
        What.FEWEST_CROSSINGS: rank_order(order, floor.fabric).crossings,
        What.STEP: step,
        What.STEP_OVER_BEST: step / steps.best(shape),
    }
