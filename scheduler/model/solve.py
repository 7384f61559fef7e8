"""Nonlinear least squares by Levenberg and Marquardt: damped, bounded by priors, deaf to outliers; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.model.arrays import Floats

_MOST_STEPS = 60
_MOST_TRIES = 12
_NUDGE = 1e-6
_FARTHEST = 1.0  # of one step: farther than that the slopes say nothing
_ENOUGH = 1e-7  # of the objective: less is not worth another step
_LINEAR_FROM = 1.5  # standard deviations; Huber, Robust Estimation of a Location Parameter, 1964


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed before any measurement.

    Attributes:
        middle: the likeliest values.
        width: the standard deviation of each around them.
    """

    middle: Floats
    width: Floats


def least_squares(residuals: Callable[[Floats], Floats], prior: Prior, start: Floats | None = None) -> Floats:
    """Return the values that make residuals small, without going farther from the prior than these are worth.

    Minimises the sum of Huber's loss of the residuals and half the squared distances from the prior, by
    Levenberg-Marquardt steps (Marquardt, SIAM J. 1963) on numeric slopes.

    Args:
        residuals: the residuals at some values, in standard deviations of a measurement.
        prior: what is believed before.
        start: where to begin; the prior's middle unless told.
    """
    at: Floats = prior.middle.copy() if start is None else start.copy()
    damping = 1e-3
    left = residuals(at)
    loss = _loss(left, at, prior)
    for _ in range(_MOST_STEPS):
        slopes = _slopes(residuals, at, left)
        weight = np.minimum(1.0, _LINEAR_FROM / np.maximum(np.abs(left), 1e-12))
        curve = slopes.T @ (weight[:, None] * slopes) + np.diag(prior.width**-2)
        down = slopes.T @ (weight * left) + (at - prior.middle) / prior.width**2
        for _ in range(_MOST_TRIES):
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -down)
            new = at + np.clip(step, -_FARTHEST, _FARTHEST)
            new_left = residuals(new)
            new_loss = _loss(new_left, new, prior)
            if new_loss < loss:
                break
            damping *= 4
        else:
            return at
        gained = loss - new_loss
        at, left, loss = new, new_left, new_loss
        damping = max(damping / 5, 1e-9)
        if gained < _ENOUGH * loss:
            return at
    return at


def _loss(residuals: Floats, at: Floats, prior: Prior) -> float:
    size = np.abs(residuals)
    huber = np.where(size < _LINEAR_FROM, size**2 / 2, _LINEAR_FROM * (size - _LINEAR_FROM / 2))
    return float(huber.sum() + (((at - prior.middle) / prior.width) ** 2).sum() / 2)


def _slopes(residuals: Callable[[Floats], Floats], at: Floats, here: Floats) -> Floats:
    slopes = np.empty((len(here), len(at)))
    for place in range(len(at)):
        nudged = at.copy()
        nudged[place] += _NUDGE
        slopes[:, place] = (residuals(nudged) - here) / _NUDGE
    return slopes
