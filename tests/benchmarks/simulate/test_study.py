"""Whole runs: their figures, their spread, and the report."""

from __future__ import annotations

import dataclasses
import json
import math
from xml.etree import ElementTree as ET

import pytest

from benchmarks.simulate.errors import SimulationValueError
from benchmarks.simulate.measure import CLUSTER, WIDE, Figure, What
from benchmarks.simulate.page import as_html, as_text
from benchmarks.simulate.policies import SchedulingPolicy
from benchmarks.simulate.report import ReportSubject, document, plots, tables, verdict
from benchmarks.simulate.site import SimulatedCluster, SimulatedTree, generated, site_of
from benchmarks.simulate.spread import FigureSpread, difference, spread_of
from benchmarks.simulate.study import Study, StudyPlan, StudySettings, planned, run_once
from benchmarks.simulate.tables import about
from benchmarks.simulate.trace import Trace, TraceJob
from deeplink.scheduler.placement.model import Constants, LinkSpeed
from deeplink.scheduler.topology.network import Network


def trace(*jobs: tuple[float, float, int]) -> Trace:
    return Trace(tuple(TraceJob(number, *job) for number, job in enumerate(jobs)), ())


def busy() -> Trace:
    """Two hundred jobs of all sizes on what `site` has a hard time with."""
    sizes = [1, 1, 2, 4, 8, 16, 1, 12, 1, 32]
    return trace(*((60.0 * place, 400.0 + 37 * (place % 50), sizes[place % len(sizes)]) for place in range(200)))


def site(*, dealt: bool = False) -> SimulatedCluster:
    return generated(SimulatedTree(nodes=24, per_leaf=6, leaves=2, gpus=4, dealt=dealt))


def study(
    policies: tuple[SchedulingPolicy, ...] = tuple(SchedulingPolicy),
    seeds: int = 2,
    settings: StudySettings | None = None,
    *,
    dealt: bool = True,
) -> tuple[Study, StudySettings]:
    settings = settings or StudySettings(jitter_s=100.0)
    where = site(dealt=dealt)
    plan = planned(busy(), where, settings.load)
    runs = [
        run_once(where, plan, policy, seed=seed, settings=settings) for seed in range(seeds) for policy in policies
    ]
    return Study(tuple(runs), plan), settings


def told(seeds: int = 2) -> ReportSubject:
    found, settings = study(seeds=seeds)
    return ReportSubject("jobs.csv", "a <small> tree", ("line 7: nothing",), settings, found)


def test_one_job_has_the_times_it_must_have() -> None:
    settings = StudySettings(jitter_s=0.0)
    where = site()
    plan = planned(trace((0.0, 100.0, 96), (10.0, 50.0, 1), (20.0, 7.0, 8)), where)
    run = run_once(where, plan, SchedulingPolicy.SLURM_TREE, seed=0, settings=settings)
    assert run.figures[Figure(What.WAIT_MEAN, "1 GPU")] == 90.0
    assert run.figures[Figure(What.JCT_MEAN, "8 GPUs")] == 87.0
    assert run.figures[Figure(What.JCT_P95, "more than 64 GPUs")] == 100.0
    assert run.figures[Figure(What.SPAN, CLUSTER)] == 150.0
    assert run.figures[Figure(What.UTILISATION, CLUSTER)] == 100.0
    assert run.figures[Figure(What.LEAVES, WIDE)] == (4 + 1) / 2
    assert Figure(What.WAIT_MEAN, "2-7 GPUs") not in run.figures


def test_the_same_seed_is_the_same_run_and_another_another() -> None:
    where, settings = site(), StudySettings()
    plan = planned(busy(), where)
    for policy in SchedulingPolicy:
        first, again, other = (run_once(where, plan, policy, seed=seed, settings=settings) for seed in (1, 1, 2))
        assert first == again
        assert first.figures != other.figures


