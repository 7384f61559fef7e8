"""A job's constants from its measured steps; pure.

Nine constants are free, whatever the number of measurements: fixed and per-sample seconds, overlap, the bandwidth
inside a node, of a path between two nodes and of a node's ports, and what sharing the host, sharing the ports and
waiting for the slowest cost. None belongs to a placement. Latencies stay as they are: steps of whole models are
hardly moved by them. Only bandwidth relative to `gradient_bytes` can be seen in step times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model import (
    LinkSpeed,
    above_zero,
    not_below_zero,
)
from deeplink.scheduler.placement.predicted import Demands, demands, estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.placement.model import Constants, Job, Placement
    from deeplink.scheduler.placement.predicted import Floats


# Nonlinear least squares by Levenberg and Marquardt: damped, bounded by priors, deaf to outliers; pure.


class TooFewMeasurementsError(DeepLinkError):
    """Step times were to be fitted, and there are hardly any."""

    def __init__(self, there: int, wanted: int) -> None:
        super().__init__(
            f"{there} measured step times, but a fit needs {wanted}",
            remedy="Measure other batch sizes or other placements, or predict with the default constants.",
            exit_code=2,
        )


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


FREE = (
    "fixed seconds",
    "seconds of a sample",
    "overlap",
    "bandwidth inside a node",
    "bandwidth of a path",
    "bandwidth of the ports, in paths",
    "host contention",
    "NIC sharing",
    "straggling",
)
"""What a fit is free to choose."""

_FEWEST = 3
_NOISE = 0.1  # of one measured step, relative: what measurements of one placement at other moments differ by
_LOOSE, _TIGHT = 3.0, 1.0  # widths of the priors: of what depends on the job, of what should not much
_FASTEST = 1e15  # bytes a second: stands for "no limit", which has no logarithm
_SCALES = ("fixed", "sample", "gpu", "path")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured step time: where, how many samples on each GPU, how many seconds."""

    placement: Placement
    batch: float
    step_s: float

    def __post_init__(self) -> None:
        for what, value in (("the measured batch", self.batch), ("the measured step time", self.step_s)):
            above_zero(what, value)
            not_below_zero(what, value)  # and finite


