"""What leaves a full store, and what does not."""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import TYPE_CHECKING, cast

import pytest

from deeplink.cache.errors import StoreFullError
from deeplink.cache.replicate.budget import StoreBudget
from deeplink.cache.replicate.fill import evict
from deeplink.cache.store.pins import TTL_S
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from deeplink.core.types import ShardId
from deeplink.v1 import cache_pb2
from tests.deeplink.checkpoints.faults import refusing
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from deeplink.cache.replicate.shard_recovery import ReplicaLookup

SHARDS = [ShardId(f"{number:040x}") for number in range(5)]


class Kept:
    """A recovery that has these shards at their source; `looking` is called while it looks."""

    def __init__(self, shards: Collection[ShardId]) -> None:
        self.shards = shards
        self.looking: Callable[[], None] = lambda: None

    def ask_members(self, *, again: bool = False) -> None:
        """There are none."""

    def at_member(self, _shard: ShardId) -> bool:
        """No."""
        return False

    def is_kept(self, shard: ShardId) -> bool:
        """Tell it."""
        self.looking()
        return shard in self.shards


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return one of five shards of 1,000 bytes, the first the longest unused."""
    store = Store(tmp_path / "store")
    for age, shard in enumerate(reversed(SHARDS)):
        store.path(shard).write_bytes(b"x" * 1000)
        used = SystemClock().unix() - 100 * age
        os.utime(store.path(shard), (used, used))
    return store


def room_of(store: Store, budget: int, recovery: Kept, staying: Collection[ShardId] = ()) -> StoreBudget:
    room = StoreBudget(store, budget, lambda: recovery, SystemClock(), staying=staying)  # type: ignore[arg-type,return-value]
    store.reserve = room.reserve
    return room


def test_what_is_larger_than_the_budget_makes_nothing_leave(store: Store) -> None:
    room_of(store, 10_000, Kept(SHARDS))
    with pytest.raises(StoreFullError):
        store.add(ShardId("f" * 40), [b"x"], 10_001)
    assert store.ids() == SHARDS


def test_nothing_leaves_where_that_would_not_be_enough(store: Store) -> None:
    room_of(store, 6_000, Kept(SHARDS[:2]))
    with pytest.raises(StoreFullError), store.room_for(3_500):
        pass
    assert store.ids() == SHARDS
    with store.room_for(3_000):
        assert store.ids() == SHARDS[2:]


def test_what_fits_makes_the_longest_unused_leave_down_to_the_low_mark(store: Store) -> None:
    room = room_of(store, 5_000, Kept(SHARDS))
    with store.room_for(1_000):
        assert store.ids() == SHARDS[2:]
        assert room.spare() == 500


def test_what_is_to_stay_stays(store: Store) -> None:
    room_of(store, 5_000, Kept(SHARDS), staying=SHARDS[:4])
    with store.room_for(1_000):
        assert store.ids() == SHARDS[:4]
    with pytest.raises(StoreFullError), store.room_for(1_500):
        pass


def test_a_store_that_is_over_its_budget_loses_what_it_can(store: Store) -> None:
    assert not room_of(store, 2_000, Kept(SHARDS[:2])).keep()
    assert store.ids() == SHARDS[2:]


@pytest.mark.parametrize("act", ["reserve", "unused"])
def test_the_store_can_be_used_while_a_source_is_looked_at(store: Store, act: str) -> None:
    recovery = Kept(SHARDS)
    room = room_of(store, 5_000, recovery)
    free: list[bool] = []

    def look() -> None:
        asked = threading.Thread(target=room.spare, daemon=True)  # takes the lock for a moment
        asked.start()
        asked.join(LIMIT_S)
        free.append(not asked.is_alive())

    recovery.looking = look
    if act == "reserve":
        with store.room_for(1_000):
            assert len(store.ids()) < len(SHARDS)
    else:
        assert room.drop_unused(SystemClock().unix() + 10) == len(SHARDS)
    assert set(free) == {True}


@pytest.mark.parametrize("act", ["reserve", "unused"])
def test_what_is_pinned_while_its_source_is_looked_at_stays(store: Store, act: str) -> None:
    recovery = Kept(SHARDS)
    room = room_of(store, 5_000, recovery)
    pins = store.root / ".pins"
    pins.mkdir()

    def pin() -> None:
        said = {"version": "v", "ttl_s": 100, "needed": 1, "shards": SHARDS[:1], "process": [0, 0, ""]}
        (pins / "job.json").write_text(json.dumps(said))

    recovery.looking = pin
    if act == "reserve":
        with store.room_for(1_000):
            pass
    else:
        assert room.drop_unused(SystemClock().unix() + 10) == len(SHARDS) - 1
    assert SHARDS[0] in store.ids()
    assert len(store.ids()) < len(SHARDS)


def test_what_is_pinned_while_others_are_asked_is_not_evicted_not_even_the_last_copy(store: Store) -> None:
    recovery, clock = Kept(SHARDS[:2]), SystemClock()
    pins = store.root / ".pins"
    pins.mkdir()

    def pin() -> None:
        said = {"version": "v", "ttl_s": 100, "needed": 1, "shards": SHARDS[:1], "process": [0, 0, ""]}
        (pins / "job.json").write_text(json.dumps(said))

    def evicted(*, last_copies: bool) -> list[int]:
        asked = cast("ReplicaLookup", recovery)
        reply = evict(store, SHARDS, asked, clock, force=False, dry_run=False, last_copies=last_copies)
        return [shard.outcome for shard in reply.shards]

    recovery.looking = pin
    gone, needed = cache_pb2.EVICT_OUTCOME_GONE, cache_pb2.EVICT_OUTCOME_NEEDED
    assert evicted(last_copies=False) == [needed, gone, *[cache_pb2.EVICT_OUTCOME_ONLY] * 3]
    assert evicted(last_copies=True) == [needed, cache_pb2.EVICT_OUTCOME_ABSENT, *[gone] * 3]
    assert store.ids() == SHARDS[:1]


def test_the_last_copy_of_what_a_job_needed_until_just_now_is_not_evicted(store: Store) -> None:
    recovery, pin = Kept(SHARDS[1:]), store.root / ".pins" / "job.json"
    pin.parent.mkdir()
    said = {"version": "v", "ttl_s": 100, "needed": 2, "shards": SHARDS[:2], "process": [0, 0, ""]}
    pin.write_text(json.dumps(said))
    recovery.looking = pin.unlink
    asked = cast("ReplicaLookup", recovery)
    reply = evict(store, SHARDS[:3], asked, SystemClock(), force=False, dry_run=False)
    only, gone = cache_pb2.EVICT_OUTCOME_ONLY, cache_pb2.EVICT_OUTCOME_GONE
    assert [shard.outcome for shard in reply.shards] == [only, only, gone]  # of the first two nobody was asked


def test_a_pin_that_cannot_be_read_keeps_all_shards_for_a_time_but_not_from_force(store: Store) -> None:
    room = room_of(store, 5_000, Kept(SHARDS))
    pin = store.root / ".pins" / "job.json"
    pin.parent.mkdir()
    pin.write_text("{}")
    with refusing(lambda event, path: event == "open" and path == str(pin), code=errno.EIO):
        with pytest.raises(StoreFullError), store.room_for(1_000):
            pass
        assert room.drop_unused(SystemClock().unix() + 10) == 0
        forced = evict(
            store, SHARDS[:1], cast("ReplicaLookup", Kept(())), SystemClock(), force=True, dry_run=False
        )
        assert [shard.outcome for shard in forced.shards] == [cache_pb2.EVICT_OUTCOME_GONE]
        assert store.ids() == SHARDS[1:]
        long_ago = SystemClock().unix() - TTL_S - 1
        os.utime(pin, (long_ago, long_ago))
        with store.room_for(2_000):
            assert len(store.ids()) < len(SHARDS) - 1
    assert not pin.exists()


def test_two_that_come_at_once_wait_for_each_other_and_not_for_nothing(store: Store) -> None:
    room_of(store, 6_000, Kept(()))
    first, ending = threading.Event(), threading.Event()

    def come() -> None:
        with store.room_for(1_000):
            first.set()
            ending.wait(LIMIT_S)

    other = threading.Thread(target=come, daemon=True)
    other.start()
    assert first.wait(LIMIT_S)
    threading.Timer(0, ending.set).start()
    with store.room_for(1_000):
        pass
    other.join(LIMIT_S)
    with pytest.raises(StoreFullError), store.room_for(1_001):
        pass