def test_deeplink_crosses_no_more_and_steps_no_slower_where_names_are_dealt_over_leaves() -> None:
    found, _ = study((SchedulingPolicy.SLURM_TREE, SchedulingPolicy.DEEPLINK))
    for what in (What.CROSSINGS, What.STEP):
        spread = found.against(SchedulingPolicy.DEEPLINK, SchedulingPolicy.SLURM_TREE, Figure(what, WIDE))
        assert spread is not None
        assert spread.mean < 0
    for policy in found.policies:
        for what in (What.CROSSINGS, What.STEP_OVER_BEST):
            least = What.FEWEST_CROSSINGS if what is What.CROSSINGS else None
            values = found.of(policy, Figure(what, WIDE))
            bounds = found.of(policy, Figure(least, WIDE)) if least else [1.0] * len(values)
            assert all(value >= bound - 1e-9 for value, bound in zip(values, bounds, strict=True))


def test_worse_nodes_lengthen_jobs_only_where_that_is_asked_for() -> None:
    slow = Constants(leaf=LinkSpeed(1e9, 14e-6), spine=LinkSpeed(1e9, 14e-6))
    plain, fast = (
        study((SchedulingPolicy.RANDOM,), 1, StudySettings(jitter_s=0.0, speedup=speedup, constants=slow))[0].runs[
            0
        ]
        for speedup in (False, True)
    )
    jobs = Figure(What.JCT_MEAN, "9-64 GPUs")
    waits = Figure(What.WAIT_MEAN, "9-64 GPUs")
    # 12, 16 and 32 GPUs in turn of ten, each with its own durations.
    durations = [job.duration_s for job in busy().jobs if job.gpus > 8]
    assert plain.figures[jobs] - plain.figures[waits] == pytest.approx(sum(durations) / len(durations))
    assert fast.figures[jobs] - fast.figures[waits] > 1.2 * sum(durations) / len(durations)


def test_a_load_moves_submissions_until_it_is_reached() -> None:
    where = site()
    plan = planned(busy(), where, 0.5)
    last = plan.work[-1].submit_s
    busy_for = (one.shape.all_gpus * min(one.duration_s, last - one.submit_s) for one in plan.work)
    assert sum(busy_for) / (24 * 4 * last) == pytest.approx(0.5)
    twice = planned(busy(), where, 0.25).work[-1].submit_s
    assert twice > 1.5 * last
    with pytest.raises(SimulationValueError, match="one moment"):
        planned(trace((0.0, 1.0, 1), (0.0, 1.0, 1)), where, 0.5)
    with pytest.raises(SimulationValueError, match="for a load of 1e-300 the jobs would have to come"):
        planned(busy(), where, 1e-300)


def test_a_load_that_jobs_cannot_make_is_refused_and_said() -> None:
    long = trace(*((60.0 * place, 1e6, 1) for place in range(48)))
    with pytest.raises(SimulationValueError, match="48 jobs keep 96 GPUs busy to 25% at most"):
        planned(long, site(), 0.3)
    run = run_once(
        site(), planned(long, site(), 0.2), SchedulingPolicy.PACK, seed=0, settings=StudySettings(jitter_s=0.0)
    )
    assert run.figures[Figure(What.UTILISATION, CLUSTER)] == pytest.approx(20.0)


def test_time_begins_with_the_first_job_that_fits() -> None:
    plan = planned(trace((0.0, 1.0, 97), (50.0, 1.0, 1), (60.0, 1.0, 1)), site())
    assert [one.submit_s for one in plan.work] == [0.0, 10.0]


def test_jobs_that_fit_on_no_empty_cluster_are_left_out_and_counted() -> None:
    plan = planned(trace((0.0, 1.0, 1), (0.0, 1.0, 97)), site())
    assert (len(plan.work), plan.too_great) == (1, 1)
    with pytest.raises(SimulationValueError, match="no job of the trace fits"):
        planned(trace((0.0, 1.0, 97)), site())


