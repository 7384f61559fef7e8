"""Where nodes hang and what is slow there, compiled once into a small JSON that sbatch can read at once; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from deeplink.errors import DeepLinkError
from deeplink.scheduler.placement.request import Speeds
from deeplink.scheduler.topology.graph import Fabric
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1


class CompiledError(DeepLinkError):
    """A compiled topology is damaged, or of another version: it is made anew."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"a compiled topology cannot be read: {problem}", remedy="It is made anew.")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Ties:
    """Where nodes hang, and what is slow there.

    Attributes:
        fabric: the switches above each node.
        speeds: nodes and links below full speed.
        dead: nodes without a link that works.
    """

    fabric: Fabric = field(default_factory=lambda: Fabric({}))
    speeds: Speeds = field(default_factory=Speeds)
    dead: frozenset[NodeName] = frozenset()

    def document(self) -> dict[str, Any]:
        """Return what `parse` reads, for `json.dumps`: each path once, with its nodes."""
        below: dict[tuple[str, ...], list[NodeName]] = {}
        for node, path in self.fabric.paths.items():
            below.setdefault(path, []).append(node)
        return {
            "format": FORMAT,
            "leaves": [[list(path), nodes] for path, nodes in below.items()],
            "nodes": dict(self.speeds.nodes),
            "links": [[list(path), share] for path, share in self.speeds.links.items()],
            "dead": sorted(self.dead),
        }

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` gave.

        Raises:
            CompiledError: it is no such thing.
        """
        try:
            if document["format"] != FORMAT:
                raise CompiledError(f"format {document['format']}")
            paths = {NodeName(node): tuple(path) for path, nodes in document["leaves"] for node in nodes}
            links = {tuple(path): float(share) for path, share in document["links"]}
            nodes = {NodeName(node): float(share) for node, share in document["nodes"].items()}
            return cls(Fabric(paths), Speeds(nodes, links), frozenset(map(NodeName, document["dead"])))
        except (KeyError, TypeError, ValueError, AttributeError, DeepLinkError) as problem:
            raise CompiledError(f"{type(problem).__name__}: {problem}") from problem


@dataclass(frozen=True, slots=True)
class KnownFabric:
    """All that is known of a site's fabric.

    Attributes:
        ties: by which placement weighs nodes.
        slurm: what Slurm itself knows: `--switches` counts its leaves.
        notes: what could not be had.
    """

    ties: Ties = field(default_factory=Ties)
    slurm: Fabric = field(default_factory=lambda: Fabric({}))
    notes: tuple[str, ...] = ()
