"""Whether a shard could be had again if this node dropped it: proved by asking, never assumed.

Two members that hold the last two copies must not each rely on the other. So a member counts on another's copy
only if that one comes before it in the order of ownership (by names alone, without weights and domains, so that
all agree whatever list they have): the first holder in that order never drops a shard because others have it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deeplink.cache import ownership
from deeplink.cache.errors import MemberError
from deeplink.cache.packing.rebuilding import is_unchanged
from deeplink.cache.remote.transport import member_errors
from deeplink.cache.source import open_source
from deeplink.cache.sources.bucket import CappedSource
from deeplink.cache.sources.home import open_home
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainConnection
from deeplink.runtokens import shown
from deeplink.types import Member, NodeName, ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.holding.shard_versions import KnownShards
    from deeplink.cache.sources.bucket import SourceCap
    from deeplink.clock import Clock
    from deeplink.runtokens import RunTokens

log = logging.getLogger(__name__)

_STAT = "/deeplink.v1.Cache/Stat"
_ASK_S = 5.0
_AT_ONCE = 16
PEERS_KEPT_S = 30.0
SOURCE_KEPT_S = 3600.0


def stat_member(member: Member, token: str, clock: Clock) -> cache_pb2.StatReply:
    """Ask a member what it holds.

    Raises:
        MemberError: it does not say.
    """
    with member_errors(member), PlainConnection(member.address, token, clock) as connection:
        connection.send(_STAT, cache_pb2.StatRequest().SerializeToString(), clock.monotonic() + _ASK_S)
        for message in connection.replies():
            return cache_pb2.StatReply.FromString(bytes(message))
    raise MemberError(member.name, "it does not say what it holds")


class ReplicaLookup:
    """What is known of other copies. Safe to use from several threads.

    Args:
        node: this member's name.
        token: what calls to members carry.
        known: where shards come from.
        cap: bounds what is read from sources.
        clock: where time comes from.

    Attributes:
        members: the other members.
    """

    def __init__(
        self, node: NodeName, token: str | RunTokens, known: KnownShards, cap: SourceCap, clock: Clock
    ) -> None:
        self._node, self._token, self._known, self._cap, self._clock = node, token, known, cap, clock
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._held: dict[NodeName, dict[ShardId, bool]] = {}
        self._sizes: dict[ShardId, int] = {}
        self._at_source: dict[ShardId, tuple[float, bool]] = {}
        self.members: Sequence[Member] = ()

    def ask_members(self, *, anew: bool = False) -> None:
        """Ask every member what it holds, unless that was just done; who does not answer counts as empty.

        Args:
            anew: ask also if it was just done.
        """
        with self._lock:
            if not anew and self._clock.monotonic() - self._asked < PEERS_KEPT_S:
                return
            self._sizes, self._held = {}, {}
            if self.members:
                with ThreadPoolExecutor(min(len(self.members), _AT_ONCE)) as pool:
                    list(pool.map(self._ask, self.members))
            self._asked = self._clock.monotonic()

    def _ask(self, member: Member) -> None:
        try:
            reply = stat_member(member, shown(self._token), self._clock)
        except MemberError as problem:
            log.info("%s; its copies are not counted on", problem)
            return
        self._held[member.name] = {ShardId(shard.id): shard.verified for shard in reply.shards}
        self._sizes.update({ShardId(shard.id): shard.bytes for shard in reply.shards})

    def forget(self) -> None:
        """Ask anew next time: the members are others."""
        with self._lock:
            self._asked, self._held = float("-inf"), {}

    def held_elsewhere(self) -> dict[ShardId, int]:
        """Return the shards of which another member has a verified copy, and their bytes, as last asked."""
        with self._lock:
            return {
                shard: self._sizes[shard]
                for held in self._held.values()
                for shard, verified in held.items()
                if verified
            }

    def at_member(self, shard: ShardId) -> bool:
        """Tell whether a member that comes before this one has a verified copy, as last asked."""
        with self._lock:
            holders = [name for name, held in self._held.items() if held.get(shard)]
        return bool(holders) and ownership.ranked(shard, [*holders, self._node])[0] != self._node

    def at_home(self, shard: ShardId) -> bool:
        """Tell whether the packed home has a shard; asks it."""
        wanted = self._known.find(shard)
        if wanted is None or wanted.index is None or not wanted.index.home:
            return False
        try:
            return open_home(wanted.index.home).has(shard, wanted.bytes)
        except (DeepLinkError, OSError) as problem:
            log.info("shard %s is not counted on at its home: %s", shard, problem)
            return False

    def is_kept(self, shard: ShardId) -> bool:
        """Tell whether a shard could be had again from its home or its source."""
        return self.at_home(shard) or self.at_source(shard)

    def at_source(self, shard: ShardId) -> bool:
        """Tell whether a shard could be made anew from its source; looks at every file, once an hour at most."""
        now = self._clock.monotonic()
        with self._lock:
            proved, found = self._at_source.get(shard, (float("-inf"), False))
        if now - proved < SOURCE_KEPT_S:
            return found
        found = self._look_at_source(shard)
        with self._lock:
            self._at_source[shard] = (self._clock.monotonic(), found)
        return found

    def _look_at_source(self, shard: ShardId) -> bool:
        wanted = self._known.find(shard)
        if wanted is None or wanted.index is None:
            return False
        try:
            source = CappedSource(open_source(wanted.index.source), self._cap)
            return is_unchanged(wanted.index, wanted.number, source)
        except (DeepLinkError, OSError) as problem:
            log.info("shard %s cannot be had from its source: %s", shard, problem)
            return False
