"""Brings a damaged shard back from a member that holds a whole copy, while its samples are read from elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from deeplink.cache import ownership
from deeplink.cache.errors import MemberError, ShardCorruptError, StoreError, StoreFullError
from deeplink.cache.transport import member_errors
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainConnection
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.index import ShardEntry
    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.types import Member, ShardId

_METHOD = "/deeplink.v1.Cache/Get"
_START_S = 5.0
_SLOWEST_BYTES_PER_S = 4 << 20

log = logging.getLogger(__name__)


class Healer:
    """Fetches shards in one background thread, each once at a time over all processes that share the store.

    Args:
        store: where they belong.
        members: who may hold copies; this node is not among them.
        token: what calls carry.
        clock: where time comes from.
    """

    def __init__(self, store: Store, members: Sequence[Member], token: str, clock: Clock) -> None:
        self._store, self._token, self._clock = store, token, clock
        self._members = {member.name: member for member in members}
        self._lock = threading.Lock()
        self._busy: set[ShardId] = set()
        self._waiting: deque[tuple[ShardEntry, Callable[[], None]]] = deque()
        self._running = False

    def heal(self, shard: ShardEntry, healed: Callable[[], None]) -> None:
        """Begin to fetch a shard unless that is under way; `healed` is called when it has come."""
        with self._lock:
            if not self._members or shard.id in self._busy:
                return
            self._busy.add(shard.id)
            self._waiting.append((shard, healed))
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="deeplink-heal", daemon=True).start()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            shard, healed = wanted
            try:
                if self.fetch(shard):
                    healed()
            except (OSError, DeepLinkError) as problem:
                log.warning("shard %s cannot be brought back: %s", shard.id, problem)
            finally:
                with self._lock:
                    self._busy.discard(shard.id)

    def _next(self) -> tuple[ShardEntry, Callable[[], None]] | None:
        with self._lock:
            if not self._waiting:
                self._running = False
                return None
            return self._waiting.popleft()

    def fetch(self, shard: ShardEntry) -> bool:
        """Fetch a shard now. False: nobody had a whole copy, or another process is at it.

        Raises:
            OSError: the store's folder cannot be used.
        """
        path = self._store.root / f".fetching-{shard.id}"
        lock = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(lock)
            if isinstance(problem, BlockingIOError):
                return False
            raise
        try:
            return self._fetch(shard)
        finally:
            path.unlink(missing_ok=True)
            os.close(lock)

    def _fetch(self, shard: ShardEntry) -> bool:
        for name in ownership.ranked(shard.id, self._members):
            try:
                if not self._store.add(shard.id, self._chunks(self._members[name], shard), shard.bytes):
                    return True  # another process was quicker, or it was here all the time
            except (MemberError, ShardCorruptError) as problem:
                log.info("shard %s not from %s: %s", shard.id, name, problem)
            except (StoreFullError, StoreError) as problem:
                log.warning("shard %s cannot be brought back: %s", shard.id, problem)
                return False
            else:
                log.warning("shard %s was brought back from member %s", shard.id, name)
                return True
        return False

    def _chunks(self, member: Member, shard: ShardEntry) -> Iterator[bytes]:
        deadline = self._clock.monotonic() + _START_S + shard.bytes / _SLOWEST_BYTES_PER_S
        request = cache_pb2.GetRequest(id=shard.id).SerializeToString()
        with member_errors(member), PlainConnection(member.address, self._token, self._clock) as connection:
            connection.send(_METHOD, request, deadline)
            for message in connection.replies():
                yield cache_pb2.GetReply.FromString(bytes(message)).chunk
