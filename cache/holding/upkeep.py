"""What an agent does for its store on its own account, at bounded rates, as long as it runs.

It verifies shards, reads them again from time to time, brings back what was lost, takes its share, and keeps to
the budget. No trouble ends that.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink import metrics
from deeplink.cache import ownership
from deeplink.cache.errors import StoreError
from deeplink.cache.holding.fetching import WantedShard
from deeplink.cache.keeping.pins import read_pins
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.holding.disk_budget import StoreBudget
    from deeplink.cache.holding.filling import Filler
    from deeplink.cache.holding.recovery import ReplicaLookup
    from deeplink.cache.holding.shard_versions import KnownShards
    from deeplink.cache.keeping.identity import StoreNotes
    from deeplink.cache.store import Store
    from deeplink.clock import Clock
    from deeplink.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)

VERIFY_BYTES_PER_S = 200e6
"""Shards are verified in the background no faster than this, so that training has the SSD to itself."""
SCRUB_BYTES_PER_S = 50e6
DAY_S = 86_400.0
_TICK_S = 1.0
_AGAIN_S = 60.0
"""A shard that was lost or missed is not wanted again sooner."""
_PATIENCE_S, _ASKED_KEPT_S = 8.0, 120.0
"""Who is not a shard's first owner brings it when asked again so much later, and not much later than that."""
_MOST_ASKED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepIntervals:
    """How often what is looked at, seconds."""

    verify_s: float = 30.0
    lost_s: float = 2.0
    budget_s: float = 60.0
    share_s: float = 600.0
    unused_s: float = 3600.0
    note_s: float = 600.0
    scrub_s: float = 7 * DAY_S
    unused_after_s: float = 30 * DAY_S


