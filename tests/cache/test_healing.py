"""Damaged shards come back one after another, however many there are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog
from deeplink.cache.fetching import Wanted
from deeplink.cache.healing import Healer
from deeplink.cache.packer import pack
from deeplink.cache.store import Store
from deeplink.clock import SystemClock
from deeplink.types import Member, NodeName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.index import ShardEntry
    from tests.cache.agents import Agents


def packed(source: Path, agents: Agents) -> Sequence[ShardEntry]:
    pack(str(source), "digits", config=agents.config(), members=agents.members, token=agents.token)
    return Catalog(agents.config().catalog).open("digits").shards


def wanted(shard: ShardEntry) -> Wanted:
    return Wanted(id=shard.id, bytes=shard.bytes)


def test_many_shards_come_back_in_one_thread(source: Path, agents: Agents, tmp_path: Path) -> None:
    shards = packed(source, agents)
    assert len(shards) > 3
    store = Store(tmp_path / "mine")
    healer = Healer(store, agents.members, agents.token, SystemClock())
    threads: list[str] = []
    all_back = threading.Event()

    def healed() -> None:
        threads.extend(thread.name for thread in threading.enumerate() if thread.name == "deeplink-heal")
        if len(store.ids()) == len(shards):
            all_back.set()

    for shard in [*shards, *shards]:
        healer.heal(wanted(shard), healed)
    assert all_back.wait(20)
    assert len(threads) == len(shards)
    assert all(store.is_verified(shard.id) for shard in shards)


def test_a_shard_that_nobody_has_does_not_hold_up_the_others(source: Path, agents: Agents, tmp_path: Path) -> None:
    first, second, *_ = packed(source, agents)
    for held in agents.stores.values():
        held.remove(first.id)
    store = Store(tmp_path / "mine")
    dead = Member(NodeName("dead"), "127.0.0.1:1")
    healer = Healer(store, [dead, *agents.members], agents.token, SystemClock())
    back = threading.Event()
    healer.heal(wanted(first), back.clear)
    healer.heal(wanted(second), back.set)
    assert back.wait(20)
    assert store.ids() == [second.id]
    assert not store.has(first.id)


def test_a_store_that_cannot_be_written_does_not_end_healing(source: Path, agents: Agents, tmp_path: Path) -> None:
    shard, *_ = packed(source, agents)
    store = Store(tmp_path / "later", make=False)
    healer = Healer(store, agents.members, agents.token, SystemClock())
    back = threading.Event()
    healer.heal(wanted(shard), back.set)
    while healer._busy:
        assert not back.wait(0.01)
    Store(tmp_path / "later")
    healer.heal(wanted(shard), back.set)
    assert back.wait(20)
