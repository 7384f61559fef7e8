"""Reads a packed dataset: from this node's store, else from other members, else from the source."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from typing_extensions import override

from deeplink.cache import block
from deeplink.cache.asking import Outcome
from deeplink.cache.batch import Batch
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import RowError, SampleUnavailableError, SourceChangedError
from deeplink.cache.fetching import Wanted
from deeplink.cache.fleet import Fleet
from deeplink.cache.healing import Healer
from deeplink.cache.local import LocalReader
from deeplink.cache.membership import members_token, other_members
from deeplink.cache.mounts import slowness
from deeplink.cache.source import open_source
from deeplink.cache.store import Store
from deeplink.cache.transport import PlainTransport
from deeplink.clock import Clock, SystemClock
from deeplink.config import Config, load_config
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from deeplink.cache.index import Index
    from deeplink.cache.source import Source
    from deeplink.types import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """How reads were served by this process since it opened the reader.

    Attributes:
        local_samples, local_bytes: from this node's store.
        peer_samples, peer_bytes: from other members.
        source_samples, source_bytes: from the source.
        failures: tries that failed: a damaged shard, a silent member, wrong bytes.
        healed: samples that a try failed for and that were served all the same.
    """

    local_samples: int = 0
    local_bytes: int = 0
    peer_samples: int = 0
    peer_bytes: int = 0
    source_samples: int = 0
    source_bytes: int = 0
    failures: int = 0
    healed: int = 0


@dataclass(slots=True, eq=False)
class _Process:
    """What a process opens for itself: files, maps and connections do not survive a fork."""

    pid: int
    local: LocalReader
    fleet: Fleet | None
    healer: Healer
    source: Source | None = None


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
        self._counts: Counter[str] = Counter()

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
        return _reopened, (type(self), self.name, self.version, self._config)

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
        batch = Batch.empty(self.index.lengths[wanted], room)
        if len(wanted):
            self._fill(wanted, batch)
        return batch

    def read(self, rows: Sequence[int] | np.ndarray) -> list[memoryview]:
        """Return the bytes of each sample of a `batch`. Raises as it does."""
        return self.batch(rows).views()

    def will_need(self, rows: Sequence[int] | np.ndarray) -> None:
        """Ask this node's disk for samples that will be read later, where they lie on it; does not wait for it.

        Raises:
            RowError: a row is not in the index.
        """
        self._process().local.will_need(self._checked(rows))

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
        found, left = self._process().local.views(wanted)
        size = int(self.index.lengths[wanted].sum())
        if left:
            left = sorted(set(left))
            rest = self.batch(wanted[left])
            size -= rest.arena.nbytes
            for position, view in zip(left, rest.views(), strict=True):
                found[position] = view
        self._count(local_samples=len(wanted) - len(left), local_bytes=size)
        return cast("list[memoryview]", found)

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
            size -= int(self.index.lengths[wanted[left]].sum())
            self._fill_from_elsewhere(own, wanted, left, batch)
        self._count(local_samples=len(wanted) - len(left), local_bytes=size)

    def _fill_from_elsewhere(self, own: _Process, rows: np.ndarray, positions: np.ndarray, batch: Batch) -> None:
        damaged = self._heal_damaged(own)
        outcome = own.fleet.fill(rows, positions, batch) if own.fleet else Outcome(positions)
        missing, lengths = outcome.missing, self.index.lengths
        size = int(lengths[rows[positions]].sum()) - int(lengths[rows[missing]].sum())
        served = len(positions) - len(missing)
        self._count(peer_samples=served, peer_bytes=size, failures=len(damaged) + len(outcome.failed))
        lost: dict[int, SampleUnavailableError] = {}
        for position in missing.tolist():
            try:
                batch[position][:] = self._from_source(own, int(rows[position]), outcome.problems[position])
            except SampleUnavailableError as problem:
                lost[position] = problem
        self._last_resort(own, rows, lost, batch)
        failed = outcome.failed | lost.keys()
        if failed or damaged:
            shards = self.index.shard[rows]
            self._count(healed=sum(1 for p in positions.tolist() if p in failed or int(shards[p]) in damaged))

    def _last_resort(
        self, own: _Process, rows: np.ndarray, lost: dict[int, SampleUnavailableError], batch: Batch
    ) -> None:
        """Have samples from members that are left alone because they failed a moment ago: they may be back."""
        if not lost:
            return
        wanted = np.array(sorted(lost), np.int64)
        missing = own.fleet.fill(rows, wanted, batch, last_resort=True).missing if own.fleet else wanted
        if len(missing):
            raise lost[int(missing[0])]
        self._count(peer_samples=len(wanted), peer_bytes=int(self.index.lengths[rows[wanted]].sum()))

    def _heal_damaged(self, own: _Process) -> set[int]:
        shards = own.local.shards
        damaged = shards.take_damaged()
        for number in damaged:
            own.healer.heal(Wanted.of(self.index, number), partial(shards.look_again, number))
        return damaged

    def _from_source(self, own: _Process, row: int, problems: Sequence[str]) -> memoryview:
        key = self.index.key(row)
        try:
            own.source = own.source or open_source(self.index.source)
            data = own.source.read(key, int(self.index.lengths[row]))
            if block.checksum(data) != int(self.index.checksums[row]):
                raise SourceChangedError(self.index.source, key, "its bytes are not those that were packed")
        except DeepLinkError as problem:
            self._count(failures=1)
            shard = self.index.shards[int(self.index.shard[row])].id
            raise SampleUnavailableError(key, shard, [*problems, str(problem)]) from problem
        log.info("%r was read from the source: %s", key, "; ".join(problems) or "nobody holds its shard")
        self._count(source_samples=1, source_bytes=len(data))
        return memoryview(data)

    def _process(self) -> _Process:
        own = self._own
        if own is not None and own.pid == os.getpid():
            return own
        with _opening:
            own = self._own
            if own is None or own.pid != os.getpid():
                self._counts = Counter()
                self._own = own = self._opened()
            return own

    def _opened(self) -> _Process:
        members = other_members(self._config)
        token = members_token(self._config, members)
        # A store that cannot be made must not end a training that others can serve.
        store = Store(self._config.store, make=False)
        fleet = None
        if members:
            deadline_s = self._config.read_deadline_ms / 1000
            fleet = Fleet(
                self.index, members, PlainTransport(token, self._clock), self._clock, deadline_s=deadline_s
            )
        local = LocalReader(self.index, store, self._clock, always=self._config.check_every_read)
        if problem := slowness(self._config.store, self.index.source):
            log.warning("dataset %s may be read slower than its files: %s", self.name, problem)
        return _Process(os.getpid(), local, fleet, Healer(store, members, token, self._clock))

    def _count(self, **counts: int) -> None:
        with _opening:
            self._counts.update(counts)

    def stats(self) -> ReadStats:
        """Return how this process's reads were served so far."""
        with _opening:
            return ReadStats(**self._counts) if self._own and self._own.pid == os.getpid() else ReadStats()

    def close(self) -> None:
        """End connections and let go of files; views that were handed out stay valid, and a later read reopens."""
        with _opening:
            own, self._own = self._own, None
        if own is not None and own.pid == os.getpid():
            own.local.close()
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
