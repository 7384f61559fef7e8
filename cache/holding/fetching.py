"""Brings one shard to this node: from another member, else the packed home, else made anew from the source.

Agents that fill their share and readers that heal what broke under them do it with this.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import os
import threading
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from deeplink.cache import ownership
from deeplink.cache.errors import MemberSilentError, SourceChangedError, StoreError, StoreFullError
from deeplink.cache.packing.rebuilding import rebuild
from deeplink.cache.remote.breaker import Breaker
from deeplink.cache.remote.transport import member_errors
from deeplink.cache.source import open_source
from deeplink.cache.sources.bucket import CappedSource
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainConnection
from deeplink.publish import DRAFT_PREFIX
from deeplink.runtokens import shown
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.index import Index, ShardEntry
    from deeplink.cache.sources.bucket import SourceCap
    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.runtokens import RunTokens
    from deeplink.types import Member, NodeName, ShardId

_METHOD = "/deeplink.v1.Cache/Get"
_START_S = 5.0
_SLOWEST_BYTES_PER_S = 4 << 20
HOME, SOURCE = "home", "source"

log = logging.getLogger(__name__)


class FetchOutcome(enum.Enum):
    """What became of a shard that was wanted."""

    HELD = enum.auto()
    """It was here, and is verified."""
    FETCHED = enum.auto()
    FAILED = enum.auto()
    """Nobody could give it."""
    NO_ROOM = enum.auto()
    CHANGED = enum.auto()
    """Only the source is left, and it has changed since it was packed."""
    BUSY = enum.auto()
    """Another process of this node is bringing it."""

    @property
    def is_here(self) -> bool:
        """Whether the shard is held, whole, now."""
        return self in {FetchOutcome.HELD, FetchOutcome.FETCHED}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WantedShard:
    """A shard to be had.

    Attributes:
        id: its name.
        bytes: size of its file.
        index: a version it belongs to, where that is known: the home and the source are found through it.
        number: its number there.
    """

    id: ShardId
    bytes: int
    index: Index | None = None
    number: int = 0

    @classmethod
    def of(cls, index: Index, number: int) -> WantedShard:
        """Return shard `number` of a version."""
        entry: ShardEntry = index.shards[number]
        return cls(id=entry.id, bytes=entry.bytes, index=index, number=number)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of it: whom it came from (a member's name, "home", "source"), its bytes, or why it did not."""

    outcome: FetchOutcome
    origin: str = ""
    bytes: int = 0
    problem: str = ""


class ShardHome(Protocol):
    """A packed copy of every shard on shared or object storage."""

    def fetch(self, shard: ShardId, size: int) -> Iterator[bytes]:
        """Yield a shard's file in pieces."""
        ...


