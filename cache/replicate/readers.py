"""Who of a node's users may read a shard (docs/decisions/0039).

Whoever may read every dataset that it is of: an index is no proof that its publisher had the bytes. And whoever
may read a file with these bytes in a packed home: there the file system lets him.
"""

from __future__ import annotations

import logging
import os
import pwd
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from deeplink.cache.errors import HomeError, ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.format.access import SourceAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deeplink.cache.replicate.shard_recovery import KnownShards, Published
    from deeplink.cache.source.home import FolderHome
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

_KEPT_S = 30.0
"""Groups, and who may read a shard, are looked up again after so long."""
_MOST = 1 << 16


def groups_of(user: int) -> frozenset[int]:
    """Return the groups of a user, as this machine knows them; none where it does not know the user."""
    try:
        known = pwd.getpwuid(user)
        return frozenset(os.getgrouplist(known.pw_name, known.pw_gid))
    except (KeyError, OSError):
        return frozenset()


def may_read(published: Published, user: int, groups: frozenset[int]) -> bool:
    """Tell whether a user may read a dataset: the publisher, and whom the source's owner, group and mode let."""
    if user == published.publisher:
        return True
    try:
        return SourceAccess.parse(published.access).allows(user, groups)
    except ValueError:  # not recorded, or damaged
        return False


class OpenCopies:
    """Finds copies in packed homes that a user may read. Safe to use from several threads.

    Each is read whole once, in the background, before it counts: its name alone is no proof of its bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_right: dict[tuple[int, ...], bool] = {}
        self._waiting: OrderedDict[ShardId, FolderHome] = OrderedDict()
        self._is_reading = False

    def may_read(self, shard: ShardId, homes: Iterable[FolderHome], user: int, groups: frozenset[int]) -> bool:
        """Tell whether one of the homes has a copy that the file system lets a user read."""
        for home in homes:
            with suppress(HomeError), home.copy_of(shard) as copy:
                if copy.access is None or not copy.access.allows(user, groups):
                    continue
                with self._lock:
                    if self._is_right.get(copy.identity):
                        return True
                    if copy.identity not in self._is_right and len(self._waiting) < _MOST:
                        self._waiting[shard] = home
                        self._begin()
        return False

    def _begin(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            threading.Thread(target=self._read, name="deeplink-copies", daemon=True).start()

    def _read(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_reading = False
                    return
                shard, home = self._waiting.popitem(last=False)
            with suppress(HomeError), home.copy_of(shard) as copy:
                try:
                    block.verify_shard(copy.descriptor, shard)
                    is_right = True
                except (ShardCorruptError, OSError) as problem:
                    log.warning("home %s: its copy of shard %s counts for nothing: %s", home.url, shard, problem)
                    is_right = False
                with self._lock:
                    if len(self._is_right) > _MOST:
                        self._is_right.clear()
                    self._is_right[copy.identity] = is_right


class ShardReaders:
    """Finds what is forbidden to a user. Safe to use from several threads."""

    def __init__(
        self,
        known: KnownShards,
        clock: Clock,
        *,
        own: int | None = None,
        groups: Callable[[int], frozenset[int]] = groups_of,
    ) -> None:
        """`own` is the user whose store it is, who may read all of it; None: this process's."""
        self._known, self._clock, self._groups = known, clock, groups
        self._trusted = {0, os.geteuid() if own is None else own}
        self._lock = threading.Lock()
        self._copies = OpenCopies()
        self._verdicts: dict[tuple[ShardId, int], tuple[float, bool]] = {}

    def forbidden(self, shards: Sequence[ShardId], user: int) -> set[ShardId]:
        """Return which of the shards a user may not read: also those of no dataset that is known."""
        if user in self._trusted:
            return set()
        now = self._clock.monotonic()
        with self._lock:
            found = {shard: self._verdicts.get((shard, user), (float("-inf"), False)) for shard in shards}
        verdicts = {shard: may for shard, (at, may) in found.items() if now - at < _KEPT_S}
        if unknown := [shard for shard in shards if shard not in verdicts]:
            groups = self._groups(user)
            new = {}
            for shard in unknown:
                published = self._known.published(shard)
                verdicts[shard] = bool(published) and (
                    all(may_read(one, user, groups) for one in published)
                    or self._copies.may_read(shard, self._known.homes(shard), user, groups)
                )
                if published:  # what is not known yet may be in a moment
                    new[shard, user] = now, verdicts[shard]
            with self._lock:
                if len(self._verdicts) > _MOST:
                    self._verdicts.clear()
                self._verdicts.update(new)
        return {shard for shard, may in verdicts.items() if not may}
