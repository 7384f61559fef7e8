"""What an agent does on its own account goes on whatever one shard does."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.holding.upkeep import Pace, Upkeep
from deeplink.cache.store import Store
from deeplink.clock import SystemClock
from tests.cache.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.types import ShardId


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
    nothing = SimpleNamespace()
    upkeep = Upkeep(
        "n0",  # type: ignore[arg-type]
        store,
        nothing,  # type: ignore[arg-type]
        nothing,  # type: ignore[arg-type]
        nothing,  # type: ignore[arg-type]
        recovery=nothing,  # type: ignore[arg-type]
        clock=SystemClock(),
        pace=Pace(verify_s=60.0),
        notes=None,
        replicas=1,
    )
    monkeypatch.setattr(upkeep.verified, "set", upkeep._ending.set)  # one round
    upkeep._verify_all()
    assert [shard for shard in sorted(shards) if store.is_verified(shard)] == sorted(set(shards) - {first})
    assert os.strerror(13) in upkeep.problem