class Fetcher:
    """Brings shards into `store`. Safe to use from several threads and processes.

    Args:
        store: where they belong.
        token: what calls to members carry.
        clock: where time comes from.
        node: this member's name, which is asked for nothing; None where it is no member.
        cap: bounds what is read from sources; None: sources are left alone.
        open_home: opens a packed home by its URL.
    """

    def __init__(
        self,
        store: Store,
        token: str | RunTokens,
        clock: Clock,
        *,
        node: NodeName | None = None,
        cap: SourceCap | None = None,
        open_home: Callable[[str], ShardHome] | None = None,
    ) -> None:
        self._store, self._token, self._clock, self._cap = store, token, clock, cap
        self._node = node
        self._open_home = open_home
        self._breaker = Breaker()
        self._building = threading.Lock()
        self.members: tuple[Member, ...] = ()
        """All members: the order in which they are asked follows from all of them, this node among them."""

    def fetch(self, wanted: WantedShard, members: Sequence[Member] = ()) -> Fetched:
        """Bring a shard here now, or verify the one that is here.

        Args:
            wanted: which.
            members: all members, as above; `self.members` when empty.
        """
        if self._store.is_verified(wanted.id):  # also on a disk that takes no lock file
            return Fetched(FetchOutcome.HELD, bytes=wanted.bytes)
        try:
            with self._alone(wanted.id) as is_alone:
                if not is_alone:
                    return Fetched(FetchOutcome.BUSY, problem="another process is bringing it")
                return self._fetch(wanted, members or self.members)
        except (StoreFullError, StoreError) as problem:
            outcome = FetchOutcome.NO_ROOM if isinstance(problem, StoreFullError) else FetchOutcome.FAILED
            return Fetched(outcome, problem=str(problem))
        except OSError as problem:
            return Fetched(FetchOutcome.FAILED, problem=f"store {self._store.root}: {problem.strerror or problem}")

    @contextlib.contextmanager
    def _alone(self, shard: ShardId) -> Iterator[bool]:
        path = self._store.root / f".fetching-{shard}"
        lock = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _fetch(self, wanted: WantedShard, members: Sequence[Member]) -> Fetched:
        if self._store.has(wanted.id) and (self._store.is_verified(wanted.id) or self._store.verify(wanted.id)):
            return Fetched(FetchOutcome.HELD, bytes=wanted.bytes)
        problems: list[str] = []
        changed = False
        for origin, bring in self._ways(wanted, members):
            try:
                bring()
            except (StoreFullError, StoreError):
                raise
            except DeepLinkError as problem:
                problems.append(str(problem))
                changed = isinstance(problem, SourceChangedError)
            else:
                log.info("shard %s came from %s", wanted.id, origin)
                return Fetched(FetchOutcome.FETCHED, origin, wanted.bytes)
        outcome = FetchOutcome.CHANGED if changed else FetchOutcome.FAILED
        return Fetched(outcome, problem="; ".join(problems) or "nobody is known to hold it")

    def _ways(self, wanted: WantedShard, members: Sequence[Member]) -> Iterator[tuple[str, Callable[[], object]]]:
        by_name = {member.name: member for member in members}
        skipped = self._breaker.skipped(self._clock.monotonic())
        for name in ownership.ranked(wanted.id, by_name, ownership.standing(members)):
            if name != self._node and name not in skipped:
                yield name, partial(self._from_member, by_name[name], wanted)
        index = wanted.index
        if index is None:
            return
        url = str(getattr(index, "home", "") or "")
        if url and self._open_home is not None:
            # Opened when it is its turn: a home of an unknown kind is one way less, and not the end of all.
            yield HOME, partial(self._from_home, self._open_home, url, wanted)
        if self._cap is not None and index.source:
            cap = self._cap
            yield SOURCE, lambda: self._from_source(index, wanted, cap)

    def _from_member(self, member: Member, wanted: WantedShard) -> None:
        try:
            self._store.add(wanted.id, self._chunks(member, wanted), wanted.bytes)
        except MemberSilentError:
            self._breaker.failed(member.name, self._clock.monotonic())
            raise
        self._breaker.answered(member.name)

    def _chunks(self, member: Member, wanted: WantedShard) -> Iterator[bytes]:
        deadline = self._clock.monotonic() + _START_S + wanted.bytes / _SLOWEST_BYTES_PER_S
        request = cache_pb2.GetRequest(id=wanted.id).SerializeToString()
        with member_errors(member), PlainConnection(member.address, shown(self._token), self._clock) as connection:
            connection.send(_METHOD, request, deadline)
            for message in connection.replies():
                yield cache_pb2.GetReply.FromString(bytes(message)).chunk

    def _from_home(self, open_home: Callable[[str], ShardHome], url: str, wanted: WantedShard) -> None:
        self._store.add(wanted.id, open_home(url).fetch(wanted.id, wanted.bytes), wanted.bytes)

    def _from_source(self, index: Index, wanted: WantedShard, cap: SourceCap) -> None:
        draft: Path = self._store.root / f"{DRAFT_PREFIX}{wanted.id}.mdb-{uuid.uuid4().hex[:12]}"
        # One at a time: it takes a processor, and the cap bounds the rate anyway.
        with self._building, self._store.room_for(wanted.bytes):
            try:
                rebuild(index, wanted.number, CappedSource(open_source(index.source), cap), draft, self._clock)
                self._store.adopt(draft, wanted.id)
            except OSError as problem:
                self._store.raise_as_store_error(problem, wanted.bytes)
            finally:
                draft.unlink(missing_ok=True)