@dataclass(frozen=True, slots=True)
class Observed:
    """Measurements in the form that fits are made from: make it once, and take rows of it.

    Attributes:
        asked: what each measured placement asks of the machines.
        step_s: the measured seconds.
    """

    asked: Demands
    step_s: Floats

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Observed:
        """Return them in this form."""
        asked = demands([one.placement for one in measurements], [one.batch for one in measurements])
        return cls(asked, np.array([one.step_s for one in measurements], float))

    def rows(self, chosen: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Observed:
        """Return some of the measurements, chosen by index or by mask."""
        return Observed(self.asked.rows(chosen), self.step_s[chosen])


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A job and constants that predict its measured steps.

    Attributes:
        job: the job, with the fitted seconds and overlap.
        constants: the constants, with the fitted bandwidths and shares.
        values: the free values as the solver has them, to start another fit from.
        spread: the typical relative error on the measurements fitted (median of the absolute).
    """

    job: Job
    constants: Constants
    values: Floats
    spread: float

    def step_s(self, asked: Demands) -> Floats:
        """Return the predicted steps of many placements, in seconds."""
        return estimate(self.job, self.constants, asked).step


def fit(
    measurements: Sequence[Measurement] | Observed,
    job: Job,
    constants: Constants,
    start: FittedModel | None = None,
) -> FittedModel:
    """Return what predicts the measured steps of one job best, without straying from what is likely.

    Residuals are of logarithms, so that an error counts by its share of the step. Each free constant is drawn to
    a likely value: `job` and `constants` give those of overlap, contention, sharing and straggling, the
    measurements the order of magnitude of the rest. Of what they do not show (no step on two nodes, say) the
    likely value remains.

    Args:
        measurements: at least 3; better of one GPU, one node, two nodes, and more, at several batch sizes.
        job: the job as far as it is known: its gradients' bytes, and how they are summed.
        constants: the latencies, and likely values.
        start: an earlier fit of nearly the same measurements, to be done sooner.

    Raises:
        TooFewMeasurementsError: there are fewer than three.
    """
    seen = measurements if isinstance(measurements, Observed) else Observed.of(measurements)
    if len(seen.step_s) < _FEWEST:
        raise TooFewMeasurementsError(len(seen.step_s), _FEWEST)
    likely = _likely(seen, job, constants)
    wanted = np.log(seen.step_s)

    def residuals(values: Floats) -> Floats:
        return (np.log(estimate(*_with(values, job, constants), seen.asked).step) - wanted) / _NOISE

    values = least_squares(residuals, likely, None if start is None else start.values)
    fitted_job, fitted_constants = _with(values, job, constants)
    left = residuals(values) * _NOISE
    return FittedModel(fitted_job, fitted_constants, values, float(np.median(np.abs(left))))


def _with(values: Floats, job: Job, constants: Constants) -> tuple[Job, Constants]:
    fixed, sample, gpu, path, host, sharing, straggling = (float(value) for value in np.exp(values[:7]))
    overlap, more = (float(value) for value in 1 / (1 + np.exp(-values[7:])))
    return (
        replace(job, fixed_s=fixed, sample_s=sample, overlap=overlap),
        replace(
            constants,
            gpu=LinkSpeed(gpu, constants.gpu.latency_s),
            path_bandwidth=path,
            # Beyond two paths' worth the ports are no limit, and no step shows how fast they are.
            nic=LinkSpeed(path * (1 + more) / constants.nics, constants.nic.latency_s),
            host_contention=host,
            nic_sharing=sharing,
            straggling=straggling,
        ),
    )


def _likely(seen: Observed, job: Job, constants: Constants) -> Prior:
    asked, step_s = seen.asked, seen.step_s
    few = asked.ranks == asked.ranks.min()
    batch, alone = asked.batch[few], step_s[few]
    apart, each = float(np.ptp(batch)), float(np.median(alone / batch))
    # Of one batch size nobody can tell what is fixed and what goes with the samples: half of each.
    slope = float(np.ptp(alone)) / apart if apart > 0 else each / 2
    sample = max(slope, 1e-3 * each)
    fixed = max(float(alone.min() - sample * batch.min()), 0.05 * float(alone.min()))
    gradient = max(job.gradient_bytes, 1.0)
    known = [min(link.bandwidth, _FASTEST) for link in (constants.gpu, constants.nic)]
    several, inside = asked.nodes > 1, (asked.nodes == 1) & (asked.ranks > 1)
    # The least that steps of small batches on several nodes take is mostly the all-reduce, 2(p-1)/p of the bytes.
    path = gradient / float(np.quantile(step_s[several], 0.25)) if several.any() else known[1]
    gpu = 10 * gradient / float(step_s[inside].min()) if inside.any() else known[0]
    middle = [
        *np.log([fixed, sample, gpu, path]),
        *np.log([max(x, 1e-3) for x in (constants.host_contention, constants.nic_sharing, constants.straggling)]),
        _logit(job.overlap),
        0.0,  # one and a half paths: as likely as not
    ]
    width = [_LOOSE] * len(_SCALES) + [_TIGHT] * (len(middle) - len(_SCALES))
    return Prior(middle=np.array(middle), width=np.array(width))


def _logit(share: float) -> float:
    inside = min(max(share, 0.01), 0.99)
    return float(np.log(inside / (1 - inside)))


# What measurements on the same nodes say beyond the model; pure.


@dataclass(frozen=True, slots=True)
class Scatter:
    """How much of what the model leaves over is whose: variances of log step time.

    Attributes:
        between: of the allocations' effects.
        within: of single measurements on one allocation.
    """

    between: float
    within: float

    def effect(self, left_over: Sequence[float] | Floats) -> float:
        """Return the effect of an allocation, as a difference of log step time.

        Args:
            left_over: log(measured / predicted) of what was measured there; may be empty.
        """
        if len(left_over) == 0 or self.between <= 0:
            return 0.0
        return float(self.between * np.sum(left_over) / (self.between * len(left_over) + self.within))


def scatter(left_over: Floats, allocations: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Scatter:
    """Return the two variances, estimated by analysis of variance.

    Searle, Casella and McCulloch, Variance Components, 1992, for one random factor of unequal numbers.

    Args:
        left_over: log(measured / predicted) of each measurement.
        allocations: the number of the allocation that each was made on.
    """
    _, inverse, counts = np.unique(allocations, return_inverse=True, return_counts=True)
    groups, total = len(counts), len(left_over)
    if groups < 2 or total <= groups:  # noqa: PLR2004 (with one group, or one measurement each, nobody can tell)
        return Scatter(0.0, float(np.var(left_over)) if total else 0.0)
    means = np.bincount(inverse, weights=left_over) / counts
    within = float(((left_over - means[inverse]) ** 2).sum() / (total - groups))
    typical = (total - (counts**2).sum() / total) / (groups - 1)
    across = float((counts * (means - left_over.mean()) ** 2).sum() / (groups - 1))
    return Scatter(max((across - within) / float(typical), 0.0), within)
