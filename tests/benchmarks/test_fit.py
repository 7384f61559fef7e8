"""The fit: it finds constants that made the data, predicts what it has not seen, and says when it cannot."""

from __future__ import annotations

import statistics
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.model_fit import FREE, Measurement, Observed, TooFewMeasurementsError, fit
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import (
    Constants,
    Job,
    LinkSpeed,
)
from deeplink.scheduler.placement.predicted import predict
from tests.effort import examples
from tests.scheduler.placement.models import placement

SHAPES = [
    "1",
    "2",
    "3",
    "4",
    "11",
    "12",
    "22",
    "13",
    "33",
    "44",
    "111",
    "222",
    "334",
    "1111",
    "1234",
    "3333",
    "4444",
]
BATCHES = (8, 16, 32, 64, 128)
JOB = Job(batch=1, sample_s=0.002, fixed_s=0.03, gradient_bytes=1e8, overlap=0.4)
TRUTH = Constants(
    gpu=LinkSpeed(6e9, 5.7e-6),
    nic=LinkSpeed(1.5e9, 14e-6),
    path_bandwidth=1e9,
    nic_sharing=0.05,
    host_contention=0.15,
    straggling=0.1,
)
UNKNOWN = Job(batch=1, sample_s=1.0, gradient_bytes=1e8)


def measured(job: Job, truth: Constants, noise: float, seed: int = 0) -> list[Measurement]:
    dice = np.random.default_rng(seed)
    return [
        Measurement(
            placement(shape),
            batch,
            predict(replace(job, batch=batch), placement(shape), truth).step_s
            * float(np.exp(dice.normal(0, noise))),
        )
        for shape in SHAPES
        for batch in BATCHES
    ]


def test_constants_are_recovered_through_noise() -> None:
    found = fit(measured(JOB, TRUTH, 0.03), UNKNOWN, Constants())
    assert found.job.sample_s == pytest.approx(JOB.sample_s, rel=0.05)
    assert found.job.fixed_s == pytest.approx(JOB.fixed_s, rel=0.2)
    assert found.job.overlap == pytest.approx(JOB.overlap, abs=0.1)
    assert found.constants.path_bandwidth == pytest.approx(TRUTH.path_bandwidth, rel=0.15)
    assert found.constants.nic.bandwidth == pytest.approx(TRUTH.nic.bandwidth, rel=0.15)
    assert found.constants.host_contention == pytest.approx(TRUTH.host_contention, abs=0.06)
    assert found.constants.straggling == pytest.approx(TRUTH.straggling, abs=0.06)
    assert found.spread == pytest.approx(0.03 * 0.6745, rel=0.3)  # the median of a normal's absolute


def test_without_noise_hardly_anything_is_left_over() -> None:
    assert fit(measured(JOB, TRUTH, 0.0), UNKNOWN, Constants()).spread < 0.01


@given(
    st.floats(1e-4, 1e-1),
    st.floats(1e-3, 1.0),
    st.floats(0.05, 0.9),
    st.tuples(st.floats(1e7, 1e10), st.floats(1.05, 1.95)),
    st.integers(0, 100),
)
@settings(max_examples=examples(25))
def test_shapes_left_out_are_predicted(
    sample: float, fixed: float, overlap: float, speed: tuple[float, float], seed: int
) -> None:
    path, more = speed
    job = replace(JOB, sample_s=sample, fixed_s=fixed, overlap=overlap)
    truth = replace(TRUTH, path_bandwidth=path, nic=LinkSpeed(path * more, 14e-6), gpu=LinkSpeed(path * 8, 5.7e-6))
    every = measured(job, truth, 0.05, seed)
    left_out = {placement(shape) for shape in ("222", "44", "1234")}
    found = fit([one for one in every if one.placement not in left_out], UNKNOWN, Constants())
    errors = []
    for one in every:
        if one.placement in left_out:
            true = predict(replace(job, batch=int(one.batch)), one.placement, truth).step_s
            seen = predict(replace(found.job, batch=int(one.batch)), one.placement, found.constants).step_s
            errors.append(abs(seen / true - 1))
    # Of 1,500 draws the worst single one was 16 % off, the worst median 3 %.
    assert max(errors) < 0.25
    assert statistics.median(errors) < 0.06


