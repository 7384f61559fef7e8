"""Brings one shard to this node: from another member, else the packed home, else rebuilt from the source."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache import membership
from deeplink.cache.errors import MemberSilentError, SourceChangedError, SourceError, StoreError, StoreFullError
from deeplink.cache.format import block
from deeplink.cache.format.names import Names
from deeplink.cache.membership import Breaker, Tier
from deeplink.cache.pack.building import FileReader, ShardBuilder, build_shard
from deeplink.cache.pack.plan import kept_marks
from deeplink.cache.source.home import open_home
from deeplink.cache.source.opening import SourceCap, TokenBucket, open_source
from deeplink.cache.transfer.frames import call_member
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import DRAFT_PREFIX
from deeplink.core.types import SampleKey
from deeplink.rpc.tokens import shown
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.cache.source.source import Source
    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, NodeName, ShardId
    from deeplink.rpc.tokens import Credentials, RunTokens


_START_S = 5.0
_SLOWEST_BYTES_PER_S = 4 << 20
HOME, SOURCE = "home", "source"
_MOST_WAITING = 4096
_AGAIN_S = 60.0
"""A shard that could not be brought to a reader's node is not tried again sooner."""
_SOURCE_BYTES_PER_S, _SOURCE_REQUESTS_PER_S = 50e6, 500.0
"""What a reader takes from the source to rebuild a shard: it has a training to look after."""

log = logging.getLogger(__name__)


class FetchOutcome(enum.Enum):
    """How fetching a shard ended."""

    HELD = enum.auto()
    """It was here, and is verified."""
    FETCHED = enum.auto()
    FAILED = enum.auto()
    """No member, home or source could give it."""
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
    """A shard to be brought."""

    id: ShardId
    bytes: int
    index: Index | None = None  # a version it belongs to, where that is known: it names the home and the source
    number: int = 0  # in that index

    @classmethod
    def of(cls, index: Index, number: int) -> WantedShard:
        """Return shard `number` of a version."""
        entry = index.shards[number]
        return cls(id=entry.id, bytes=entry.bytes, index=index, number=number)


@dataclass(frozen=True, slots=True)
class Fetched:
    """How fetching a shard ended, and where it came from."""

    outcome: FetchOutcome
    origin: str = ""  # a member's name, "home", "source"
    bytes: int = 0
    problem: str = ""


class Fetcher:
    """Brings shards into `store`. Safe to use from several threads and processes."""

    def __init__(
        self,
        store: Store,
        token: Credentials | RunTokens,
        clock: Clock,
        *,
        node: NodeName | None = None,
        cap: SourceCap | None = None,
        uses_home: bool = False,
        standing: Tier | None = None,
    ) -> None:
        """`standing` are asked for what no member gives."""
        self._store, self._token, self._clock, self._cap = store, token, clock, cap
        self._node, self._uses_home = node, uses_home
        self._standing = standing if standing is not None and standing.shown else Tier()
        self._breaker = Breaker()
        self._building = threading.Lock()
        self.members: tuple[Member, ...] = ()
        """All members, this node among them: the order in which they are asked follows from all of them."""

    def fetch(self, wanted: WantedShard, members: Sequence[Member] = ()) -> Fetched:
        """Bring a shard here now, or verify the one that is here."""
        if self._store.is_verified(wanted.id):  # also on a disk that takes no lock file
            return Fetched(FetchOutcome.HELD, bytes=wanted.bytes)
        try:
            with self.alone(f"fetching-{wanted.id}") as is_alone:
                if not is_alone:
                    return Fetched(FetchOutcome.BUSY, problem="another process is bringing it")
                return self._fetch(wanted, members or self.members)
        except (StoreFullError, StoreError) as problem:
            outcome = FetchOutcome.NO_ROOM if isinstance(problem, StoreFullError) else FetchOutcome.FAILED
            return Fetched(outcome, problem=str(problem))
        except OSError as problem:
            return Fetched(FetchOutcome.FAILED, problem=f"store {self._store.root}: {problem.strerror or problem}")

    @contextlib.contextmanager
    def alone(self, doing: str) -> Iterator[bool]:
        """Give whether this is the only thread of all processes on this store that is doing something."""
        path = self._store.root / f".{doing}"
        lock = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(lock, "wb"):
            if not try_lock(lock, path):
                yield False
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)

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
        return Fetched(outcome, problem="; ".join(problems) or "no member is known to hold it")

    def _ways(self, wanted: WantedShard, members: Sequence[Member]) -> Iterator[tuple[str, Callable[[], object]]]:
        skipped = self._breaker.skipped(self._clock.monotonic())
        for tier in (Tier(tuple(members), shown(self._token)), self._standing):
            by_name = {member.name: member for member in tier.members}
            for name in membership.ranked(wanted.id, by_name, membership.standing(tier.members)):
                if name != self._node and name not in skipped:
                    yield name, partial(self._from_member, by_name[name], tier.shown, wanted)
        index = wanted.index
        if index is None:
            return
        if index.home and self._uses_home:
            yield HOME, partial(self._from_home, index.home, wanted)
        if index.source and self._cap is not None:
            yield SOURCE, partial(self._from_source, index, wanted, self._cap)

    def _from_member(self, member: Member, credentials: Credentials, wanted: WantedShard) -> None:
        try:
            self._store.add(wanted.id, self._chunks(member, credentials, wanted), wanted.bytes)
        except MemberSilentError:
            self._breaker.failed(member.name, self._clock.monotonic())
            raise
        self._breaker.answered(member.name)

    def _chunks(self, member: Member, credentials: Credentials, wanted: WantedShard) -> Iterator[bytes]:
        request = cache_pb2.GetRequest(id=wanted.id).SerializeToString()
        deadline_s = _START_S + wanted.bytes / _SLOWEST_BYTES_PER_S
        for reply in call_member(member, credentials, self._clock, "Get", request, deadline_s=deadline_s):
            yield cache_pb2.GetReply.FromString(reply).chunk

    def _from_home(self, url: str, wanted: WantedShard) -> None:
        self._store.add(wanted.id, open_home(url).fetch(wanted.id, wanted.bytes), wanted.bytes)

    def _from_source(self, index: Index, wanted: WantedShard, cap: SourceCap) -> None:
        # One name for each shard: a process that was killed here leaves one draft, which the next one takes away.
        draft: Path = self._store.root / f"{DRAFT_PREFIX}{wanted.id}.mdb-rebuilt"
        # One at a time: it takes a processor, and the cap bounds the rate anyway.
        with self._building, self._store.room_for(wanted.bytes):
            draft.unlink(missing_ok=True)
            try:
                rebuild_shard(index, wanted.number, open_source(index.source, cap), draft, self._clock)
                self._store.adopt(draft, wanted.id)
            except OSError as problem:
                self._store.raise_as_store_error(problem, wanted.bytes)
            finally:
                draft.unlink(missing_ok=True)


