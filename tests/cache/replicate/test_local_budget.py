"""A store that no agent looks after keeps to its budget when it is packed or warmed into."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import StoreFullError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.warming import WarmResult, warm_here
from deeplink.cache.source.opening import SourceCap, TokenBucket
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from tests.cache.agents import small_files, write_tree

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config


@pytest.fixture
def small(config: Config) -> Config:
    return dataclasses.replace(config, shard_bytes=50_000)


def with_budget(config: Config, size: int, store: Path) -> Config:
    return dataclasses.replace(config, store=store, store_bytes=size)


def packed(source: Path, config: Config) -> Index:
    pack(str(source), "digits", config=config)
    index = Catalog(config.catalog).open("digits")
    assert len(index.shards) > 3
    return index


def bytes_of(index: Index) -> int:
    return sum(entry.bytes for entry in index.shards)


def warmed(index: Index, config: Config) -> WarmResult:
    return warm_here(index, config, cap=SourceCap(TokenBucket(0, 0), SystemClock()), clock=SystemClock())


def test_what_is_packed_keeps_to_the_budget(source: Path, small: Config, tmp_path: Path) -> None:
    size = bytes_of(packed(source, small))
    tight = dataclasses.replace(with_budget(small, size * 2 // 3, tmp_path / "tight"), catalog=tmp_path / "other")
    with pytest.raises(StoreFullError):
        pack(str(source), "digits", config=tight)
    assert 0 < Store(tight.store).status().bytes <= tight.store_bytes
    assert Catalog(tight.catalog).names() == []


@pytest.mark.parametrize("home", ["", "home"])
def test_shards_of_a_packing_do_not_leave_for_each_other(
    source: Path, small: Config, tmp_path: Path, home: str
) -> None:
    (tmp_path / "home").mkdir()
    kept = str(tmp_path / home) if home else ""
    pack(str(source), "digits", config=small, home=kept)
    index = Catalog(small.catalog).open("digits")
    store = Store(small.store)
    store.remove(index.shards[0].id)
    tight = with_budget(small, bytes_of(index) - 50_000, small.store)
    with pytest.raises(StoreFullError):
        pack(str(source), "digits", config=tight, home=kept)
    assert set(store.ids()) == {entry.id for entry in index.shards[1:]}


def test_another_dataset_leaves_where_it_can_be_had_again(source: Path, small: Config, tmp_path: Path) -> None:
    index = packed(source, small)
    files = small_files(seed=1)
    other = write_tree(tmp_path / "another", files)
    tight = with_budget(small, bytes_of(index) * 3 // 2, small.store)
    placed = pack(str(other), "another", config=tight).placed
    store = Store(small.store)
    assert store.status().bytes <= tight.store_bytes
    assert set(placed) <= set(store.ids())
    with Reader.open("another", config=tight) as reader:
        assert {reader.index.key(row): bytes(view) for row, view in enumerate(reader.read(range(60)))} == files


def test_what_is_warmed_keeps_to_the_budget(source: Path, small: Config, tmp_path: Path) -> None:
    index = packed(source, small)
    tight = with_budget(small, bytes_of(index) * 2 // 3, tmp_path / "tight")
    result = warmed(index, tight)
    assert not result.is_whole
    assert any("no room" in problem for problem in result.problems)
    assert 0 < Store(tight.store).status().bytes <= tight.store_bytes
    whole = warmed(index, dataclasses.replace(tight, store_bytes=2 * bytes_of(index)))
    assert whole.is_whole, whole.problems
