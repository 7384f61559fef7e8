"""How much of a version is where, counted from what members say they have verified. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import ownership

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.cache.index import Index
    from deeplink.types import NodeName, ShardId


@dataclass(frozen=True, slots=True)
class NodeResidency:
    """What one member holds of a version.

    Attributes:
        node: its name.
        answered: whether it said anything.
        owned: shards it is to hold.
        owned_verified: of those, the ones it has verified.
        present, verified: shards of the version it holds, and has verified.
        bytes, verified_bytes: of those.
    """

    node: NodeName
    answered: bool
    owned: int
    owned_verified: int
    present: int
    verified: int
    bytes: int
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class VersionResidency:
    """How much of a version is cached.

    Attributes:
        shards, bytes: of the version in all.
        cached_shards, cached_bytes: of which some member has a verified copy.
        whole_shards: of which as many members have a verified copy as there are to be.
        copies: how many there are to be of each.
        nodes: per member, in the order of their names.
    """

    shards: int
    bytes: int
    cached_shards: int
    cached_bytes: int
    whole_shards: int
    copies: int
    nodes: tuple[NodeResidency, ...]

    @property
    def percent(self) -> float:
        """Share of the version's bytes that is cached, in per cent; never rounded up to 100."""
        if self.cached_shards == self.shards:
            return 100.0
        return min(100.0 * self.cached_bytes / self.bytes, 99.9) if self.bytes else 0.0


def residency(
    index: Index,
    stats: Mapping[NodeName, Mapping[ShardId, bool] | None],
    *,
    replicas: int,
    known: ownership.MemberAttributes | None = None,
) -> VersionResidency:
    """Return how much of a version is where.

    Args:
        index: the version.
        stats: per member, the shards it holds and whether it has verified them; None for who did not answer.
        replicas: copies there are to be of each shard.
        known: the members' weights and domains.
    """
    entries = list(index.shards)
    size = {entry.id: entry.bytes for entry in entries}
    verified = {
        node: {shard for shard, is_verified in (held or {}).items() if is_verified and shard in size}
        for node, held in stats.items()
    }
    copies = min(replicas, len(stats))
    count = {shard: sum(shard in held for held in verified.values()) for shard in size}
    owned: dict[NodeName, set[ShardId]] = {node: set() for node in stats}
    for shard in size:
        for node in ownership.owners(shard, stats, copies, known or ownership.MemberAttributes()):
            owned[node].add(shard)
    nodes = []
    for node in sorted(stats):
        present = {shard for shard in stats[node] or {} if shard in size}
        nodes.append(
            NodeResidency(
                node=node,
                answered=stats[node] is not None,
                owned=len(owned[node]),
                owned_verified=len(owned[node] & verified[node]),
                present=len(present),
                verified=len(verified[node]),
                bytes=sum(size[shard] for shard in present),
                verified_bytes=sum(size[shard] for shard in verified[node]),
            )
        )
    cached = [shard for shard in size if count[shard]]
    return VersionResidency(
        shards=len(size),
        bytes=sum(size.values()),
        cached_shards=len(cached),
        cached_bytes=sum(size[shard] for shard in cached),
        whole_shards=sum(1 for shard in size if count[shard] >= copies),
        copies=copies,
        nodes=tuple(nodes),
    )