def test_the_better_placement_is_chosen_unseen() -> None:
    """Two half-full nodes against four: no step on either was measured."""
    every = [
        one for one in measured(JOB, TRUTH, 0.03) if one.placement not in {placement("22"), placement("1111")}
    ]
    found = fit(every, UNKNOWN, Constants())
    half, four = (
        predict(replace(found.job, batch=8), placement(s), found.constants).step_s for s in ("22", "1111")
    )
    assert four < half


def test_outliers_do_not_bend_it() -> None:
    every = measured(JOB, TRUTH, 0.02)
    every[::9] = [replace(one, step_s=one.step_s * 5) for one in every[::9]]
    assert fit(every, UNKNOWN, Constants()).spread < 0.05


def test_what_was_not_measured_keeps_its_default() -> None:
    inside = [one for one in measured(JOB, TRUTH, 0.02) if len(one.placement.nodes) == 1]
    found = fit(inside, UNKNOWN, Constants())
    assert found.constants.straggling == pytest.approx(Constants().straggling, rel=1e-3)
    assert found.constants.path_bandwidth == pytest.approx(Constants().nic.bandwidth, rel=1e-3)
    assert found.job.sample_s == pytest.approx(JOB.sample_s, rel=0.1)


def test_constants_without_limit_are_no_hindrance() -> None:
    inside = [one for one in measured(JOB, TRUTH, 0.02) if len(one.placement.nodes) == 1]
    endless = replace(Constants(), nic=LinkSpeed(inf, 14e-6), gpu=LinkSpeed(inf, 5.7e-6))
    assert fit(inside, UNKNOWN, endless).spread == pytest.approx(fit(inside, UNKNOWN, Constants()).spread)
    alone = [one for one in inside if one.placement.ranks == 1]
    assert fit(alone, UNKNOWN, endless).job.sample_s == pytest.approx(JOB.sample_s, rel=0.1)


def test_one_batch_size_is_enough_to_compare_placements_at_it() -> None:
    every = [one for one in measured(JOB, TRUTH, 0.03) if one.batch == 32]
    left_out = placement("222")
    found = fit([one for one in every if one.placement != left_out], UNKNOWN, Constants())
    assert found.spread < 0.05
    seen = predict(replace(found.job, batch=32), left_out, found.constants).step_s
    assert seen == pytest.approx(predict(replace(JOB, batch=32), left_out, TRUTH).step_s, rel=0.1)


def test_a_fit_from_an_earlier_one_is_nearly_the_same_fit() -> None:
    """Not exactly: where hiding begins and ends the loss has edges, and steps may stop on one."""
    seen = Observed.of(measured(JOB, TRUTH, 0.05))
    whole = fit(seen, UNKNOWN, Constants())
    fewer = seen.rows(list(range(1, len(seen.step_s))))
    np.testing.assert_allclose(
        fit(fewer, UNKNOWN, Constants(), start=whole).step_s(seen.asked),
        fit(fewer, UNKNOWN, Constants()).step_s(seen.asked),
        rtol=0.02,
    )


def test_there_are_nine_free_constants() -> None:
    found = fit(measured(JOB, TRUTH, 0.05), UNKNOWN, Constants())
    assert len(found.values) == len(FREE) == 9


def test_two_measurements_are_too_few() -> None:
    with pytest.raises(TooFewMeasurementsError, match="2 measured step times, but a fit needs 3"):
        fit(measured(JOB, TRUTH, 0)[:2], UNKNOWN, Constants())


@pytest.mark.parametrize(("batch", "step_s"), [(0, 1.0), (inf, 1.0), (1, 0.0), (1, inf), (1, nan)])
def test_measurements_that_cannot_be_are_refused(batch: float, step_s: float) -> None:
    with pytest.raises(DeepLinkError, match=", but must be "):
        Measurement(placement("1"), batch, step_s)
