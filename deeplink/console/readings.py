"""What the sources said, as values: Slurm's answers and the journal's rows, before any conclusion."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.slurm.parse import JobRow, NodeRow, SwitchRow
    from deeplink.scheduler.watch.records import Incident, JobRecord, NodeRecord, ProgressPoint


class SourceState(Enum):
    """How a source of facts is."""

    OK = "ok"
    FAILING = "failing"  # the last question was not answered; older facts may still be shown, with their age
    WAITING = "waiting"  # not answered yet
    OFF = "off"  # nobody asks


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """A source of facts.

    Attributes:
        title: what the page calls it; sources with one title are shown as one.
        at_unix: when it last answered; 0: never.
        period_s: how often it is asked.
        problem: why it does not answer.
    """

    name: str
    title: str
    state: SourceState
    period_s: float
    at_unix: float = 0.0
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """What Slurm last answered, each kind from its own last good answer."""

    cluster: str = ""
    nodes: tuple[NodeRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    switches: tuple[SwitchRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """What the journal holds: the newest jobs and incidents, and per job the reports of its rank 0."""

    jobs: tuple[JobRecord, ...] = ()
    curves: Mapping[int, tuple[ProgressPoint, ...]] = field(default_factory=dict)
    nodes: tuple[NodeRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything a snapshot is made from."""

    unix: float
    interval_s: float
    sources: tuple[FactSource, ...]
    slurm: SlurmFacts = SlurmFacts()
    journal: JournalFacts = field(default_factory=JournalFacts)

    def source(self, name: str) -> FactSource:
        """Return one source.

        Raises:
            KeyError: nobody reads such a source.
        """
        for source in self.sources:
            if source.name == name:
                return source
        raise KeyError(name)
