"""What is to be said about a topology: by who read it, and by who checked it; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from deeplink.text import printable


class TopologyFindingKind(Enum):
    """What kind of thing was found."""

    UNREADABLE = "unreadable"
    """A line, or a part of it, was passed over."""
    DUPLICATE = "duplicate"
    MISSING = "missing"
    """A node of the cluster is not in the topology."""
    UNKNOWN = "unknown"
    """The topology names what is not there."""
    LOOSE = "loose"
    """A node hangs on no switch, though others do."""
    DISCONNECTED = "disconnected"
    DEGRADED = "degraded"
    ONE_SIDED = "one-sided"
    """Only one end of a cable was heard."""
    NO_TOPOLOGY = "no topology"
    FLAT = "flat"
    UNNAMED = "unnamed"
    APART = "kept apart"
    UNEVEN = "uneven"
    EMPTY = "empty"
    TAKEN = "taken as"
    """Something was read as what it is not quite."""

    @property
    def problem(self) -> bool:
        """Whether something should be mended; otherwise it is worth knowing."""
        return self not in _NOTES


_NOTES = {
    TopologyFindingKind.FLAT,
    TopologyFindingKind.UNNAMED,
    TopologyFindingKind.APART,
    TopologyFindingKind.UNEVEN,
    TopologyFindingKind.EMPTY,
    TopologyFindingKind.TAKEN,
}


@dataclass(frozen=True, slots=True)
class TopologyFinding:
    """One thing that was found.

    Attributes:
        text: what, for people.
        source: the file or the command it was read from; empty where it came of the whole graph.
        line: the line there, from 1; 0 where no single line is meant.
    """

    kind: TopologyFindingKind
    text: str
    source: str = ""
    line: int = 0

    @override
    def __str__(self) -> str:
        where = f"{self.source}:{self.line}: " if self.line else f"{self.source}: " if self.source else ""
        return printable(f"{where}{self.kind.value}: {self.text}")
