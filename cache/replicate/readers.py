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
from typing import TYPE_CHECKING, NamedTuple

from deeplink.cache.errors import HomeError, ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.source.source import SourceAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deeplink.cache.replicate.shard_recovery import KnownShards, Published
    from deeplink.cache.source.home import FolderHome, HomeCopy
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

log = logging.getLogger(__name__)

_KEPT_S = 20.0
"""Groups, who may read a shard, and copies at homes are looked up again after so long."""
_MOST = 1 << 16
_MOST_HOMES = 32
"""Homes that are looked at at once."""


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


class _Look(NamedTuple):
    """What a look at a copy has shown, which counts for twice `_KEPT_S`."""

    at: float
    identity: tuple[int, ...] = ()
    is_right: bool = False
    access: SourceAccess | None = None

    def lets(self, user: int, groups: frozenset[int]) -> bool:
        """Tell whether a user may read a copy of the right bytes."""
        return self.is_right and self.access is not None and self.access.allows(user, groups)


_NEVER = _Look(float("-inf"))


class OpenCopies:
    """Finds copies in packed homes that a user may read. Safe to use from several threads.

    Anyone may name a home, and it may never answer: it is looked at in the background, each home by a thread of
    its own. A copy is read whole once before it counts: its name alone is no proof of its bytes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looks: dict[tuple[str, ShardId, int], _Look] = {}
        """By home, shard and its bytes as an index says."""
        self._waiting: dict[str, OrderedDict[tuple[ShardId, int], None]] = {}
        """What is still to be looked at in each home that has a thread."""

    def may_read(
        self, shard: ShardId, homes: Iterable[tuple[FolderHome, int]], user: int, groups: frozenset[int]
    ) -> bool | None:
        """Tell whether one of the homes has a copy that the file system lets a user read; None: not known yet."""
        now = self._clock.monotonic()
        may: bool | None = False
        with self._lock:
            for home, size in homes:
                look = self._looks.get((home.url, shard, size), _NEVER)
                if now - look.at >= _KEPT_S:
                    self._want(home, shard, size)
                if now - look.at >= 2 * _KEPT_S:
                    may = None
                elif look.lets(user, groups):
                    return True
        return may

    def _want(self, home: FolderHome, shard: ShardId, size: int) -> None:
        waiting = self._waiting.get(home.url)
        if waiting is None and len(self._waiting) < _MOST_HOMES:
            waiting = OrderedDict()
            threading.Thread(target=self._run, args=(home, waiting), name="deeplink-copies", daemon=True).start()
            self._waiting[home.url] = waiting
        if waiting is not None and len(waiting) < _MOST:
            waiting[shard, size] = None

    def _run(self, home: FolderHome, waiting: OrderedDict[tuple[ShardId, int], None]) -> None:
        while True:
            with self._lock:
                if not waiting:
                    del self._waiting[home.url]
                    return
                (shard, size), _ = waiting.popitem(last=False)
                before = self._looks.get((home.url, shard, size), _NEVER)
            look = self._look(home, shard, size, before)
            with self._lock:
                if len(self._looks) > _MOST:
                    self._looks.clear()
                self._looks[home.url, shard, size] = look

    def _look(self, home: FolderHome, shard: ShardId, size: int, before: _Look) -> _Look:
        at = self._clock.monotonic()
        try:
            with home.copy_of(shard) as copy:
                is_right = before.is_right
                if copy.identity != before.identity:
                    is_right = _is_right(copy, shard, size, home)
                return _Look(at, copy.identity, is_right, copy.access)
        except HomeError:
            pass
        except Exception:  # whatever it is, the thread goes on, or nothing of this home is looked at any more
            log.exception("home %s: its copy of shard %s cannot be looked at", home.url, shard)
        return _Look(at)


def _is_right(copy: HomeCopy, shard: ShardId, size: int, home: FolderHome) -> bool:
    found, problem = copy.facts.st_size, ""
    if found != size:  # before it is read: it may be of any size
        problem = f"it has {found:,} bytes instead of {size:,}"
    else:
        try:
            block.verify_shard(copy.descriptor, shard)
        except (ShardCorruptError, OSError) as damage:
            problem = str(damage)
    if problem:
        log.warning("home %s: its copy of shard %s counts for nothing: %s", home.url, shard, problem)
    return not problem


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
        self._copies = OpenCopies(clock)
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
                may: bool | None = None
                if published:
                    may = all(may_read(one, user, groups) for one in published) or self._copies.may_read(
                        shard, self._known.homes(shard), user, groups
                    )
                verdicts[shard] = bool(may)
                if may is not None:  # what is not known yet may be in a moment
                    new[shard, user] = now, may
            with self._lock:
                if len(self._verdicts) > _MOST:
                    self._verdicts.clear()
                self._verdicts.update(new)
        return {shard for shard, may in verdicts.items() if not may}
