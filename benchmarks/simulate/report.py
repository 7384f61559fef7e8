"""A study told: tables, plots, and the same as JSON; pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import log10
from typing import TYPE_CHECKING, Any

from benchmarks.simulate.charts import Bar, Series, bars, lines
from benchmarks.simulate.measure import CLUSTER, JCTS, SIZES, WAITS, WIDE, Figure, What, size_class
from benchmarks.simulate.policies import SchedulingPolicy
from benchmarks.simulate.tables import ReportTable, about, timed
from deeplink.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.simulate.spread import FigureSpread
    from benchmarks.simulate.study import Run, Study, StudySettings

_DAY = 86400.0
_MEANS_OF_WIDE = (What.LEAVES, What.CROSSINGS, What.FEWEST_CROSSINGS, What.STEP, What.STEP_OVER_BEST)
_TIMES = {*WAITS, *JCTS, What.STEP, What.SPAN}
_RANKS = (
    "Ranks run in the order of node names, and with deeplink along the tree: `deeplink run` would do that on the "
    "other policies' nodes too, as the third line says."
)


@dataclass(frozen=True, slots=True)
class ReportSubject:
    """What a report is about.

    Attributes:
        trace: the file's name.
        site: the cluster, in words.
        faults: rows of the trace that were left out, with their lines.
        settings: of all runs.
        study: the runs.
    """

    trace: str
    site: str
    faults: tuple[str, ...]
    settings: StudySettings
    study: Study

    @property
    def jobs(self) -> dict[str, int]:
        """How many jobs each size class has; those without are left out."""
        count = Counter(size_class(one.shape) for one in self.study.plan.work)
        return {name: count[name] for _, name in SIZES if count[name]}

    @property
    def seeds(self) -> int:
        """How many seeds each policy ran with."""
        return len({run.seed for run in self.study.runs})


def facts(told: ReportSubject) -> list[str]:
    """Return sentences on what was simulated."""
    plan, settings, rules = told.study.plan, told.settings, told.settings.rules
    job, constants = settings.job, settings.constants
    said = [f"Trace: {told.trace}, {counted(len(plan.work), 'job')}"]
    if told.faults:
        said[0] += f"; {counted(len(told.faults), 'row')} left out"
    if plan.too_great:
        said[0] += f"; {counted(plan.too_great, 'job')} greater than the cluster left out"
    if settings.load is not None:
        said[0] += f"; submissions moved for a load of {settings.load:.0%}"
    said.append(f"Cluster: {told.site}")
    limits = f"time limits are {rules.overestimate:g} times what a job needs"
    said.append(
        f"Queue: first come first served; backfill every {rules.interval_s:g} s, {rules.depth} jobs; {limits}"
    )
    jitter = f"each moves every submission by up to {timed(settings.jitter_s)}"
    said.append(f"Seeds: {told.seeds}; {jitter}; ± is half of the 95 % interval of the mean over them")
    gradients = f"{job.gradient_bytes / 1e6:,.0f} MB of gradients"
    ports = f"{constants.nic.bandwidth / 1e9:.3g} GB/s, uplinks of {constants.leaf.bandwidth / 1e9:.3g} GB/s"
    batch = f"{job.batch} samples of {timed(job.sample_s)}"
    said.append(f"Step: predicted with {batch} and {gradients} on each GPU; ports of {ports}")
    if settings.speedup:
        said.append("Jobs over one node run longer on worse nodes, in proportion to the predicted step")
    return said


def tables(told: ReportSubject) -> list[ReportTable]:
    """Return all tables."""
    study = told.study
    found = [
        _by_size("Queueing delay", WAITS, told),
        _by_size("Job completion time", JCTS, told),
        _rows(f"{WIDE.capitalize()} ({_wide(told):,})", _MEANS_OF_WIDE, WIDE, study, note=_RANKS),
        _rows(
            "The cluster", (What.UTILISATION, What.SCATTERED, What.SPAN), CLUSTER, study, note="Shares in percent."
        ),
    ]
    if {SchedulingPolicy.DEEPLINK, SchedulingPolicy.SLURM_TREE} <= set(study.policies):
        found.append(_compared(told))
    return [table for table in found if table.rows]


def _wide(told: ReportSubject) -> int:
    return sum(one.shape.nodes > 1 for one in told.study.plan.work)


def _by_size(title: str, whats: tuple[What, ...], told: ReportSubject) -> ReportTable:
    study = told.study
    rows = []
    for name, count in told.jobs.items():
        for what in whats:
            cells = [about(study.spread(policy, Figure(what, name)), time=True) for policy in study.policies]
            rows.append((name, f"{count:,}", what.rpartition(", ")[2], *cells))
    return ReportTable(title, ("size", "jobs", "", *map(str, study.policies)), tuple(rows))


def _rows(title: str, whats: Iterable[What], of: str, study: Study, *, note: str) -> ReportTable:
    rows = []
    for what in whats:
        found = [study.spread(policy, Figure(what, of)) for policy in study.policies]
        if any(spread is not None for spread in found):
            rows.append((str(what), *(about(spread, time=what in _TIMES) for spread in found)))
    return ReportTable(title, ("mean", *map(str, study.policies)), tuple(rows), note)


def _compared(told: ReportSubject) -> ReportTable:
    study = told.study
    rows = []
    asked = [Figure(what, name) for name in told.jobs for what in (What.WAIT_MEAN, What.WAIT_P95)]
    asked += [Figure(what, WIDE) for what in (What.LEAVES, What.CROSSINGS, What.STEP)]
    for figure in asked:
        spread = study.against(SchedulingPolicy.DEEPLINK, SchedulingPolicy.SLURM_TREE, figure)
        if spread is not None:
            rows.append((figure.of, str(figure.what), about(spread, time=figure.what in _TIMES), verdict(spread)))
    note = (
        "Seed by seed: the same jobs at the same times. Less is better. Of 20 rows without any difference, one is "
        "called better or worse by chance."
    )
    return ReportTable("deeplink minus slurm-tree", ("jobs", "figure", "difference", ""), tuple(rows), note)


def verdict(spread: FigureSpread) -> str:
    """Return what a difference says, where less is better: its interval is below zero, above, or around it."""
    if spread.runs == 1:
        return "one seed"
    if spread.high < 0:
        return "better"
    if spread.low > 0:
        return "worse"
    return "the same" if spread.mean == 0 else "no difference to be seen"


def plots(told: ReportSubject) -> list[str]:
    """Return all plots, as SVG."""
    study, names = told.study, list(told.jobs)
    found = [
        bars(
            f"{what.capitalize()}, by size",
            names,
            [
                (str(policy), [_bar(study, policy, Figure(what, name)) for name in names])
                for policy in study.policies
            ],
            "hours",
        )
        for what in (What.WAIT_MEAN, What.WAIT_P95)
    ]
    wide = (What.LEAVES, What.CROSSINGS)
    if _wide(told):
        found.append(
            bars(
                "Jobs over one node: leaves and ring crossings",
                [str(what) for what in wide],
                [
                    (str(one), [_plain_bar(study.spread(one, Figure(w, WIDE))) for w in wide])
                    for one in study.policies
                ],
                "mean of a job",
            )
        )
        found.append(
            bars(
                "Jobs over one node: predicted step over that of the empty cluster",
                [str(policy) for policy in study.policies],
                [("", [_plain_bar(study.spread(p, Figure(What.STEP_OVER_BEST, WIDE))) for p in study.policies])],
                "times",
            )
        )
    firsts = [next(run for run in study.runs if run.policy is policy) for policy in study.policies]
    found.append(
        lines(
            "Queueing delay: share of jobs that waited no longer",
            [Series(str(run.policy), _cumulative(run)) for run in firsts],
            "seconds, on a scale of powers of ten; up to one second counts as one",
            "share",
            powers=True,
        )
    )
    for title, unit, place in (
        ("GPUs in use", "share", 1),
        ("Jobs that wait", "jobs", 2),
        ("Idle nodes that are on no idle leaf", "share", 3),
    ):
        series = [Series(str(run.policy), [(one[0] / _DAY, one[place]) for one in run.samples]) for run in firsts]
        found.append(lines(title, series, "days since the first submission", unit))
    return found


def _bar(study: Study, policy: SchedulingPolicy, figure: Figure) -> Bar | None:
    spread = study.spread(policy, figure)
    if spread is None:
        return None
    return Bar(spread.mean / 3600.0, spread.half / 3600.0 if spread.runs > 1 else 0.0)


def _plain_bar(spread: FigureSpread | None) -> Bar | None:
    return None if spread is None else Bar(spread.mean, spread.half if spread.runs > 1 else 0.0)


def _cumulative(run: Run) -> list[tuple[float, float]]:
    last = len(run.waits) - 1
    return [(log10(max(seconds, 1.0)), place / last) for place, seconds in enumerate(run.waits)]


def document(told: ReportSubject) -> dict[str, Any]:
    """Return all figures of all runs, for JSON; seconds, and percent where a share is meant."""
    return {
        "trace": told.trace,
        "site": told.site,
        "jobs": told.jobs,
        "left_out": {"rows": list(told.faults), "too_great": told.study.plan.too_great},
        "rules": asdict(told.settings.rules),
        "jitter_s": told.settings.jitter_s,
        "load": told.settings.load,
        "speedup": told.settings.speedup,
        "runs": [
            {
                "policy": run.policy,
                "seed": run.seed,
                "figures": [
                    {"what": figure.what, "of": figure.of, "value": value} for figure, value in run.figures.items()
                ],
            }
            for run in told.study.runs
        ],
    }
