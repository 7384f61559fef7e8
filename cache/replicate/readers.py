"""Who of a node's users may read a shard: whoever may read every dataset that it is of (docs/decisions/0039)."""

from __future__ import annotations

import os
import pwd
import threading
from typing import TYPE_CHECKING

from deeplink.cache.format.access import SourceAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.replicate.shard_recovery import KnownShards, Published
    from deeplink.core.clock import Clock
    from deeplink.core.types import ShardId

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
                verdicts[shard] = bool(published) and all(may_read(one, user, groups) for one in published)
                if published:  # what is not known yet may be in a moment
                    new[shard, user] = now, verdicts[shard]
            with self._lock:
                if len(self._verdicts) > _MOST:
                    self._verdicts.clear()
                self._verdicts.update(new)
        return {shard for shard, may in verdicts.items() if not may}