class Upkeep:
    """Looks after one store.

    Args:
        node: this member's name.
        store: which store.
        filler: brings shards.
        room: keeps to the budget.
        known: finds the versions of shards.
        recovery: knows other copies.
        clock: where time comes from.
        pace: how often.
        notes: where it is noted what the store holds; None for nowhere.
        replicas: copies of each shard.

    Attributes:
        verified: set once every shard that was here at the start has been verified or set aside.
        problem: what is wrong with the store's disk; empty while it is well.
        everyone: all members, this one among them; empty where none are known.
    """

    def __init__(
        self,
        node: NodeName,
        store: Store,
        filler: Filler,
        room: StoreBudget,
        known: KnownShards,
        *,
        recovery: ReplicaLookup,
        clock: Clock,
        pace: UpkeepIntervals,
        notes: StoreNotes | None,
        replicas: int,
    ) -> None:
        self._node, self._store, self._filler, self._room, self._known = node, store, filler, room, known
        self._recovery, self._clock, self._pace = recovery, clock, pace
        self._notes, self._replicas = notes, replicas
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._due: dict[str, float] = {}
        self._again: dict[ShardId, float] = {}
        self._asked: OrderedDict[ShardId, tuple[float, bool]] = OrderedDict()
        self._missed: set[ShardId] = set()
        self._lock = threading.Lock()
        self.verified = threading.Event()
        self.problem = ""
        self.everyone: tuple[Member, ...] = ()

    def start(self) -> None:
        """Begin."""
        for run in (self._verify_all, self._bring_all, self._tend_all):
            name = f"deeplink-{run.__name__.strip('_')}"
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End, and note what the store holds."""
        self._ending.set()
        if self._threads:
            self._note()

    def take_share_soon(self) -> None:
        """Look for shards to take now: the members are others."""
        self._due.pop("share", None)

    # A thread each for what may take long: reading shards whole, having shards brought, and looking at sources.

    def _verify_all(self) -> None:
        while not self._ending.is_set():
            try:
                self._store.sweep(self._clock.unix())
                shards = self._store.ids()
            except OSError as problem:
                self._complain(problem)
                shards = []
            for shard in shards:
                self._ending.wait(self._verify_one(shard))
                if self._ending.is_set():
                    return
            self.verified.set()
            self._ending.wait(self._pace.verify_s)

    def _verify_one(self, shard: ShardId) -> float:
        """Verify a shard if that is due; return for how many seconds the SSD is to be left alone."""
        began = self._clock.monotonic()
        try:
            if self._clock.unix() - self._store.verified_unix(shard) < self._pace.scrub_s:
                return 0.0
            is_first = not self._store.is_verified(shard)
            size = self._store.path(shard).stat().st_size
            is_whole = self._store.verify(shard)
        except FileNotFoundError:  # removed since
            return 0.0
        except OSError as problem:  # one that cannot be opened hides none of the others
            self._complain(problem)
            return 0.0
        metrics.SCRUB_SHARDS.labels("whole" if is_whole else "damaged").inc()
        metrics.SCRUB_BYTES.inc(size)
        rate = VERIFY_BYTES_PER_S if is_first else SCRUB_BYTES_PER_S
        return max(0.0, size / rate - (self._clock.monotonic() - began))

    def _bring_all(self) -> None:
        self._run((("lost", self._pace.lost_s, self._bring_back), ("share", self._pace.share_s, self._take_share)))

    def _tend_all(self) -> None:
        self._run(
            (
                ("wiped", float("inf"), self._look_for_wiping),
                ("budget", self._pace.budget_s, self._keep_to_budget),
                ("unused", self._pace.unused_s, self._drop_unused),
                ("note", self._pace.note_s, self._note),
            )
        )

    def _run(self, duties: Sequence[tuple[str, float, Callable[[], None]]]) -> None:
        while not self._ending.is_set():
            for name, every, duty in duties:
                now = self._clock.monotonic()
                if self._ending.is_set() or now < self._due.get(name, float("-inf")):
                    continue
                self._due[name] = now + every
                try:
                    duty()
                except (OSError, DeepLinkError) as problem:
                    self._complain(problem)
            self._ending.wait(min(_TICK_S, self._pace.lost_s))

    def _complain(self, problem: Exception) -> None:
        if str(problem) != self.problem:  # once, not every few seconds
            self.problem = str(problem)
            log.warning("store %s: %s", self._store.root, problem)
        metrics.STORE_HEALTHY.set(0)

    def _look_for_wiping(self) -> None:
        if self._notes is not None and (said := self._notes.wiped()):
            log.warning("%s", said)
            metrics.STORE_WIPED.set(1)
            self._notes.note()  # so that it is said once

    def _bring_back(self) -> None:
        """Have shards brought that were put into quarantine, by whichever process, and those that were missed."""
        with self._lock:
            missed, self._missed = self._missed, set()
            for shard in missed:
                self._asked.pop(shard, None)
        now = self._clock.monotonic()
        if len(self._again) > _MOST_ASKED:
            self._again.clear()
        for shard in [*self._store.lost(), *missed]:
            if self._again.get(shard, 0.0) <= now:
                self._again[shard] = now + _AGAIN_S
                self._want(shard, urgent=True)

    def _want(self, shard: ShardId, *, urgent: bool) -> None:
        wanted = self._known.find(shard)
        if wanted is None:
            self._recovery.ask_members()
            size = self._recovery.held_elsewhere().get(shard, 0)
            if not size:
                return
            wanted = WantedShard(id=shard, bytes=size)
        self._filler.want(wanted, urgent=urgent)

    def missed(self, shard: ShardId) -> None:
        """Take note that somebody asked for a shard that is not here.

        The first of its owners has it brought at once. Another member only if it is asked again after a while: who
        comes before it is gone then, not merely slow.
        """
        now = self._clock.monotonic()
        with self._lock:
            since, at_once = self._asked.get(shard, (0.0, False))
            if not since or now - since > _ASKED_KEPT_S:
                since, at_once = now, self._owns(shard, 1)
                self._asked[shard] = since, at_once
                if len(self._asked) > _MOST_ASKED:
                    self._asked.popitem(last=False)
            if at_once or now - since > _PATIENCE_S:
                self._missed.add(shard)

    def _owns(self, shard: ShardId, copies: int) -> bool:
        names = [member.name for member in self.everyone]
        known = ownership.standing(self.everyone)
        return self._node in ownership.owners(shard, names or [self._node], copies, known)

    def _take_share(self) -> None:
        """Have shards brought that are in use, and that this member is to hold.

        In use is what another member holds and what is of a dataset's newest version or pinned here: so a member
        that joins takes its share, and old versions and what nobody has any more stay away.
        """
        if len(self.everyone) < 2:  # noqa: PLR2004 - alone
            return
        self._recovery.ask_members()
        elsewhere = self._recovery.held_elsewhere()
        current = self._known.in_newest()
        pinned = {shard for pin in read_pins(self._store.root, self._clock.unix()) for shard in pin.shards}
        wanted = [
            shard
            for shard in elsewhere
            if (not current or shard in current or shard in pinned)
            and not self._store.has(shard)
            and self._owns(shard, self._replicas)
        ]
        # Looked at last: what was dropped since is not to come back at once.
        away, spare = self._store.marks.dismissed(), self._room.spare()
        for shard in wanted:
            if shard in away:
                continue
            spare -= elsewhere[shard]
            if spare < 0:  # a share is taken where there is room; nothing leaves for it
                log.info("there is no room for all of this member's share")
                return
            self._want(shard, urgent=False)

    def _keep_to_budget(self) -> None:
        is_within = self._room.keep()
        probe = self._store.root / f".draft-probe-{self._node}"
        probe.write_bytes(b"x")  # a disk that was remounted read-only is noticed here
        probe.unlink()
        oldest = min((self._store.verified_unix(shard) for shard in self._store.ids()), default=0.0)
        metrics.SCRUB_OLDEST_SECONDS.set(self._clock.unix() - oldest if oldest else 0.0)
        if not is_within:
            raise StoreError(self._store.root, "it is over its budget, and nothing may leave")
        if self.problem:
            log.warning("store %s is well again", self._store.root)
        self.problem = ""
        metrics.STORE_HEALTHY.set(1)

    def _drop_unused(self) -> None:
        dropped = self._room.drop_unused(self._clock.unix() - self._pace.unused_after_s)
        if dropped:
            log.info("%d shards that nobody read for long were dropped", dropped)

    def _note(self) -> None:
        if self._notes is None:
            return
        try:
            self._notes.note()
        except (OSError, DeepLinkError) as problem:
            log.warning("it cannot be noted what the store holds: %s", problem)
