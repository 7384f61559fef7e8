"""Which members fetch which shards ahead of a job or of a drain; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import ownership

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from deeplink.cache.index import Index
    from deeplink.types import Member, NodeName, ShardId


@dataclass(frozen=True, slots=True)
class Moves:
    """What is to be brought of one version.

    Attributes:
        index: the version.
        name: its dataset.
        numbers: of the shards, by the member that is to bring them.
        copies: of shards that are to lie there in all, those that do already included.
        silent: nodes that were to have some, and have no agent that answers.
    """

    index: Index
    name: str
    numbers: Mapping[NodeName, tuple[int, ...]]
    copies: int
    silent: tuple[NodeName, ...] = ()

    @property
    def bytes(self) -> int:
        """How much is to be brought."""
        shards = self.index.shards
        return sum(shards[number].bytes for numbers in self.numbers.values() for number in numbers)

    @property
    def shards(self) -> int:
        """How many copies of shards are to be brought."""
        return sum(map(len, self.numbers.values()))


def for_job(
    name: str,
    index: Index,
    nodes: Collection[NodeName],
    members: Sequence[Member],
    held: Mapping[NodeName, Mapping[ShardId, bool] | None],
    *,
    replicas: int,
    domains: Mapping[NodeName, str] | None = None,
) -> Moves:
    """Return what a job's nodes do not have yet of what they will own: the job's members are its nodes.

    Args:
        name: the dataset.
        index: the version.
        nodes: that the job will probably get.
        members: the standing agents, for their weights.
        held: what they hold.
        replicas: copies of each shard.
        domains: what each of the nodes fails together with, as the job's own list of members will have it.
    """
    weight = {member.name: member.weight for member in members if member.name in nodes}
    known = ownership.MemberAttributes(weight, domains or {})
    missing: dict[NodeName, list[int]] = {}
    silent: set[NodeName] = set()
    copies = 0
    for number, entry in enumerate(index.shards):
        for owner in ownership.owners(entry.id, sorted(nodes), replicas, known):
            there = held.get(owner)
            copies += 1
            if there is None:
                silent.add(owner)
            elif not there.get(entry.id, False):
                missing.setdefault(owner, []).append(number)
    return Moves(index, name, _tupled(missing), copies, tuple(sorted(silent)))


def off_node(
    name: str,
    index: Index,
    node: NodeName,
    members: Sequence[Member],
    held: Mapping[NodeName, Mapping[ShardId, bool] | None],
) -> Moves:
    """Return the shards that a node alone holds, each for the member that owns it where that node is no member.

    Args:
        name: the dataset.
        index: the version.
        node: that is to be drained.
        members: the standing agents, it among them.
        held: what they hold.
    """
    own = held.get(node) or {}
    others = {one: there for one, there in held.items() if one != node and there is not None}
    known = ownership.standing(members)
    missing: dict[NodeName, list[int]] = {}
    alone = [
        number
        for number, entry in enumerate(index.shards)
        if entry.id in own and not any(there.get(entry.id, False) for there in others.values())
    ]
    if others:
        for number in alone:
            owner = ownership.owners(index.shards[number].id, sorted(others), 1, known)[0]
            missing.setdefault(owner, []).append(number)
    return Moves(index, name, _tupled(missing), len(alone))


def _tupled(numbers: Mapping[NodeName, Iterable[int]]) -> dict[NodeName, tuple[int, ...]]:
    return {node: tuple(those) for node, those in sorted(numbers.items())}
