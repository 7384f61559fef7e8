"""Reads a packed dataset: from this node's store, else from other members, else from the source."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
from typing_extensions import override

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import (
    IndexFormatError,
    IndexMendedError,
    KeyMissingError,
    SampleForbiddenError,
    SampleUnavailableError,
)
from deeplink.cache.membership import agents_asked
from deeplink.cache.read.batch import Arenas, Batch
from deeplink.cache.read.fallback import Fallback, RawComparison
from deeplink.cache.read.local import LocalReader
from deeplink.cache.replicate.budget import keep_to_budget
from deeplink.cache.replicate.fetching import Healer, WantedShard
from deeplink.cache.source.opening import SourceCap, TokenBucket, holds_many
from deeplink.cache.source.source import SourceAccess
from deeplink.cache.store.index_copies import IndexCopies
from deeplink.cache.store.store import Store
from deeplink.cache.transfer.fleet import BatchOutcome, MemberPool
from deeplink.cache.transfer.frames import PlainTransport
from deeplink.core import process_metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.config import Config, load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.store_place import slowness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.membership import Tier
    from deeplink.rpc.tokens import Vouch

log = logging.getLogger(__name__)

_STALL_S = 0.5
"""What a batch from other nodes never takes when all is well."""
_RANK_SHARE = 10
"""How much more a rank may take from the source than agents that fill in the background: training waits for it."""
_MENDINGS = 8
"""Tries to read with an index of which a part was just restored; a batch comes by no more parts."""
_COMPARED = 64
"""Samples that are read at the source to compare."""

_METRICS = {
    "local_samples": process_metrics.LOCAL_SAMPLES,
    "peer_samples": process_metrics.PEER_SAMPLES,
    "home_samples": process_metrics.HOME_SAMPLES,
    "source_samples": process_metrics.SOURCE_SAMPLES,
    "local_bytes": process_metrics.LOCAL_BYTES,
    "peer_bytes": process_metrics.PEER_BYTES,
    "home_bytes": process_metrics.HOME_BYTES,
    "source_bytes": process_metrics.SOURCE_BYTES,
    "compared_samples": process_metrics.COMPARED_SAMPLES,
}
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """How reads were served by this process since it opened the reader."""

    local_samples: int = 0  # from this node's store, or that of its standing agent
    local_bytes: int = 0
    peer_samples: int = 0  # from other members
    peer_bytes: int = 0
    home_samples: int = 0  # from the packed home
    home_bytes: int = 0
    source_samples: int = 0  # from the source
    source_bytes: int = 0
    compared_samples: int = 0  # read from the source besides, to compare how fast that is; served to nobody
    compared_bytes: int = 0
    failures: int = 0  # tries that failed: a damaged shard, a silent member, wrong bytes
    healed: int = 0  # samples that a try failed for and that were served all the same
    requests: int = 0  # batches asked of other members, second requests not among them
    second_requests: int = 0  # asked because the first member had not begun to answer in its usual time
    overtaken: int = 0  # requests given up because second ones had brought everything
    busy: int = 0  # requests that a busy member refused; others served them, or it did later
    stalls: int = 0  # batches that waited longer than half a second for what is not on this node
    longest_wait_s: float = 0.0  # of such waits, a stall or not
    waited_s: float = 0.0  # all of these together


class ReadTotals:
    """The counts of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._longest_wait_s = self._waited_s = 0.0
        self._row = process_metrics.row_of_worker()
        process_metrics.of_process.count_in(self)

    def count(self, **counts: int) -> None:
        """Add to fields of `ReadStats`."""
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number
        if self._row is not None:
            self._row.add({_METRICS[name]: float(number) for name, number in counts.items() if name in _METRICS})

    def waited(self, seconds: float, samples: int) -> None:
        """Note that so many samples from elsewhere took so long."""
        is_stall = seconds > _STALL_S
        if is_stall:
            log.warning("%d samples that are not on this node took %.1f s", samples, seconds)
        with self._lock:
            self._longest_wait_s = max(self._longest_wait_s, seconds)
            self._waited_s += seconds
            self._counts["stalls"] += is_stall
        if self._row is not None:
            self._row.add({process_metrics.WAITED_S: seconds})

    def count_of(self, name: str) -> int:
        """Return one field of `ReadStats`."""
        return self._counts[name]

    def stats(self) -> ReadStats:
        """Return what was counted so far."""
        with self._lock:
            return ReadStats(**self._counts, longest_wait_s=self._longest_wait_s, waited_s=self._waited_s)

    def vitals(self) -> dict[str, float]:
        """Return how many samples came from where, for the reports of training; nothing before the first."""
        found = self.stats()
        counts = {metric: float(getattr(found, name)) for name, metric in _METRICS.items()}
        return counts | {process_metrics.WAITED_S: found.waited_s} if any(counts.values()) else {}


