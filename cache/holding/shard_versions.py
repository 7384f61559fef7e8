"""Shard names -> the versions they belong to, as the catalog on shared storage has them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.holding.fetching import WantedShard
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.index import Index
    from deeplink.clock import Clock
    from deeplink.types import ShardId, Version

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 30.0
_KEPT_OPEN = 8


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    version: Version
    number: int


class KnownShards:
    """Looks shards up in a catalog, which is read again when one is not known. Safe to use from several threads.

    Of a shard that several versions share, the newest that can be opened says where it is.

    Args:
        catalog: where; None where there is none to be seen.
        clock: where time comes from.
    """

    def __init__(self, catalog: Catalog | None, clock: Clock) -> None:
        self._catalog, self._clock = catalog, clock
        self._lock = threading.Lock()
        self._places: dict[ShardId, list[_Place]] = {}
        self._newest: dict[str, frozenset[ShardId]] = {}
        self._read: set[tuple[str, Version]] = set()
        self._looked = float("-inf")
        self._open: OrderedDict[tuple[str, Version], Index] = OrderedDict()

    def find(self, shard: ShardId) -> WantedShard | None:
        """Return a shard with a version it belongs to; None where the catalog has none."""
        with self._lock:
            if not self._places.get(shard):
                self._look()
            places = self._places.get(shard, [])
            while places:
                place = places[-1]
                try:
                    return WantedShard.of(self._index(place.name, place.version), place.number)
                except DeepLinkError as problem:  # deleted since, or damaged: an older one may have it too
                    log.warning("%s", problem)
                    places.pop()
                    self._read.discard((place.name, place.version))  # should it come back
            return None

    def in_newest(self) -> frozenset[ShardId]:
        """Return the shards of the newest version of every dataset."""
        with self._lock:
            self._look()
            return frozenset().union(*self._newest.values())

    def _index(self, name: str, version: Version) -> Index:
        index = self._open.get((name, version))
        if index is None and self._catalog is not None:
            index = self._open[name, version] = self._catalog.open(name, version)
            if len(self._open) > _KEPT_OPEN:
                self._open.popitem(last=False)
        if index is None:
            raise LookupError(name)
        return index

    def _look(self) -> None:
        now = self._clock.monotonic()
        if self._catalog is None or now - self._looked < _LOOK_AGAIN_S:
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
                newest[name] = frozenset(entry.id for entry in self._index(name, latest).shards)
            except (DeepLinkError, OSError) as problem:
                log.warning("dataset %s is not looked into: %s", name, problem)
                newest[name] = self._newest.get(name, frozenset())  # what cannot be read now is as it was
        self._newest = newest

    def _learn(self, name: str, version: Version) -> None:
        if (name, version) in self._read:
            return
        try:
            shards = self._index(name, version).shards
        except DeepLinkError as problem:
            log.warning("%s", problem)
            return
        for number, entry in enumerate(shards):
            place, places = _Place(name, version, number), self._places.setdefault(entry.id, [])
            if place not in places:
                places.append(place)
        self._read.add((name, version))
