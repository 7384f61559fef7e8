"""Damaged shards come back one after another, however many there are."""

from __future__ import annotations

import dataclasses
import fcntl
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import SampleUnavailableError
from deeplink.cache.format.index_format import IndexContent
from deeplink.cache.membership import Tier
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.fetching import Fetched, Fetcher, FetchOutcome, Healer, WantedShard
from deeplink.cache.source.opening import SourceCap, TokenBucket
from deeplink.cache.store.pins import demand, read_pins
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName, ShardId
from tests.cache.agents import write_tree
from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.format.index_format import ShardEntry
    from deeplink.core.config import Config
    from tests.cache.agents import Agents


def packed(source: Path, agents: Agents) -> Sequence[ShardEntry]:
    pack(str(source), "digits", config=agents.config(), members=agents.members, token=agents.token)
    return Catalog(agents.config().catalog).open("digits").shards


def wanted(shard: ShardEntry) -> WantedShard:
    return WantedShard(id=shard.id, bytes=shard.bytes)


def test_many_shards_come_back_in_one_thread(source: Path, agents: Agents, tmp_path: Path) -> None:
    shards = packed(source, agents)
    assert len(shards) > 3
    store = Store(tmp_path / "mine")
    healer = Healer(store, (agents.tier, Tier()), SystemClock())
    threads: list[int] = []
    all_back = threading.Event()

    def healed() -> None:
        threads.append(sum(thread.name == "deeplink-heal" for thread in threading.enumerate()))
        if len(store.ids()) == len(shards):
            all_back.set()

    for shard in [*shards, *shards]:
        healer.heal(wanted(shard), healed)
    assert all_back.wait(LIMIT_S)
    assert set(threads) == {1}
    assert all(store.is_verified(shard.id) for shard in shards)


def test_a_shard_that_nobody_has_does_not_hold_up_the_others(source: Path, agents: Agents, tmp_path: Path) -> None:
    first, second, *_ = packed(source, agents)
    for held in agents.stores.values():
        held.remove(first.id)
    store = Store(tmp_path / "mine")
    dead = Member(NodeName("dead"), "127.0.0.1:1")
    healer = Healer(store, (Tier((dead, *agents.members), agents.token), Tier()), SystemClock())
    back = threading.Event()
    healer.heal(wanted(first), back.clear)
    healer.heal(wanted(second), back.set)
    assert back.wait(LIMIT_S)
    assert store.ids() == [second.id]
    assert not store.has(first.id)


def test_a_store_that_cannot_be_written_does_not_end_healing(source: Path, agents: Agents, tmp_path: Path) -> None:
    shard, *_ = packed(source, agents)
    store = Store(tmp_path / "later", make=False)
    healer = Healer(store, (agents.tier, Tier()), SystemClock())
    back = threading.Event()
    healer.heal(wanted(shard), back.set)
    until(lambda: not healer._running)
    assert not back.is_set()
    Store(tmp_path / "later")
    healer.heal(wanted(shard), back.set)
    assert back.wait(LIMIT_S)