@dataclass(slots=True, eq=False)
class _Process:
    """What a process opens for itself: files, maps and connections do not survive a fork."""

    pid: int
    local: LocalReader
    pools: tuple[tuple[str, MemberPool], ...]  # in the order in which they are asked; where theirs are counted
    healer: Healer
    fallback: Fallback
    tally: ReadTotals
    arenas: Arenas
    comparison: RawComparison
    fills: bool  # brings what it misses to the store


def _is_for_all(access: str) -> bool:
    """Tell whether all users may read a dataset: then the agent of any may hold it."""
    try:
        return bool(SourceAccess.parse(access).mode & 0o004)
    except ValueError:
        return False


# One lock for all readers, replaced in a forked child: another thread may hold it at the moment of the fork.
_opening = threading.Lock()


def _renew_lock() -> None:
    global _opening  # noqa: PLW0603 - see above
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Reader:
    """A dataset's version, readable by row. Safe to use from several threads, across fork, and to pickle."""

    def __init__(self, name: str, index: Index, config: Config, clock: Clock, vouch: Vouch | None = None) -> None:
        self.name, self.index, self.version, self._vouch = name, index, index.version, vouch
        self._config, self._clock = config, clock
        self._own: _Process | None = None
        self._is_said = False  # that the small files are faster
        self._leader = ""  # under what name this was announced, for copies in other processes

    @classmethod
    def open(
        cls,
        name: str,
        *,
        version: str | None = None,
        config: Config | None = None,
        vouch: Vouch | None = None,
    ) -> Self:
        """Return a reader of a dataset, of its newest version when none, nor the beginning of one, is named.

        `vouch` proves who reads to agents whose token is not this user's to read.
        """
        config, clock = config or load_config(), SystemClock()
        store = Store(config.store, make=False)
        keep_to_budget(store, config, clock, staying=())
        index = IndexCopies(store, Catalog(config.catalog), clock).open(name, version)
        return cls(name, index, config, clock, vouch)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        reopen = partial(type(self).open, version=self.version, config=self._config, vouch=self._vouch)
        return reopen, (self.name,), {"_leader": self._leader}

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Sequence[int] | np.ndarray, room: Callable[[int], np.ndarray] | None = None) -> Batch:
        """Return the bytes of samples in one arena, in the order of `rows`.

        They are copied by system calls: a file or disk that fails meanwhile costs a read from elsewhere, no more.
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
        """Ask this node's disk for samples that will be read later, where they lie on it; does not wait for it."""
        wanted = self._checked(rows)
        with suppress(DeepLinkError, OSError):  # what is in the way is met, and healed, when they are read
            self._process().local.will_need(wanted)

    def views(self, rows: Sequence[int] | np.ndarray) -> list[memoryview]:
        """Return the bytes of samples, in the order of `rows`, without copying what lies verified on this node.

        The fastest way to read, where the SSD can be trusted: see `LocalReader.views`. Views stay valid as long as
        they are referred to; those of mapped files are read-only.
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
        """Say in which order shards are read from now on, so that this node keeps those; until then it keeps all.

        It holds also for copies of this reader made from now on, by fork or pickling (DataLoader workers).
        """
        with suppress(DeepLinkError, OSError):  # what is in the way is met when they are read
            self._leader = self._process().local.shards.announce(shards, needed)

    def _checked(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted = np.asarray(rows, np.int64)
        # A negative row is a huge one when it is taken for unsigned: one look for both ends.
        if len(wanted) and int(wanted.view(np.uint64).max()) >= len(self.index):
            low, high = int(wanted.min()), int(wanted.max())
            raise KeyMissingError(low if low < 0 else high, len(self.index))
        return wanted

    def _fill(self, wanted: np.ndarray, batch: Batch) -> None:
        own = self._process()
        if own.comparison.is_aside() and self._fill_from_source(own, wanted, batch):
            return
        began, before = self._clock.monotonic(), own.tally.count_of("source_samples")
        self._fill_from_cache(own, wanted, batch)
        # What the source was just read for would come from memory if it was read once more.
        is_ours = own.tally.count_of("source_samples") == before
        if is_ours and own.comparison.is_due(len(wanted), self._clock.monotonic() - began):
            self._compare(own, wanted[:_COMPARED])

    def _compare(self, own: _Process, rows: np.ndarray) -> None:
        """Read some samples at the source; say it, once, where that is faster than reading them here."""
        batch, began = Batch.empty(self.index.lengths[rows]), self._clock.monotonic()
        fallen = own.fallback.fill(rows, np.arange(len(rows)), batch, source_only=True)
        seconds = self._clock.monotonic() - began
        read = fallen.counts
        own.tally.count(compared_samples=read["source_samples"], compared_bytes=read["source_bytes"])
        if not fallen.problems and (faster := own.comparison.compared(seconds / len(rows))):
            tell = log.info if self._is_said else log.warning
            self._is_said = True
            said = "dataset %s takes %s. These are read for ten minutes; step_aside = false forbids that"
            tell(said, self.name, faster)

    def _fill_from_source(self, own: _Process, wanted: np.ndarray, batch: Batch) -> bool:
        """Read the small files. False: not all could be read."""
        fallen = own.fallback.fill(wanted, np.arange(len(wanted)), batch, source_only=True)
        if fallen.problems:
            own.comparison.end_aside()
            return False
        own.tally.count(**fallen.counts)
        return True

    def _fill_from_cache(self, own: _Process, wanted: np.ndarray, batch: Batch) -> None:
        left = own.local.fill(wanted, batch)
        here = batch.arena.nbytes
        if len(left):
            size = here if len(left) == len(wanted) else int(batch.lengths[left].sum())
            here -= size
            began = self._clock.monotonic()
            self._fill_from_elsewhere(own, wanted, left, batch, size)
            own.tally.waited(self._clock.monotonic() - began, len(left))
        if len(left) < len(wanted):
            own.tally.count(local_samples=len(wanted) - len(left), local_bytes=here)

    def _fill_from_elsewhere(
        self, own: _Process, rows: np.ndarray, positions: np.ndarray, batch: Batch, size: int
    ) -> None:
        damaged = self._heal_damaged(own)
        outcome = BatchOutcome(positions)
        for place, pool in own.pools:
            before = len(outcome.missing)
            outcome.go_on(pool.fill(rows, outcome.missing, batch))
            left = int(batch.lengths[outcome.missing].sum()) if len(outcome.missing) else 0
            came = {f"{place}_samples": before - len(outcome.missing), f"{place}_bytes": size - left}
            own.tally.count(**came)
            size = left
            if not len(outcome.missing):  # an empty sample has no bytes
                break
        missing = outcome.missing
        failed = set(outcome.failed)
        if failed or damaged:
            own.tally.count(failures=len(damaged) + len(failed))
        lost = self._fill_at_last(own, rows, outcome, batch) if len(missing) else set[int]()
        failed |= lost
        if own.fills:  # the next epoch is to find them here
            self._bring(own, rows, [position for position in positions.tolist() if position not in lost])
        if failed or damaged:
            shards = self.index.shard[rows]
            own.tally.count(healed=sum(1 for p in positions.tolist() if p in failed or int(shards[p]) in damaged))

    def _fill_at_last(self, own: _Process, rows: np.ndarray, outcome: BatchOutcome, batch: Batch) -> set[int]:
        """Read samples that no member gave; return the positions of those that home and source had not either.

        For these, members that failed a moment ago are asked after all, and this node's store is looked at again.
        """
        fallen = own.fallback.fill(rows, outcome.missing, batch)
        own.tally.count(**fallen.counts, failures=len(fallen.problems))
        if fallen.counts:
            why = "; ".join(sorted({text for texts in outcome.problems.values() for text in texts}))
            home, source = fallen.counts.get("home_samples", 0), fallen.counts.get("source_samples", 0)
            said = "%d samples came from the home and %d from the source: %s"
            log.info(said, home, source, why or "no member holds their shards")
        if not fallen.problems:
            return set()
        lost, lengths = np.array(sorted(fallen.problems), np.int64), self.index.lengths
        left = lost
        for _, pool in own.pools:
            left = pool.fill(rows, left, batch, last_resort=True).missing
        missing = own.local.fill_again(rows, left, batch)
        if len(missing):
            position = int(missing[0])
            row = int(rows[position])
            shard = self.index.shards[int(self.index.shard[row])].id
            tried = [*outcome.problems[position], *fallen.problems[position]]
            kind = SampleForbiddenError if position in fallen.forbidden else SampleUnavailableError
            raise kind(self.index.key(row), shard, tried)
        size, here = int(lengths[rows[lost]].sum()), int(lengths[rows[left]].sum())
        own.tally.count(peer_samples=len(lost) - len(left), peer_bytes=size - here)
        own.tally.count(local_samples=len(left), local_bytes=here)
        return set(fallen.problems)

    def _bring(self, own: _Process, rows: np.ndarray, positions: Sequence[int]) -> None:
        """Have the shards of these positions brought to this node in the background."""
        shards = own.local.shards
        for number in sorted({int(self.index.shard[rows[position]]) for position in positions}):
            own.healer.bring(WantedShard.of(self.index, number), partial(shards.forget_absent, (number,)))

    def _heal_damaged(self, own: _Process) -> set[int]:
        shards = own.local.shards
        damaged = shards.take_damaged()
        for number in damaged:
            own.healer.heal(WantedShard.of(self.index, number), partial(shards.vouch, number))
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
        config, tally, asked = self._config, ReadTotals(), agents_asked(self._config, self._vouch)
        # A store that cannot be made must not end a training that others can serve.
        store = Store(config.store, make=False)
        pool_of = partial(
            MemberPool, self.index, clock=self._clock, deadline_s=config.read_deadline_ms / 1000, count=tally.count
        )
        # The job's own nodes first. Of those only a shard's owners: the standing cache has it sooner than others.
        owners = {"most": config.replicas} if asked.standing.shown else {}
        tiers: tuple[tuple[str, Tier, dict[str, Any]], ...] = (
            ("local", asked.here, {}),
            ("peer", asked.members, {"node": asked.node, **owners}),
            ("peer", asked.standing, {}),
        )
        pools = [
            (place, pool_of(tier.members, PlainTransport(tier.shown, self._clock), **how))
            for place, tier, how in tiers
            if tier.members and tier.shown
        ]
        # An agent of another user may not have what not all may read.
        fills_itself = not asked.is_tended or not (asked.has_token or _is_for_all(self.index.access))
        if fills_itself:  # no agent looks after the store
            keep_to_budget(store, config, self._clock, staying=())
        local = LocalReader(self.index, store, self._clock, always=self._config.check_every_read)
        local.shards.follow(self._leader)
        if slow := slowness(self._config.store, self.index.source):
            log.warning("dataset %s may be read slower than its files: %s", self.name, slow)
        # Not into a home that nodes share, nor where the store is the slower one.
        fills = config.fill_on_miss and fills_itself and not slow
        rates = (self._config.source_bytes_per_s, self._config.source_requests_per_s)
        cap = SourceCap(TokenBucket(*(_RANK_SHARE * rate for rate in rates)), self._clock)
        tended = not fills_itself
        healer = Healer(
            store, (asked.members, asked.standing), self._clock, node=asked.node, rates=rates, is_tended=tended
        )
        fallback = Fallback(self.index, cap)
        allowed = config.step_aside and not holds_many(self.index.source)
        comparison = RawComparison(self._clock, allowed=allowed)
        return _Process(
            os.getpid(), local, tuple(pools), healer, fallback, tally, Arenas(), comparison, fills=fills
        )

    def stats(self) -> ReadStats:
        """Return how this process's reads were served so far."""
        own = self._own
        if own is None or own.pid != os.getpid():
            return ReadStats()
        return own.tally.stats()

    def close(self) -> None:
        """End connections and let go of files; views that were handed out stay valid, and a later read reopens."""
        with _opening:
            own, self._own, self._leader = self._own, None, ""
        if own is not None and own.pid == os.getpid():
            own.healer.close()
            own.local.close()
            own.fallback.close()
            for _, pool in own.pools:
                pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
