"""Proves, by asking, whether a shard could be had again if this node dropped it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache import membership
from deeplink.cache.errors import MemberError
from deeplink.cache.replicate.fetching import WantedShard, is_unchanged
from deeplink.cache.source.home import FolderHome, open_home
from deeplink.cache.source.opening import open_source
from deeplink.cache.transfer.frames import call_member
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import ShardId
from deeplink.rpc.tokens import shown
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.format.index import Index
    from deeplink.cache.source.opening import SourceCap
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName, Version
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

_ASK_S = 5.0
_AT_ONCE = 16
PEERS_KEPT_S = 30.0
SOURCE_KEPT_S = 3600.0
_LOOK_AGAIN_S, _LOOK_SOON_S = 30.0, 2.0
"""The catalog is looked into no more often; so often where a user of the node waits for what was just packed."""
_KEPT_OPEN = 8


def stat_member(member: Member, token: str, clock: Clock) -> cache_pb2.StatReply:
    """Ask a member what it holds."""
    request = cache_pb2.StatRequest().SerializeToString()
    for reply in call_member(member, token, clock, "Stat", request, deadline_s=_ASK_S):
        return cache_pb2.StatReply.FromString(reply)
    raise MemberError(member.name, "it does not say what it holds")


class ReplicaLookup:
    """What is known of other copies. Safe to use from several threads."""

    def __init__(
        self, node: NodeName, token: str | RunTokens, known: KnownShards, cap: SourceCap, clock: Clock
    ) -> None:
        self._node, self._token, self._known, self._cap, self._clock = node, token, known, cap, clock
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._held: dict[NodeName, dict[ShardId, int]] = {}
        """By member, its verified shards and their bytes."""
        self._at_source: dict[ShardId, tuple[float, bool]] = {}
        self.members: Sequence[Member] = ()
        """The other members."""

    def ask_members(self, *, again: bool = False) -> None:
        """Ask every member what it holds, unless that was just done; one that does not answer counts as empty."""
        with self._lock:
            if not again and self._clock.monotonic() - self._asked < PEERS_KEPT_S:
                return
            self._held = {}
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
        self._held[member.name] = {ShardId(shard.id): shard.bytes for shard in reply.shards if shard.verified}

    def forget(self) -> None:
        """Ask again next time: the members are others."""
        with self._lock:
            self._asked, self._held = float("-inf"), {}

    def held_elsewhere(self) -> dict[ShardId, int]:
        """Return the shards of which another member has a verified copy, and their bytes, as last asked."""
        with self._lock:
            return {shard: size for held in self._held.values() for shard, size in held.items()}

    def at_member(self, shard: ShardId) -> bool:
        """Tell whether a member that comes before this one has a verified copy, as last asked.

        Before: in the order of ownership by names alone, without weights and domains, so that all agree whatever
        list they have. Two members that hold the last two copies must not each rely on the other.
        """
        with self._lock:
            holders = [name for name, held in self._held.items() if shard in held]
        return bool(holders) and membership.ranked(shard, [*holders, self._node])[0] != self._node

    def is_kept(self, shard: ShardId) -> bool:
        """Tell whether a shard could be had again from its home or its source; asks them.

        Every file at the source is looked at, once an hour at most.
        """
        wanted = self._known.find(shard)
        if wanted is None or wanted.index is None:
            return False
        index = wanted.index
        try:
            if index.home and open_home(index.home).has(shard, wanted.bytes):
                return True
        except (DeepLinkError, OSError) as problem:
            log.info("shard %s is not counted on at its home: %s", shard, problem)
        proved, found = self._at_source.get(shard, (float("-inf"), False))
        if self._clock.monotonic() - proved < SOURCE_KEPT_S:
            return found
        try:
            found = is_unchanged(index, wanted.number, open_source(index.source, self._cap))
        except (DeepLinkError, OSError) as problem:
            log.info("shard %s cannot be had from its source: %s", shard, problem)
            found = False
        self._at_source[shard] = (self._clock.monotonic(), found)
        return found


@dataclass(frozen=True, slots=True)
class Published:
    """Whose a dataset is, as its newest version says."""

    publisher: int  # whose file the index is, a user's number
    access: str  # who may read the source (`SourceAccess`); empty: that was not recorded


_NOBODYS = Published(-1, "")
"""A dataset of which not even that is known."""


class KnownShards:
    """Finds a version that a shard belongs to, the newest that can be opened. Safe to use from several threads.

    The catalog is read again when a shard is not known.
    """

    def __init__(self, catalog: Catalog | None, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._lock = threading.Lock()
        self._places: dict[ShardId, list[tuple[str, Version, int, int]]] = {}
        """Dataset, version, number in it, and bytes as it says; the newest version last."""
        self._newest: dict[str, frozenset[ShardId]] = {}
        self._named: dict[ShardId, set[str]] = {}
        """The datasets that a shard is of, those that were removed since among them."""
        self._published: dict[str, Published] = {}
        self._read: set[tuple[str, Version]] = set()
        self._homes: dict[tuple[str, Version], FolderHome] = {}
        self._looked = float("-inf")
        self._open: OrderedDict[tuple[str, Version], Index] = OrderedDict()

    def find(self, shard: ShardId) -> WantedShard | None:
        """Return a shard with a version it belongs to; None where the catalog has none."""
        with self._lock:
            if not self._places.get(shard):
                self._look()
            places = self._places.get(shard, [])
            while places:
                name, version, number, _ = places[-1]
                try:
                    return WantedShard.of(self._index(name, version), number)
                except DeepLinkError as problem:  # deleted since, or damaged: an older one may have it too
                    log.warning("%s", problem)
                    places.pop()
                    self._read.discard((name, version))  # should it come back
            return None

    def in_newest(self) -> frozenset[ShardId]:
        """Return the shards of the newest version of every dataset."""
        with self._lock:
            self._look()
            return frozenset().union(*self._newest.values())

    def published(self, shard: ShardId) -> list[Published]:
        """Return whose the datasets are that a shard is of; empty where the catalog has none.

        One that was removed counts on, until its publisher has another one that the shard is of.
        """
        with self._lock:
            self._look(_LOOK_AGAIN_S if shard in self._named else _LOOK_SOON_S)
            names = self._named.get(shard, set())
            here = [self._published.get(name, _NOBODYS) for name in names if name in self._newest]
            publishers = {one.publisher for one in here}
            gone = [self._published.get(name, _NOBODYS) for name in names if name not in self._newest]
            return here + [one for one in gone if one.publisher not in publishers]

    def homes(self, shard: ShardId) -> list[tuple[FolderHome, int]]:
        """Return the packed homes that are folders of the versions that a shard is of, and its bytes there."""
        with self._lock:
            places = [
                (self._homes.get((name, version)), size) for name, version, _, size in self._places.get(shard, [])
            ]
            return list({(home.url, size): (home, size) for home, size in places if home is not None}.values())

    def _index(self, name: str, version: Version) -> Index:
        index = self._open.get((name, version))
        if index is None and self._catalog is not None:
            index = self._open[name, version] = self._catalog.open(name, version)
            if len(self._open) > _KEPT_OPEN:
                self._open.popitem(last=False)
        if index is None:
            raise LookupError(name)
        return index

    def _look(self, kept_s: float = _LOOK_AGAIN_S) -> None:
        now = self._clock.monotonic()
        if self._catalog is None or now - self._looked < kept_s:
            return
        self._looked = now
        try:
            names = self._catalog.names()
        except OSError as problem:
            log.warning("the catalog cannot be read: %s", problem)
            return
        newest: dict[str, frozenset[ShardId]] = {}
        for name in names:
            try:
                for version in self._catalog.versions(name):
                    self._learn(name, version)
                latest = self._catalog.latest(name)
                index = self._index(name, latest)
                newest[name] = frozenset(entry.id for entry in index.shards)
                self._published[name] = Published(index.path.stat().st_uid, index.access)
            except (DeepLinkError, OSError) as problem:
                log.warning("dataset %s is not looked into: %s", name, problem)
                newest[name] = self._newest.get(name, frozenset())  # what cannot be read now is as it was
        self._newest = newest

    def _learn(self, name: str, version: Version) -> None:
        if (name, version) in self._read:
            return
        try:
            index = self._index(name, version)
            shards = index.shards
        except DeepLinkError as problem:
            log.warning("%s", problem)
            return
        for number, entry in enumerate(shards):
            self._named.setdefault(entry.id, set()).add(name)
            places = self._places.setdefault(entry.id, [])
            place = (name, version, number, entry.bytes)
            if place not in places:
                places.append(place)
        if index.home.startswith("/"):
            self._homes[name, version] = FolderHome(index.home)
        self._read.add((name, version))