def test_a_shard_that_is_doubted_while_it_is_looked_at_is_looked_at_once_more(
    source: Path, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, *_ = packed(source, agents)
    store, begun, let_go = Store(tmp_path / "mine"), threading.Event(), threading.Event()
    healer = Healer(store, (agents.tier, Tier()), SystemClock())
    fetch, looks, healed = healer._fetcher.fetch, list[ShardId](), list[bool]()

    def slowly(one: WantedShard) -> Fetched:
        found = fetch(one)
        looks.append(one.id)
        begun.set()
        assert let_go.wait(LIMIT_S)
        return found

    monkeypatch.setattr(healer._fetcher, "fetch", slowly)
    healer.heal(wanted(shard), lambda: healed.append(store.is_verified(shard.id)))
    assert begun.wait(LIMIT_S)
    store.doubt(shard.id)
    for _ in range(3):
        healer.heal(wanted(shard), lambda: healed.append(store.is_verified(shard.id)))
    let_go.set()
    until(lambda: not healer._running)
    assert (looks, healed) == ([shard.id] * 2, [False, True])


def test_what_goes_wrong_unforeseen_does_not_end_healing(
    source: Path, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = packed(source, agents)
    store = Store(tmp_path / "mine")
    healer = Healer(store, (agents.tier, Tier()), SystemClock())
    fetch = healer._fetcher.fetch

    def fails_once(one: WantedShard) -> Fetched:
        if one.id == first.id:
            raise ZeroDivisionError
        return fetch(one)

    monkeypatch.setattr(healer._fetcher, "fetch", fails_once)
    back = threading.Event()
    healer.heal(wanted(first), back.clear)
    healer.heal(wanted(second), back.set)
    assert back.wait(LIMIT_S)
    assert store.ids() == [second.id]


def test_a_home_that_cannot_be_opened_does_not_hide_the_source(source: Path, config: Config) -> None:
    pack(str(source), "digits", config=config)
    store, index = Store(config.store), Catalog(config.catalog).open("digits")
    entry = index.shards[0]
    store.remove(entry.id)
    index.home = "nosuch://bucket"
    cap = SourceCap(TokenBucket(0, 0), SystemClock())
    fetcher = Fetcher(store, "", SystemClock(), cap=cap, uses_home=True)
    found = fetcher.fetch(WantedShard.of(index, 0))
    assert (found.outcome, found.origin) == (FetchOutcome.FETCHED, "source"), found.problem


def test_a_good_shard_is_not_put_aside_because_the_index_is_wrong(
    source: Path, config: Config, files: dict[str, bytes]
) -> None:
    pack(str(source), "digits", config=config)
    catalog = Catalog(config.catalog)
    index = catalog.open("digits")
    checksums = np.array(index.checksums)
    checksums[5] ^= 1
    wrong = IndexContent(
        source=index.source,
        shards=list(index.shards),
        block_offsets=[index.block_offsets(number) for number in range(len(index.shards))],
        keys=[index.key(row) for row in range(len(index))],
        shard=np.array(index.shard),
        block=np.array(index.block),
        offset=np.array(index.offset),
        length=np.array(index.lengths),
        checksum=checksums,
    )
    record = catalog.record("digits", index.version)
    assert record is not None
    catalog.publish("digits", wrong, record)
    shard = index.shards[int(index.shard[5])].id
    store = Store(config.store)
    others = [row for row in range(len(index)) if row != 5]
    with Reader.open("digits", config=config) as reader:

        def found_whole() -> bool:
            # One that is read just as it was found whole is doubted, and looked at, once more.
            with pytest.raises(SampleUnavailableError):
                reader.read([5])
            return store.is_verified(shard)

        for _ in range(3):
            until(found_whole)
        before = reader.stats()
        found = reader.read(others)
        assert {reader.index.key(row): bytes(view) for row, view in zip(others, found, strict=True)} == {
            key: data for key, data in files.items() if key != reader.index.key(5)
        }
        # The other samples of its shard are read from it as ever.
        assert reader.stats().local_samples - before.local_samples == len(others)
    assert not (store.root / "quarantine").exists()


def test_long_and_empty_samples_are_made_anew_as_they_were(tmp_path: Path, config: Config) -> None:
    files = {"a/empty": b"", "a/long": bytes(range(256)) * 150_000, "b/empty": b"", "b/x": b"x", "c/empty": b""}
    source = write_tree(tmp_path / "few", files)
    pack(str(source), "few", config=dataclasses.replace(config, shard_bytes=64 << 20))
    (source / "a" / "zz").write_bytes(b"zz" * 1000)
    pack(str(source), "few", config=dataclasses.replace(config, shard_bytes=64 << 20))
    store, index = Store(config.store), Catalog(config.catalog).open("few")
    cap = SourceCap(TokenBucket(0, 0), SystemClock())
    for number, entry in enumerate(index.shards):
        before = store.path(entry.id).read_bytes()
        store.remove(entry.id)
        found = Fetcher(store, "", SystemClock(), cap=cap).fetch(WantedShard.of(index, number))
        assert (found.outcome, found.origin) == (FetchOutcome.FETCHED, "source"), found.problem
        assert store.path(entry.id).read_bytes() == before
    assert cap.load().bytes >= sum(map(len, files.values()))


def test_a_reader_pins_what_it_reads_and_says_what_it_still_needs(source: Path, config: Config) -> None:
    pack(str(source), "digits", config=config)
    root = config.store
    with Reader.open("digits", config=config) as reader:
        assert read_pins(root, SystemClock().unix()) == []
        reader.read([0])
        ids = [entry.id for entry in reader.index.shards]
        assert demand(read_pins(root, SystemClock().unix())).needed == set(ids)
        reader.announce([2, 0, 1], 1)
        wanted = demand(read_pins(root, SystemClock().unix()))
        assert wanted.needed == {ids[2]}
        assert wanted.next_use == {ids[2]: 0, ids[0]: 1, ids[1]: 2}
    assert read_pins(root, SystemClock().unix()) == []


def test_a_lock_that_its_holder_removed_as_it_was_taken_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "mine")
    fetcher, path, take = Fetcher(store, "", SystemClock()), store.root / ".doing", fcntl.flock

    def late(lock: int, how: int) -> None:
        path.unlink()  # as the holder does at its end, between our opening of the file and our locking it
        take(lock, how)

    with fetcher.alone("doing") as first, fetcher.alone("doing") as second:
        assert (first, second) == (True, False)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        with fetcher.alone("doing") as is_alone:
            assert not is_alone
    with fetcher.alone("doing") as is_alone:
        assert is_alone
