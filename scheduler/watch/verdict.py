"""What a verdict is: one thing that is wrong, why we think so, and what is to be done. `judge` reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Kind, incident_id

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
    """

    kind: Kind
    remedy: Remedy
    reasons: tuple[str, ...]
    attempt: Attempt | None = None
    node: NodeName | None = None
    leaf: str = ""
    since_s: float = 0.0
    exclude: tuple[NodeName, ...] = ()

    @property
    def incident(self) -> str:
        """The id of the incident this belongs to: a job stranded by a dead node is that node's incident."""
        kind = Kind.NODE_DEAD if self.node else self.kind
        return incident_id(self.attempt, kind, self.node or self.leaf)

    @property
    def key(self) -> str:
        """The name of the action: the same verdict has the same key, whoever reaches it."""
        return f"{self.incident}/{self.kind}/{self.remedy}"
