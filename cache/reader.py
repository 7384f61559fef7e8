"""Reads a packed dataset: from this node's store, else from other members, else from the source."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
from typing_extensions import override

from deeplink.cache.batch import Batch
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import IndexFormatError, IndexMendedError, RowError, SampleUnavailableError
from deeplink.cache.holding.fetching import WantedShard
from deeplink.cache.holding.healing import Healer
from deeplink.cache.membership import configured_members, members_token, node_name
from deeplink.cache.reads.arenas import Arenas
from deeplink.cache.reads.fallback import Fallback
from deeplink.cache.reads.local import LocalReader
from deeplink.cache.reads.read_stats import ReadStats, ReadTotals
from deeplink.cache.remote.batch_plan import BatchOutcome
from deeplink.cache.remote.fleet import MemberPool
from deeplink.cache.remote.transport import PlainTransport
from deeplink.cache.sources.bucket import SourceCap, TokenBucket
from deeplink.cache.store import Store
from deeplink.clock import Clock, SystemClock
from deeplink.config import Config, load_config
from deeplink.errors import DeepLinkError
from deeplink.mounts import slowness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from deeplink.cache.index import Index
    from deeplink.types import Version

log = logging.getLogger(__name__)

_HASTE = 10
"""How much more a rank may take from the source than agents that fill in the background: training waits for it."""
_MENDINGS = 8
"""Tries to read with an index of which a part was just restored; a batch comes by no more parts."""

_Read = TypeVar("_Read")


@dataclass(slots=True, eq=False)
class _Process:
    """What a process opens for itself: files, maps and connections do not survive a fork."""

    pid: int
    local: LocalReader
    fleet: MemberPool | None
    healer: Healer
    fallback: Fallback
    tally: ReadTotals
    arenas: Arenas


# One lock for all readers, made anew in a forked child: another thread may hold it at the moment of the fork.
_opening = threading.Lock()


def _renew_lock() -> None:
    global _opening  # noqa: PLW0603 - see above
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Reader:
    """A dataset's version, readable by row. Safe to use from several threads, across fork, and to pickle.

    Attributes:
        name: the dataset.
        version: the version it reads, whatever is packed meanwhile.
        index: its index.
    """

    def __init__(self, name: str, index: Index, config: Config, clock: Clock) -> None:
        self.name, self.index, self.version = name, index, index.version
        self._config, self._clock = config, clock
        self._own: _Process | None = None
        self._leader = ""  # under what name this was announced, for copies in other processes

    @classmethod
    def open(cls, name: str, *, version: Version | None = None, config: Config | None = None) -> Self:
        """Return a reader of a dataset, of its newest version when none is named.

        Raises:
            DatasetMissingError, DatasetNameError: there is no such dataset.
            IndexFormatError: its index is damaged.
            ConfigError: the configuration cannot be used.
        """
        config = config or load_config()
        return cls(name, Catalog(config.catalog).open(name, version), config, SystemClock())

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.name, self.version, self._config), {"_leader": self._leader}

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Sequence[int] | np.ndarray, room: Callable[[int], np.ndarray] | None = None) -> Batch:
        """Return the bytes of samples in one arena, in the order of `rows`.

        They are copied by system calls, so that nothing that happens to a file or a disk meanwhile is worse than a
        sample that is read from elsewhere.

        Args:
            rows: which.
            room: gives the arena for so many bytes, uint8; memory of its own when not given.

        Raises:
            RowError: a row is not in the index.
            SampleUnavailableError: a sample cannot be had anywhere.
        """
        wanted = self._checked(rows)
        made: list[Batch] = []

        def read() -> Batch:
            sizes = self.index.sizes(wanted)
            # Room is asked for once, unless the index was wrong about the sizes.
            if not made or (made[-1].lengths != sizes).any():
                made.append(Batch.empty(sizes, room or self._process().arenas.room))
            if len(wanted):
                self._fill(wanted, made[-1])
            return made[-1]

        return self._sure_of_index(wanted, read)

    def _sure_of_index(self, wanted: np.ndarray, read: Callable[[], _Read]) -> _Read:
        """Return what `read` does; once more where it failed because the index was damaged, which is mended."""
        for _ in range(_MENDINGS):
            try:
                return read()
            except IndexMendedError:
                continue
            except (IndexFormatError, SampleUnavailableError):
                if not self.index.mend(wanted):
                    raise
        return read()

    def read(self, rows: Sequence[int] | np.ndarray) -> list[memoryview]:
        """Return the bytes of each sample of a `batch`. Raises as it does."""
        if len(rows) == 1 and 0 <= (row := int(rows[0])) < len(self.index):
            own = self._process()
            found = own.local.one(row)
            if found is not None:
                own.tally.count(local_samples=1, local_bytes=len(found))
                return [found]
        return self.batch(rows).views()

    def will_need(self, rows: Sequence[int] | np.ndarray) -> None:
        """Ask this node's disk for samples that will be read later, where they lie on it; does not wait for it.

        Whatever is in the way of it is met, and healed, when they are read.

        Raises:
            RowError: a row is not in the index.
        """
        wanted = self._checked(rows)
        with suppress(DeepLinkError, OSError):
            self._process().local.will_need(wanted)

    def views(self, rows: Sequence[int] | np.ndarray) -> list[memoryview]:
        """Return the bytes of samples, in the order of `rows`, without copying what lies verified on this node.

        The fastest way to read, for who does not fear for the SSD: see `LocalReader.views`. Views stay valid as
        long as they are referred to; those of mapped files are read-only.

        Raises:
            RowError: a row is not in the index.
            SampleUnavailableError: a sample cannot be had anywhere.
        """
        wanted = self._checked(rows)
        if not len(wanted):
            return []
        found, left = self._sure_of_index(wanted, lambda: self._process().local.views(wanted))
        size = int(self.index.lengths[wanted].sum())
        if left:
            left = sorted(set(left))
            rest = self.batch(wanted[left])
            size -= rest.arena.nbytes
            for position, view in zip(left, rest.views(), strict=True):
                found[position] = view
        self._process().tally.count(local_samples=len(wanted) - len(left), local_bytes=size)
        return cast("list[memoryview]", found)

    def announce(self, shards: Sequence[int], needed: int) -> None:
        """Say in which order shards are read from now on, so that this node keeps those that are.

        Until then all shards of the version count as needed. It is said for the copies of this reader too that are
        made from now on, by fork or by pickling: a DataLoader's workers read what the trainer knows of.

        Args:
            shards: numbers of shards, the next one first; each once.
            needed: how many of them, from the first, the running epoch still reads.
        """
        with suppress(DeepLinkError, OSError):  # what is in the way is met when they are read
            self._leader = self._process().local.shards.announce(shards, needed)

    def _checked(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(rows, np.int64)
        # A negative row is a huge one when it is taken for unsigned: one look for both ends.
        if len(wanted) and int(wanted.view(np.uint64).max()) >= len(self.index):
            low, high = int(wanted.min()), int(wanted.max())
            raise RowError(low if low < 0 else high, len(self.index))
        return wanted

    def _fill(self, wanted: np.ndarray, batch: Batch) -> None:
        own = self._process()
        left = own.local.fill(wanted, batch)
        size = batch.arena.nbytes
        if len(left):
            size -= int(batch.lengths[left].sum())
            began = self._clock.monotonic()
            self._fill_from_elsewhere(own, wanted, left, batch)
            own.tally.waited(self._clock.monotonic() - began, len(left))
        own.tally.count(local_samples=len(wanted) - len(left), local_bytes=size)

    def _fill_from_elsewhere(self, own: _Process, rows: np.ndarray, positions: np.ndarray, batch: Batch) -> None:
        damaged = self._heal_damaged(own)
        outcome = own.fleet.fill(rows, positions, batch) if own.fleet else BatchOutcome(positions)
        missing, lengths = outcome.missing, batch.lengths
        size = int(lengths[positions].sum()) - int(lengths[missing].sum())
        served = len(positions) - len(missing)
        own.tally.count(peer_samples=served, peer_bytes=size, failures=len(damaged) + len(outcome.failed))
        failed = set(outcome.failed)
        if len(missing):
            failed |= self._fill_at_last(own, rows, outcome, batch)
        if failed or damaged:
            shards = self.index.shard[rows]
            own.tally.count(healed=sum(1 for p in positions.tolist() if p in failed or int(shards[p]) in damaged))

    def _fill_at_last(self, own: _Process, rows: np.ndarray, outcome: BatchOutcome, batch: Batch) -> set[int]:
        """Have samples that no member gave; return the positions of those that home and source had not either.

        Members that are left alone because they failed a moment ago are asked after all: they may be back. So may
        be what was missing here.

        Raises:
            SampleUnavailableError: one cannot be had anywhere.
        """
        fallen = own.fallback.fill(rows, outcome.missing, batch)
        own.tally.count(source_samples=fallen.samples, source_bytes=fallen.bytes, failures=len(fallen.problems))
        if fallen.samples:
            why = "; ".join(sorted({text for texts in outcome.problems.values() for text in texts}))
            log.info("%d samples came from home or source: %s", fallen.samples, why or "nobody holds their shards")
        if not fallen.problems:
            return set()
        lost, lengths = np.array(sorted(fallen.problems), np.int64), self.index.lengths
        left = own.fleet.fill(rows, lost, batch, last_resort=True).missing if own.fleet else lost
        missing = own.local.fill_again(rows, left, batch)
        if len(missing):
            position = int(missing[0])
            row = int(rows[position])
            shard = self.index.shards[int(self.index.shard[row])].id
            tried = [*outcome.problems[position], *fallen.problems[position]]
            raise SampleUnavailableError(self.index.key(row), shard, tried)
        size, here = int(lengths[rows[lost]].sum()), int(lengths[rows[left]].sum())
        own.tally.count(peer_samples=len(lost) - len(left), peer_bytes=size - here)
        own.tally.count(local_samples=len(left), local_bytes=here)
        return set(fallen.problems)

    def _heal_damaged(self, own: _Process) -> set[int]:
        shards = own.local.shards
        damaged = shards.take_damaged()
        for number in damaged:
            own.healer.heal(WantedShard.of(self.index, number), partial(shards.look_again, number))
        return damaged

    def _process(self) -> _Process:
        own = self._own
        if own is not None and own.pid == os.getpid():
            return own
        with _opening:
            own = self._own
            if own is None or own.pid != os.getpid():
                self._own = own = self._opened()
            return own

    def _opened(self) -> _Process:
        everyone, node = configured_members(self._config), node_name(self._config)
        others = [member for member in everyone if member.name != node]
        token = members_token(self._config, others)
        # A store that cannot be made must not end a training that others can serve.
        store = Store(self._config.store, make=False)
        fleet = None
        if others:
            deadline_s = self._config.read_deadline_ms / 1000
            transport = PlainTransport(token, self._clock)
            fleet = MemberPool(self.index, everyone, transport, self._clock, deadline_s=deadline_s, node=node)
        local = LocalReader(self.index, store, self._clock, always=self._config.check_every_read)
        local.shards.follow(self._leader)
        if problem := slowness(self._config.store, self.index.source):
            log.warning("dataset %s may be read slower than its files: %s", self.name, problem)
        rates = (self._config.source_bytes_per_s, self._config.source_requests_per_s)
        cap = SourceCap(TokenBucket(*(_HASTE * rate for rate in rates)), self._clock)
        healer = Healer(store, everyone, token, self._clock, node=node)
        return _Process(os.getpid(), local, fleet, healer, Fallback(self.index, cap), ReadTotals(), Arenas())

    def stats(self) -> ReadStats:
        """Return how this process's reads were served so far."""
        own = self._own
        if own is None or own.pid != os.getpid():
            return ReadStats()
        found = own.tally.stats()
        if own.fleet is None:
            return found
        asked = own.fleet.stats()
        return replace(
            found,
            requests=asked.requests,
            second_requests=asked.second_requests,
            overtaken=asked.overtaken,
            busy=asked.busy,
        )

    def close(self) -> None:
        """End connections and let go of files; views that were handed out stay valid, and a later read reopens."""
        with _opening:
            own, self._own, self._leader = self._own, None, ""
        if own is not None and own.pid == os.getpid():
            own.local.close()
            own.fallback.close()
            if own.fleet is not None:
                own.fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reopened(kind: type[Reader], name: str, version: Version, config: Config) -> Reader:
    return kind.open(name, version=version, config=config)
