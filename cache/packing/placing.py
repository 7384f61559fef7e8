"""Brings shards to the members they belong on, or into this node's own store where there are no members."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self

from deeplink.cache import ownership
from deeplink.cache.client import MemberClient
from deeplink.cache.errors import MemberError, PlacementError, ShardCorruptError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from deeplink.cache.store import Store
    from deeplink.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)


class Placer:
    """Knows who holds what, and makes it so. Use `with`; asks each member once when it is entered.

    Shards may be placed from several threads.

    Args:
        store: this node's own store.
        node: this node's name; a member of that name is reached through `store`, not through the network.
        members: who may hold shards; none: `store` alone.
        token: what calls to members carry.
        replicas: copies wanted of each shard.

    Attributes:
        wanted: copies wanted of each shard, no more than there are members.
        needed: the shards that were placed, or are to be; of these none leaves this node's store for others.
    """

    def __init__(
        self, store: Store, node: NodeName, members: Sequence[Member], token: str, *, replicas: int
    ) -> None:
        self._store, self._node = store, node
        self._names = [member.name for member in members] or [node]
        self._known = ownership.standing(members)
        self.wanted = min(replicas, len(self._names))
        self.needed: set[ShardId] = set()
        self._clients = {member.name: MemberClient(member, token) for member in members if member.name != node}
        self._held: dict[NodeName, dict[ShardId, int]] = {}
        self._problems: dict[NodeName, str] = {}

    def __enter__(self) -> Self:
        for name, client in self._clients.items():
            try:
                self._held[name] = client.held()
            except MemberError as problem:
                self.give_up(name, str(problem))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def give_up(self, name: NodeName, problem: str) -> None:
        """Count on a member no more, and on what it holds."""
        log.warning("%s", problem)
        self._problems[name] = problem
        self._held.pop(name, None)

    def silent(self, name: NodeName, problem: str) -> None:
        """Take note that a member's agent does not answer; this node's own store needs no agent."""
        if name != self._node:
            self.give_up(name, problem)

    def _has(self, name: NodeName, shard: ShardId, size: int) -> bool:
        if name == self._node:
            return self._store.has_whole(shard, size)
        return self._held.get(name, {}).get(shard) == size

    def holders(self, shard: ShardId, size: int) -> tuple[NodeName, ...]:
        """Return the members that hold a shard, in the order in which they are to hold it.

        Args:
            shard: which.
            size: bytes of its file; who has a file of another size does not hold it.
        """
        ranked = ownership.ranked(shard, self._names, self._known)
        return tuple(name for name in ranked if self._has(name, shard, size))

    def answers(self, name: NodeName) -> bool:
        """Tell whether a member has answered whatever it was asked, or is this node."""
        return name not in self._problems

    def saw(self, shard: ShardId, size: int, holders: Sequence[NodeName]) -> None:
        """Take note that others have brought a shard, whose file has `size` bytes, to `holders`."""
        for name in holders:
            if name in self._clients and name not in self._problems:
                self._held.setdefault(name, {})[shard] = size

    def is_placed(self, shard: ShardId, size: int) -> bool:
        """Tell whether a shard, whose file has `size` bytes, has all the copies that are wanted."""
        return len(self.holders(shard, size)) >= self.wanted

    def place(self, shard: ShardId, draft: Path) -> tuple[NodeName, ...]:
        """Bring a shard, whose sealed file is `draft`, to its owners and return its holders; `draft` is used up.

        An owner that cannot take it is replaced by the next member in order, and if all holders would then fail
        together, by one that does not. Fewer copies than wanted are logged.

        Raises:
            PlacementError: nobody took it.
            StoreFullError: there are no members, and this node's store has no room.
        """
        self.needed.add(shard)
        held, problems = list(self.holders(shard, draft.stat().st_size)), []
        path = draft
        left = list(ownership.ranked(shard, self._names, self._known))
        while len(held) < self.wanted:
            name = ownership.next_holder(left, held, self.wanted, self._known)
            if name is None:
                break
            left.remove(name)
            if name in self._problems:
                problems.append(self._problems[name])
                continue
            try:
                path = self._bring(name, shard, path)
                held.append(name)
            except (MemberError, StoreFullError, StoreError) as problem:
                problems.append(str(problem))
                self._after_failure(name, problem)
        draft.unlink(missing_ok=True)
        if not held:
            raise PlacementError(shard, problems)
        if len(held) < self.wanted:
            log.warning("shard %s has %d of %d copies: %s", shard, len(held), self.wanted, "; ".join(problems))
        return tuple(held)

    def _after_failure(self, name: NodeName, problem: Exception) -> None:
        if not self._clients and isinstance(problem, (StoreFullError, StoreError)):
            raise problem
        self.give_up(name, str(problem))

    def _bring(self, name: NodeName, shard: ShardId, path: Path) -> Path:
        if name != self._node:
            self._clients[name].put(shard, path)
            self._held.setdefault(name, {})[shard] = path.stat().st_size
            return path
        self._store.adopt(path, shard)
        return self._store.path(shard)

    def fetch(self, shard: ShardId, size: int, draft: Path) -> bool:
        """Write a copy of a shard that some member holds to `draft`. False: nobody gave one.

        Where this node's own store has it, `draft` is that very file.

        Raises:
            OSError: `draft` cannot be written.
        """
        if self._store.has_whole(shard, size):
            draft.hardlink_to(self._store.path(shard))
            return True
        for name in self.holders(shard, size):
            try:
                with draft.open("wb") as file:
                    for chunk in self._clients[name].get(shard, size):
                        file.write(chunk)
            except (MemberError, ShardCorruptError) as problem:
                self.give_up(name, str(problem))
                draft.unlink(missing_ok=True)
            else:
                return True
        return False
