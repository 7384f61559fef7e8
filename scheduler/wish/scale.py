"""By what choices of nodes are compared: a job's predicted step where enough is known, else weights; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.cost import DEFAULT_COST

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.model.constants import Constants
    from deeplink.scheduler.model.profile import Profile
    from deeplink.scheduler.model.step import StepTime
    from deeplink.scheduler.placement.cost import Cost, Traits
    from deeplink.scheduler.wish.decision import Ask


class Basis(StrEnum):
    """What a cost is, and its unit."""

    WEIGHTS = "weights"  # crossings of a ring of eight nodes
    PREDICTED = "predicted step"  # seconds


@dataclass(frozen=True, slots=True)
class Scale:
    """What choices are compared by.

    Attributes:
        cost: the cost.
        step: the predicted step of a choice; None where none is predicted.
        note: why none is, for a job that has a profile.
    """

    cost: Cost = DEFAULT_COST
    step: Callable[[Traits], StepTime] | None = None
    note: str = ""

    @property
    def basis(self) -> Basis:
        """What the cost is."""
        return Basis.WEIGHTS if self.step is None else Basis.PREDICTED


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """What is known of how fast the machines are.

    Attributes:
        constants: None where nothing is.
        problem: why nothing is.
    """

    constants: Constants | None = None
    problem: str = "no constants of the machines are set (`model`, made by `deeplink calibrate`)"


def scale_of(ask: Ask, machines: MachineSpeeds, *, data: bool) -> Scale:
    """Return what choices are compared by for a job. Imports numpy where its step can be predicted.

    Args:
        ask: what it asks, with its profile.
        machines: the constants.
        data: whether it is known where the job's data lies, and so must count.
    """
    if not ask.profile:
        return Scale()
    if machines.constants is None:
        return _weights(machines.problem)
    try:
        profile = profile_of(ask)
        lacking = _lacking(ask, profile, machines.constants) if data else ""
    except DeepLinkError as problem:
        return _weights(str(problem))
    if lacking:
        return _weights(lacking)
    from deeplink.scheduler.placement.predicted import Predicted  # noqa: PLC0415 - numpy comes with it

    predicted = Predicted(profile.job, machines.constants, profile.ranks(ask.gpus))
    return Scale(predicted, predicted.step)


def profile_of(ask: Ask) -> Profile:
    """Return the profile of a job that has one.

    Raises:
        ProfileError, ModelInputError: it cannot be read.
    """
    from deeplink.scheduler.model.profile import profile_from  # noqa: PLC0415 - most jobs have no profile

    return profile_from(ask.profile, "the job's profile")


def _lacking(ask: Ask, profile: Profile, constants: Constants) -> str:
    from deeplink.scheduler.model.reading import reads_of  # noqa: PLC0415 - as above

    if not profile.job.sample_bytes:
        return "its profile has no sample_bytes, and where its data lies is to count"
    if reads_of(constants.reads, 1.0, ask.nodes) is None:
        return "reading was not timed (`deeplink calibrate --data`), and where its data lies is to count"
    return ""


def _weights(why: str) -> Scale:
    return Scale(note=f"its step is not predicted: {why}")