class Healer:
    """Verifies shards that a reader doubts and brings damaged or missing ones here, in one background thread.

    Each is looked at by one process at a time; meanwhile other copies serve its samples.
    """

    def __init__(
        self,
        store: Store,
        tiers: tuple[Tier, Tier],
        clock: Clock,
        *,
        node: NodeName | None = None,
        rates: tuple[float, float] = (_SOURCE_BYTES_PER_S, _SOURCE_REQUESTS_PER_S),
        is_tended: bool = False,
    ) -> None:
        """`tiers` are the members and the standing cache; `rates` bound what is asked of a source, per second.

        On a node that is tended by an agent of its own, home and source are left to that where there are others.
        """
        (members, standing), own = tiers, {node}
        has_others = is_tended and any(tier.names - own for tier in tiers if tier.shown)
        most = min(rates[0], _SOURCE_BYTES_PER_S), min(rates[1], _SOURCE_REQUESTS_PER_S)
        cap = None if has_others else SourceCap(TokenBucket(*most), clock)
        self._fetcher = Fetcher(
            store, members.shown, clock, node=node, cap=cap, uses_home=not has_others, standing=standing
        )
        self._fetcher.members = members.members
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._waiting: dict[ShardId, tuple[WantedShard, Callable[[], None], bool]] = {}
        self._not_before: dict[ShardId, float] = {}
        self._paused_until = 0.0
        self._running = self._is_swept = self._is_closed = False

    def heal(self, wanted: WantedShard, healed: Callable[[], None]) -> None:
        """Begin to look at a shard unless that is to come; `healed` is called once it is here and whole.

        One that is being looked at is looked at once more: what is wrong with it may have come since.
        """
        self._begin(wanted, healed, doubted=True)

    def bring(self, wanted: WantedShard, came: Callable[[], None]) -> None:
        """Begin to bring a shard that is not here, unless that failed within a minute.

        One process of a node brings at a time. Where the store takes nothing, all of it waits for a minute.
        """
        if self._may_bring(wanted.id):
            self._begin(wanted, came, doubted=False)

    def _may_bring(self, shard: ShardId) -> bool:
        return self._clock.monotonic() >= max(self._paused_until, self._not_before.get(shard, 0.0))

    def _begin(self, wanted: WantedShard, healed: Callable[[], None], *, doubted: bool) -> None:
        with self._lock:
            if self._is_closed or wanted.id in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting[wanted.id] = wanted, healed, doubted
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="deeplink-heal", daemon=True).start()
        except RuntimeError as problem:  # the system gives no more threads: the next miss tries again
            with self._lock:
                self._waiting.clear()
                self._running = False
            log.warning("no thread to bring shards here: %s", problem)

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            wanted, healed, doubted = next_one
            if not doubted and not self._may_bring(wanted.id):  # it was asked for once more meanwhile
                continue
            try:
                found = self._fetcher.fetch(wanted) if doubted else self._brought(wanted)
            except Exception as problem:  # whatever it is, the shards that wait behind this one get their turn
                if not threading.main_thread().is_alive():  # the process ends
                    return
                log.exception("shard %s cannot be brought here", wanted.id)
                found = Fetched(FetchOutcome.FAILED, problem=f"{type(problem).__name__}: {problem}")
            if found.outcome.is_here:
                healed()  # before it is logged: until then readers take it for damaged
                if doubted:
                    came = f"was brought back from {found.origin}" if found.origin else "is whole, and read again"
                    log.warning("shard %s %s", wanted.id, came)
            elif found.outcome is not FetchOutcome.BUSY:
                self._not_before[wanted.id] = self._clock.monotonic() + _AGAIN_S
                log.warning("shard %s cannot be brought here: %s", wanted.id, found.problem)

    def _brought(self, wanted: WantedShard) -> Fetched:
        try:
            self._store.make()
            if not self._is_swept:
                self._is_swept = True
                self._store.sweep(self._clock.unix())
            with self._fetcher.alone("bringing") as is_alone:
                if not is_alone:
                    return Fetched(FetchOutcome.BUSY, problem="another process is bringing shards")
                found = self._fetcher.fetch(wanted)
                takes_shards = found.outcome is not FetchOutcome.NO_ROOM
        except (DeepLinkError, OSError) as problem:
            found, takes_shards = Fetched(FetchOutcome.FAILED, problem=str(problem)), False
        if not takes_shards:
            self._paused_until = self._clock.monotonic() + _AGAIN_S
        return found

    def _next(self) -> tuple[WantedShard, Callable[[], None], bool] | None:
        with self._lock:
            if not self._waiting:
                self._running = False
                return None
            return self._waiting.pop(next(iter(self._waiting)))

    def close(self) -> None:
        """Begin nothing new; the shard that is being looked at is looked at to its end."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()


def rows_of(index: Index, number: int) -> np.ndarray:
    """Return the rows of a shard in the order in which it holds them; int64."""
    rows = np.flatnonzero(index.column("shard", range(len(index))) == number)
    # Empty samples share their place with the next one: the rows' own order tells which comes first.
    return rows[np.lexsort((rows, np.asarray(index.offset)[rows], np.asarray(index.block)[rows]))]


def rebuild_shard(index: Index, number: int, source: Source, draft: Path, clock: Clock) -> None:
    """Write shard `number` of a version to `draft`, which must not exist, from the files of `source`."""
    rows = rows_of(index, number)
    sizes = np.asarray(index.lengths)[rows].astype(np.int64)
    keys = [SampleKey(index.key(int(row))) for row in rows]
    with FileReader(source, clock) as reader:
        built = build_shard(
            ShardBuilder(source, reader, Names.of(keys), sizes, lambda _files, _bytes: None), draft
        )
    changed = np.flatnonzero(built.checksums != np.asarray(index.checksums)[rows])
    if len(changed):
        draft.unlink(missing_ok=True)
        raise SourceChangedError(index.source, keys[int(changed[0])], "its bytes are not those that were packed")
    wanted = index.shards[number].id
    if built.id != wanted:
        draft.unlink(missing_ok=True)
        raise SourceChangedError(
            index.source, keys[0], f"with the files of its shard it makes {built.id} instead of {wanted}"
        )


def is_unchanged(index: Index, number: int, source: Source) -> bool:
    """Tell whether all files of a shard are at the source as they were packed.

    Files of a local source are looked at: their sizes, and that they have the very times of change that were
    listed and kept beside the index. Those of any other, or where no times were kept, are read and compared:
    nothing less proves it.
    """
    rows = rows_of(index, number)
    marks = kept_marks(index, rows) if source.local else None
    if marks is not None:
        return all(
            _is_as_listed(source, index, row, mark)
            for row, mark in zip(rows.tolist(), marks.tolist(), strict=True)
        )
    return all(_is_same(source, index, row) for row in rows.tolist())


def _is_as_listed(source: Source, index: Index, row: int, mark: int) -> bool:
    try:
        return source.stat(index.key(row)) == (int(index.lengths[row]), mark)
    except SourceError as problem:
        if isinstance(problem, SourceChangedError) or isinstance(problem.__cause__, FileNotFoundError):
            return False
        raise


def _is_same(source: Source, index: Index, row: int) -> bool:
    key, size = index.key(row), int(index.lengths[row])
    whole = xxhash.xxh3_64()
    try:
        for start in range(0, max(size, 1), block.SPAN):
            whole.update(source.read_range(key, start, min(block.SPAN, size - start)))
    except SourceChangedError:
        return False
    return whole.intdigest() == int(index.checksums[row])