def test_a_cluster_of_nothing_or_too_much_is_an_error() -> None:
    for tree in (
        SimulatedTree(nodes=0),
        SimulatedTree(nodes=4097),
        SimulatedTree(nodes=4, per_leaf=0),
        SimulatedTree(nodes=4, gpus=0),
    ):
        with pytest.raises(SimulationValueError):
            generated(tree)
    with pytest.raises(SimulationValueError):
        site_of(Network(), None, "nothing")


def test_the_interval_of_a_mean() -> None:
    # Student's t of two degrees of freedom, 4.303, times 1 / sqrt(3).
    assert spread_of([1.0, 2.0, 3.0]).half == pytest.approx(2.4843, abs=1e-4)
    assert spread_of([5.0]).half == math.inf
    # 1.984 of 99 degrees of freedom (and not 1.96), times the deviation of 0 to 99 over 10.
    assert spread_of([float(value) for value in range(100)]).half == pytest.approx(5.757, abs=1e-3)
    assert difference([3.0, 5.0], [1.0, 3.0]) == FigureSpread(2.0, 0.0, 2)


@pytest.mark.parametrize(
    ("spread", "said"),
    [
        (FigureSpread(-2.0, 1.0, 3), "better"),
        (FigureSpread(2.0, 1.0, 3), "worse"),
        (FigureSpread(0.5, 1.0, 3), "no difference to be seen"),
        (FigureSpread(0.0, 0.0, 3), "the same"),
        (FigureSpread(-2.0, math.inf, 1), "one seed"),
    ],
)
def test_a_difference_in_words(spread: FigureSpread, said: str) -> None:
    assert verdict(spread) == said


def test_every_table_has_a_column_for_each_policy() -> None:
    for table in tables(told()):
        assert all(len(row) == len(table.header) for row in table.rows)
        if table.title != "deeplink minus slurm-tree":
            assert table.header[-4:] == tuple(map(str, SchedulingPolicy))
    assert "±" not in as_text(told(seeds=1)).split("### ", 1)[1]
    assert about(None) == "-"


def test_the_page_holds_all_tables_and_plots_and_fetches_nothing() -> None:
    report = told()
    page = as_html(report, "deeplink simulate 'a b.csv' <x>")
    assert "&lt;x&gt;" in page
    assert "a &lt;small&gt; tree" in page
    assert "<script" not in page
    assert "http" not in page
    assert page.count("<svg") == len(plots(report)) == 8
    for plot in plots(report):
        root = ET.fromstring(plot)  # noqa: S314 - our own
        assert all(
            "nan" not in value and "inf" not in value for one in root.iter() for value in one.attrib.values()
        )


def test_json_has_every_figure_of_every_run() -> None:
    report = told()
    found = json.loads(json.dumps(document(report)))
    assert [(run["policy"], run["seed"]) for run in found["runs"]] == [
        (str(policy), seed) for seed in range(2) for policy in SchedulingPolicy
    ]
    assert found["left_out"] == {"rows": ["line 7: nothing"], "too_great": 0}
    assert sum(found["jobs"].values()) == 200
    assert len(found["runs"][0]["figures"]) == len(report.study.runs[0].figures)


def test_a_study_of_narrow_jobs_alone_has_a_report_too() -> None:
    where, settings = site(), StudySettings()
    plan = planned(trace((0.0, 1.0, 1), (5.0, 1.0, 1)), where)
    runs = tuple(run_once(where, plan, policy, seed=0, settings=settings) for policy in SchedulingPolicy)
    report = ReportSubject("jobs.csv", "tree", (), settings, Study(runs, plan))
    assert "Jobs over one node" not in as_html(report, "x")
    assert len(plots(report)) == 6
    alone = dataclasses.replace(report, study=Study(runs[:1], StudyPlan(plan.work, 0)))
    assert "minus" not in as_text(alone)
