"""Effects of allocations: variances found again, shrinkage by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.model_fit import Scatter, scatter


def test_the_two_variances_are_found_again() -> None:
    dice = np.random.default_rng(3)
    allocations = np.repeat(np.arange(400), 6)
    found = scatter(dice.normal(0, 0.2, 400)[allocations] + dice.normal(0, 0.1, 2400), allocations)
    assert found.between == pytest.approx(0.04, rel=0.15)
    assert found.within == pytest.approx(0.01, rel=0.1)


def test_noise_alone_is_no_effect() -> None:
    dice = np.random.default_rng(4)
    found = scatter(dice.normal(0, 0.1, 600), np.repeat(np.arange(100), 6))
    assert found.between < 0.001


def test_an_effect_is_shrunk_by_how_much_is_noise() -> None:
    # As much noise as effect: of one measurement half is believed, of three three quarters of the mean.
    assert Scatter(0.01, 0.01).effect([0.2]) == pytest.approx(0.1)
    assert Scatter(0.01, 0.01).effect([0.2, 0.2, 0.2]) == pytest.approx(0.15)


def test_nothing_measured_is_no_effect() -> None:
    assert Scatter(0.01, 0.01).effect([]) == 0
    assert Scatter(0.0, 0.01).effect([0.3]) == 0


def test_one_allocation_or_one_measurement_each_tell_nothing() -> None:
    assert scatter(np.array([0.1, 0.3]), np.array([7, 7])).between == 0
    assert scatter(np.array([0.1, 0.3]), np.array([7, 8])).between == 0
    assert scatter(np.array([]), np.array([], int)) == Scatter(0.0, 0.0)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_an_effect_is_never_more_than_what_was_seen(between: float, within: float, seen: list[float]) -> None:
    assert abs(Scatter(between, within).effect(seen)) <= abs(np.mean(seen)) + 1e-12
