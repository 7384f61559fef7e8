"""Least squares: known answers, outliers, priors."""

from __future__ import annotations

import numpy as np

from benchmarks.model_fit import Prior, least_squares
from deeplink.scheduler.placement.predicted import Floats

X = np.linspace(0, 1, 50)


def loose(*middle: float) -> Prior:
    return Prior(middle=np.array(middle), width=np.full(len(middle), 1e3))


def test_a_line_is_found() -> None:
    found = least_squares(lambda at: at[0] + at[1] * X - (2 + 3 * X), loose(0.0, 0.0))
    np.testing.assert_allclose(found, [2, 3], atol=1e-4)


def test_a_curve_is_found_from_afar() -> None:
    found = least_squares(lambda at: at[0] * np.exp(at[1] * X) - 2 * np.exp(1.5 * X), loose(0.1, 0.1))
    np.testing.assert_allclose(found, [2, 1.5], atol=1e-3)


def test_a_few_wild_values_hardly_move_it() -> None:
    seen = np.full(50, 5.0)
    seen[::10] = 500.0
    (found,) = least_squares(lambda at: at[0] - seen, loose(0.0))
    assert 5 <= found < 5.3


def test_without_evidence_the_prior_stays() -> None:
    prior = Prior(middle=np.array([1.0, 7.0]), width=np.array([1.0, 1.0]))

    def residuals(at: Floats) -> Floats:
        return 100 * (at[:1] - 3)

    np.testing.assert_allclose(least_squares(residuals, prior), [3, 7], atol=1e-2)


def test_the_answer_does_not_depend_on_where_it_begins() -> None:
    def residuals(at: Floats) -> Floats:
        left: Floats = at[0] + at[1] * X - (2 + 3 * X)
        return left

    near = least_squares(residuals, loose(0.0, 0.0), np.array([2.1, 2.9]))
    np.testing.assert_allclose(near, least_squares(residuals, loose(0.0, 0.0)), atol=1e-3)
