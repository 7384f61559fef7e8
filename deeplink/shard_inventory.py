"""Which nodes hold which shards, as the nodes report it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import ownership
from deeplink.cache.errors import MemberError
from deeplink.cache.holding.recovery import stat_member
from deeplink.cache.membership import configured_members, members_token, node_name, other_members
from deeplink.cache.store import Store
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.types import Member, NodeName

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """One shard on one node: bytes of its file, and whether the node has verified it."""

    bytes: int
    verified: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each node holds.

    Attributes:
        here: this node's name.
        nodes: per node its shards; None for who did not say.
        problems: of those, why.
        members: the nodes that have an agent, as configured.
    """

    here: NodeName
    nodes: Mapping[NodeName, Mapping[ShardId, HeldCopy] | None]
    problems: Mapping[NodeName, str]
    members: tuple[Member, ...]

    def holders(self, shard: ShardId) -> list[NodeName]:
        """Return the nodes that hold a shard, sorted."""
        return sorted(node for node, held in self.nodes.items() if held and shard in held)

    def owners(self, shard: ShardId, replicas: int) -> tuple[NodeName, ...]:
        """Return the nodes that a shard belongs on, the first one first; this node where there are no members."""
        names = [member.name for member in self.members] or [self.here]
        return ownership.owners(shard, names, replicas, ownership.standing(self.members))

    def verified(self) -> dict[NodeName, Mapping[ShardId, bool] | None]:
        """Return per node the shards it holds and whether it has verified them, as `residency` takes it."""
        return {
            node: None if held is None else {shard: one.verified for shard, one in held.items()}
            for node, held in self.nodes.items()
        }


def holdings(config: Config, clock: Clock) -> Holdings:
    """Return what this node's store holds, and what the members say they hold.

    Raises:
        ConfigError: the list of members cannot be read, or their token is not named.
        TokenFileError: the token cannot be read.
        StoreError: this node's store cannot be looked at.
    """
    here, others = node_name(config), other_members(config)
    token = members_token(config, others)
    nodes: dict[NodeName, Mapping[ShardId, HeldCopy] | None] = {}
    problems: dict[NodeName, str] = {}
    members = configured_members(config)
    own = _own(config)
    if own or len(others) == len(members) == 0 or len(others) < len(members):
        nodes[here] = own
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda member: _asked(member, token, clock), others)
        for member, answer in zip(others, answers, strict=True):
            if isinstance(answer, MemberError):
                nodes[member.name], problems[member.name] = None, str(answer)
            else:
                nodes[member.name] = answer
    return Holdings(here, nodes, problems, members)


def _own(config: Config) -> dict[ShardId, HeldCopy]:
    store = Store(config.store, make=False)
    if not config.store.is_dir():
        return {}
    status = store.status()
    return {
        shard: HeldCopy(size, store.is_verified(shard))
        for shard, size in zip(status.ids, status.sizes, strict=True)
    }


def _asked(member: Member, token: str, clock: Clock) -> dict[ShardId, HeldCopy] | MemberError:
    try:
        reply = stat_member(member, token, clock)
    except MemberError as problem:
        return problem
    return {ShardId(shard.id): HeldCopy(shard.bytes, shard.verified) for shard in reply.shards}
