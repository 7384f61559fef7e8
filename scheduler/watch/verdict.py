"""What a verdict is: one thing that is wrong, why we think so, and what is to be done. `judge` reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import IncidentKind, incident_id

if TYPE_CHECKING:
    from deeplink.types import Attempt, NodeName


class Remedy(StrEnum):
    """What is to be done about a verdict."""

    NOTHING = "nothing"
    COMMENT = "comment"  # on the node, for who looks at it: its work goes on, and it gets more
    HOLD = "hold"  # the job, with the reason: started again it would fail again
    DRAIN = "drain"
    DRAIN_DOWN = "drain-down"
    RESTART = "restart"
    RESUME = "resume"


_OF_A_LOST_NODE = frozenset(
    {IncidentKind.NODE_DEAD, IncidentKind.NODE_REBOOTED, IncidentKind.JOB_STRANDED, IncidentKind.LAUNCHER_LOST}
)
"""Kinds that, with one attempt and one node to blame, are one incident: the loss of that node."""


_OF_NO_JOB = frozenset(
    {
        IncidentKind.SWITCH_SUSPECT,
        IncidentKind.STORAGE_FROZEN,
        IncidentKind.AGENTS_SILENT,
        IncidentKind.SLURMD_LOST,
    }
)
"""Kinds that are one incident, however many jobs they hit, and whichever of them comes and goes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong, why we think so, and what is to be done.

    Attributes:
        attempt: the attempt it ends or threatens; None where it is about no job of ours.
        node: the node to blame; None when none is.
        leaf: the leaf switch to blame; empty when none is.
        reasons: the evidence, for people.
        since_s: how long ago the first evidence was seen.
        exclude: nodes that the job is not to be started on again.
        episode: which time of several, for what may come, pass and come again; whoever keeps the record knows it.
    """

    kind: IncidentKind
    remedy: Remedy
    reasons: tuple[str, ...]
    attempt: Attempt | None = None
    node: NodeName | None = None
    leaf: str = ""
    since_s: float = 0.0
    exclude: tuple[NodeName, ...] = ()
    episode: str = ""

    @property
    def family(self) -> IncidentKind:
        """The kind that names the incident: a job stranded by a dead node, or a switch, is that one's."""
        if self.leaf:
            return IncidentKind.SWITCH_SUSPECT
        return IncidentKind.NODE_DEAD if self.node and self.kind in _OF_A_LOST_NODE else self.kind

    @property
    def incident(self) -> str:
        """The id of the incident this belongs to."""
        about = self.leaf or self.node or ""
        attempt = None if self.family in _OF_NO_JOB else self.attempt
        return incident_id(attempt, self.family, about) + (f"@{self.episode}" if self.episode else "")

    @property
    def incident_kind(self) -> IncidentKind:
        """The kind of the incident, as it is recorded: of a lost node also in which way it was."""
        return IncidentKind.NODE_REBOOTED if self.kind is IncidentKind.NODE_REBOOTED else self.family

    @property
    def key(self) -> str:
        """The name of the action: the same verdict has the same key, whoever reaches it."""
        which = f"/{self.node}" if self.leaf and self.node else ""
        whose = f"/{self.attempt}" if self.remedy is Remedy.RESTART and self.family in _OF_NO_JOB else ""
        return f"{self.incident}/{self.kind}/{self.remedy}{which}{whose}"

    @property
    def passes(self) -> bool:
        """Whether what it is about may pass by itself, and come again: each time is an incident of its own."""
        return self.family in PASSING


PASSING = frozenset(
    {
        IncidentKind.NODE_SICK,
        IncidentKind.SLURMD_LOST,
        IncidentKind.STORAGE_FROZEN,
        IncidentKind.AGENTS_SILENT,
        IncidentKind.GRES_LEAKED,
        IncidentKind.SWITCH_SUSPECT,
    }
)
