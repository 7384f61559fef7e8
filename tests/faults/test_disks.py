"""The SSD below a training fails in every way it can, while the training reads from it at full speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.cache.store.store import Store
from deeplink.core.types import ShardId
from tests.faults.disks import copy_shards, disk_in_memory, disk_on_loop, flip, forget_pages
from tests.faults.processes import Nodes, Record, reading, survived, task_of
from tests.waiting import until

pytestmark = [pytest.mark.slow]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
SIZE = 16 << 20


def filled(nodes: Nodes, root: Path) -> Store:
    """Return a store at `root` that holds every shard, as the members do, verified."""
    store = Store(root)
    for node in nodes.nodes:
        copy_shards(node.store, store)
    return store


@pytest.fixture
def store(nodes: Nodes, tmp_path: Path) -> Store:
    return filled(nodes, tmp_path / "store")


def cut(store: Store, shard: ShardId) -> None:
    os.truncate(store.path(shard), store.path(shard).stat().st_size // 2)


def empty(store: Store, shard: ShardId) -> None:
    os.truncate(store.path(shard), 0)


def remove(store: Store, shard: ShardId) -> None:
    store.path(shard).unlink()


def is_whole(store: Store, shards: list[ShardId]) -> Callable[[], bool]:
    return lambda: store.ids() == shards and all(map(store.is_verified, shards))


@pytest.mark.parametrize("break_", [cut, empty], ids=["cut short", "emptied"])
def test_shards_are_cut_short_while_they_are_read(
    nodes: Nodes, store: Store, record: Record, tmp_path: Path, break_: Callable[[Store, ShardId], None]
) -> None:
    shards = store.ids()
    with reading(task_of(nodes.config(store=store.root), nodes.files), tmp_path) as loop:
        for shard in shards[::2]:
            break_(store, shard)
        loop.await_epochs(1)
        until(is_whole(store, shards), told=loop.log)
        stats = survived(loop, record)
    assert stats["failures"] >= len(shards[::2])
    assert stats["source_samples"] == 0


def test_shards_are_cut_short_between_two_batches_of_views(
    nodes: Nodes, store: Store, record: Record, tmp_path: Path
) -> None:
    shards = store.ids()
    with reading(task_of(nodes.config(store=store.root), nodes.files, way="views"), tmp_path) as loop:
        with loop.held():
            for shard in shards:
                cut(store, shard)
        loop.await_epochs(1)
        until(is_whole(store, shards), told=loop.log)
        stats = survived(loop, record)
    assert stats["failures"] >= len(shards)


def test_bits_flip_in_shards_that_are_checked_at_every_read(
    nodes: Nodes, store: Store, record: Record, tmp_path: Path
) -> None:
    shards = store.ids()
    config = nodes.config(store=store.root, check_every_read=True)
    with reading(task_of(config, nodes.files), tmp_path) as loop:
        with loop.held():
            for shard in shards:
                flip(store.path(shard), *range(8192, store.path(shard).stat().st_size, 8192))
        loop.await_epochs(1)
        until(is_whole(store, shards), told=loop.log)
        stats = survived(loop, record)
    assert stats["failures"] >= len(shards)


@needs_root
def test_the_disk_fails(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "ssd", SIZE) as disk:
        store = filled(nodes, disk.path / "store")
        with reading(task_of(nodes.config(store=store.root), nodes.files), tmp_path) as loop:
            with loop.held():
                forget_pages(store.root, loop.popen.pid)
                disk.fail()
            loop.await_epochs(2)
            stats = survived(loop, record)
    assert stats["failures"] > 0
    assert stats["peer_samples"] > len(nodes.files)
    assert "Input/output error" in loop.log()


@needs_root
def test_the_disk_takes_no_writes_and_a_shard_of_it_breaks(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with disk_on_loop(tmp_path / "ssd", SIZE) as disk:
        store = filled(nodes, disk.path / "store")
        with reading(task_of(nodes.config(store=store.root), nodes.files), tmp_path) as loop:
            with loop.held():
                cut(store, store.ids()[0])
                disk.refuse_writes()
            loop.await_epochs(2)
            stats = survived(loop, record)
    assert stats["failures"] > 0
    assert stats["local_samples"] > 0
    assert stats["peer_samples"] > 0


@needs_root
def test_the_disk_is_full_and_a_shard_of_it_breaks(nodes: Nodes, record: Record, tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "ssd", SIZE) as disk:
        store = filled(nodes, disk.path / "store")
        shards = store.ids()
        with reading(task_of(nodes.config(store=store.root), nodes.files), tmp_path) as loop:
            with loop.held():
                cut(store, shards[0])
                disk.fill()
            loop.await_epochs(2)
            assert not store.has(shards[0])
            stats = survived(loop, record)
    assert stats["failures"] > 0
    assert stats["peer_samples"] > 0
