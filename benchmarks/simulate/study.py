"""Several policies over several seeds: runs, and their spread and differences; pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.simulate.engine import Engine, Rules, Work
from benchmarks.simulate.errors import SimulationValueError
from benchmarks.simulate.load import stretch_for
from benchmarks.simulate.measure import CLUSTER, Figure, Sample, Sampler, StepTimes, What, figures
from benchmarks.simulate.policies import SchedulingPolicy, chooser
from benchmarks.simulate.spread import FigureSpread, difference, quantile, spread_of
from benchmarks.simulate.state import FreeGpuState, shape_of
from deeplink.scheduler.placement.model import Constants, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.simulate.engine import JobOutcome
    from benchmarks.simulate.policies import Chooser
    from benchmarks.simulate.site import SimulatedCluster
    from benchmarks.simulate.trace import Trace

SAMPLES = 400
_QUANTILES = tuple(place / 200 for place in range(201))

BERT_LARGE = Job(batch=8, sample_s=6 * 340e6 * 512 / (0.4 * 125e12), gradient_bytes=2 * 340e6)
"""340 million parameters (Devlin et al., BERT, 2019), 512 tokens a sample, gradients of two bytes, on a V100 that
does 40 % of its operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """What is the same for all runs.

    Attributes:
        rules: how the queue is worked off.
        jitter_s: each job comes up to so much later than in the trace, by chance: that is what a seed changes.
        load: times between submissions are shortened or stretched until the jobs, did none wait, would keep this
            share of all GPUs busy from the first submission to the last; as in the trace when None.
        speedup: whether a job over one node runs longer on worse nodes, as its predicted step does.
        job: the training whose step is predicted.
        constants: what the machines do, for that.
    """

    rules: Rules = field(default_factory=Rules)
    jitter_s: float = 600.0
    load: float | None = None
    speedup: bool = False
    job: Job = BERT_LARGE
    constants: Constants = field(default_factory=Constants)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy with one seed.

    Attributes:
        figures: all of them.
        samples: the cluster from moment to moment.
        waits: quantiles of the queueing delay of all jobs, from the least to the most.
    """

    policy: SchedulingPolicy
    seed: int
    figures: dict[Figure, float]
    samples: tuple[Sample, ...]
    waits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The jobs of a trace as this cluster runs them.

    Attributes:
        work: those that fit on it, in order of submission.
        too_great: how many do not.
    """

    work: tuple[Work, ...]
    too_great: int


def planned(trace: Trace, site: SimulatedCluster, load: float | None = None) -> StudyPlan:
    """Return the jobs that fit on a cluster.

    Args:
        trace: all of them.
        site: the cluster.
        load: as in `StudySettings`.

    Raises:
        SimulationValueError: none fits, or no such load can be had of them.
    """
    empty = FreeGpuState(site.floor, site.gpus)
    shapes = [shape_of(job, site.per_node) for job in trace.jobs]
    fitting = [(job, shape) for job, shape in zip(trace.jobs, shapes, strict=True) if empty.holds(shape)]
    if not fitting:
        raise SimulationValueError("no job of the trace fits on this cluster", "Take a greater one.")
    stretch = 1.0 if load is None else stretch_for(load, fitting, empty.gpus)
    begins = fitting[0][0].submit_s
    work = [
        Work(place, (job.submit_s - begins) * stretch, job.duration_s, shape)
        for place, (job, shape) in enumerate(fitting)
    ]
    return StudyPlan(tuple(work), len(shapes) - len(fitting))


def jittered(work: Sequence[Work], jitter_s: float, draw: random.Random) -> list[Work]:
    """Return the jobs, each somewhat later, in the order in which they then come."""
    moved = [(one.submit_s + draw.uniform(0.0, jitter_s), one) for one in work]
    moved.sort(key=lambda pair: pair[0])
    return [Work(place, at, one.duration_s, one.shape) for place, (at, one) in enumerate(moved)]


def run_once(
    site: SimulatedCluster,
    plan: StudyPlan,
    policy: SchedulingPolicy,
    *,
    seed: int,
    settings: StudySettings,
    told: Callable[[int], None] = lambda _started: None,
) -> Run:
    """Run all jobs under one policy with one seed; the same arguments give the same run.

    Args:
        site: the cluster.
        plan: its jobs.
        policy: who chooses nodes.
        seed: of all chance in it.
        settings: the rest.
        told: called now and then with how many jobs have started.
    """
    work = jittered(plan.work, settings.jitter_s, random.Random(seed))  # noqa: S311 - a simulation, no secret
    who = chooser(policy, random.Random(f"{policy} {seed}"))  # noqa: S311
    steps = StepTimes(site.floor, settings.job, settings.constants)
    last = work[-1].submit_s
    sampler = Sampler(every_s=max(last / SAMPLES, 1.0), until_s=last)

    def watch(now: float, engine: Engine) -> None:
        sampler(now, engine)
        told(len(engine.outcomes))

    slowed = _slowed(site, who, steps) if settings.speedup else None
    engine = Engine(FreeGpuState(site.floor, site.gpus), who, settings.rules, slowed=slowed, watch=watch)
    outcomes = engine.run(work)
    found = figures(outcomes, site.floor, who, steps)
    found[Figure(What.UTILISATION, CLUSTER)] = 100.0 * sampler.utilisation(engine.state.gpus)
    scattered = [sample.scattered for sample in sampler.samples]
    found[Figure(What.SCATTERED, CLUSTER)] = 100.0 * sum(scattered) / len(scattered)
    found[Figure(What.SPAN, CLUSTER)] = max(one.end_s for one in outcomes) - work[0].submit_s
    return Run(policy, seed, found, tuple(sampler.samples), _waits(outcomes))


def _slowed(site: SimulatedCluster, who: Chooser, steps: StepTimes) -> Callable[[Work, int], float]:
    def factor(work: Work, chosen: int) -> float:
        if work.shape.nodes == 1:
            return 1.0
        return max(steps.of(who.order(site.floor, chosen), work.shape.gpus) / steps.best(work.shape), 1.0)

    return factor


def _waits(outcomes: Sequence[JobOutcome]) -> tuple[float, ...]:
    waits = sorted(one.start_s - one.work.submit_s for one in outcomes)
    return tuple(quantile(waits, share) for share in _QUANTILES)


@dataclass(frozen=True, slots=True)
class Study:
    """All runs of several policies, each with the same seeds.

    Attributes:
        runs: all of them.
        plan: the jobs.
    """

    runs: tuple[Run, ...]
    plan: StudyPlan

    @property
    def policies(self) -> tuple[SchedulingPolicy, ...]:
        """The policies, in the order in which they were asked for."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    def of(self, policy: SchedulingPolicy, figure: Figure) -> list[float]:
        """Return a figure of each seed; none where no job was of that kind."""
        return [run.figures[figure] for run in self.runs if run.policy is policy and figure in run.figures]

    def spread(self, policy: SchedulingPolicy, figure: Figure) -> FigureSpread | None:
        """Return a figure with its spread over the seeds; None where no job was of that kind."""
        values = self.of(policy, figure)
        return spread_of(values) if values else None

    def against(self, ours: SchedulingPolicy, theirs: SchedulingPolicy, figure: Figure) -> FigureSpread | None:
        """Return by how much a figure of ours is greater than theirs, seed by seed."""
        mine, yours = self.of(ours, figure), self.of(theirs, figure)
        return difference(mine, yours) if mine and len(mine) == len(yours) else None
