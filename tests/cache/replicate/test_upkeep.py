"""What an agent does on its own account goes on whatever one shard does."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.replicate.fetching import WantedShard
from deeplink.cache.replicate.keeper import Upkeep, UpkeepIntervals
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName, ShardId
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from pathlib import Path


def upkeep_of(store: Store, **parts: object) -> Upkeep:
    nothing = SimpleNamespace()
    return Upkeep(
        NodeName("n0"),
        store,
        parts.get("filler", nothing),  # type: ignore[arg-type]
        parts.get("room", nothing),  # type: ignore[arg-type]
        parts.get("known", nothing),  # type: ignore[arg-type]
        recovery=parts.get("recovery", nothing),  # type: ignore[arg-type]
        clock=SystemClock(),
        pace=UpkeepIntervals(verify_s=60.0),
        notes=None,
        copies=None,
        replicas=2,
    )


def test_a_shard_that_cannot_be_opened_hides_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    shards: list[ShardId] = []
    for number in range(3):
        draft = tmp_path / f"draft{number}"
        sealed = write(draft, [*PAYLOADS, bytes([number])])
        draft.rename(store.path(sealed.id))
        shards.append(sealed.id)
    first = min(shards)
    verify = store.verify

    def refused(shard: ShardId) -> bool:
        if shard == first:
            raise PermissionError(13, os.strerror(13), str(store.path(shard)))
        return verify(shard)

    monkeypatch.setattr(store, "verify", refused)
    upkeep = upkeep_of(store)
    monkeypatch.setattr(upkeep.verified, "set", upkeep._ending.set)  # one round
    upkeep._verify_all()
    assert [shard for shard in sorted(shards) if store.is_verified(shard)] == sorted(set(shards) - {first})
    assert os.strerror(13) in upkeep.problem


def test_what_was_dropped_a_moment_ago_does_not_come_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    dropped, lacking = ShardId("0" * 40), ShardId("1" * 40)
    wanted: list[ShardId] = []

    def find(shard: ShardId) -> WantedShard:
        return WantedShard(id=shard, bytes=1)

    def want(one: WantedShard, *, urgent: bool) -> None:
        wanted.append(one.id)

    upkeep = upkeep_of(
        store,
        filler=SimpleNamespace(want=want),
        room=SimpleNamespace(spare=lambda: 100),
        known=SimpleNamespace(find=find, in_newest=frozenset),
        recovery=SimpleNamespace(ask_members=lambda: None, held_elsewhere=lambda: {dropped: 1, lacking: 1}),
    )
    upkeep.everyone = (Member(NodeName("n0"), "x:1"), Member(NodeName("n1"), "x:2"))

    def has(shard: ShardId) -> bool:
        if shard == dropped:
            store.path(shard).touch()
            Store(store.root).drop(shard)  # by another process, at this very moment
        return False

    monkeypatch.setattr(store, "has", has)
    upkeep._take_share()
    assert wanted == [lacking]
