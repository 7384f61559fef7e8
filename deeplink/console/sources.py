"""A source of facts: whether it answers, when it last did, and why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.core.errors import DeepLinkError


class SourceState(Enum):
    """State of a source of facts."""

    OK = "ok"
    FAILING = "failing"  # the last question was not answered; older facts may still be shown, with their age
    WAITING = "waiting"  # not answered yet
    OFF = "off"  # it is not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """A source of facts."""

    name: str
    title: str  # on the page; sources with one title are shown as one
    state: SourceState
    period_s: float  # how often it is asked
    at_unix: float = 0.0  # when it last answered; 0: never
    problem: str = ""
    remedy: str = ""

    def answered(self, unix: float) -> FactSource:
        """Return it after a good answer."""
        return replace(self, state=SourceState.OK, at_unix=unix, problem="", remedy="")

    def failed(self, problem: DeepLinkError) -> FactSource:
        """Return it after a question that was not answered."""
        said = str(problem).strip().splitlines()
        # Slurm's commands end with what was fatal; the lines before are its way there.
        return replace(self, state=SourceState.FAILING, problem=said[-1] if said else "", remedy=problem.remedy)
