"""A source file counts as unchanged only if it is the one that was packed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.pack.plan import kept_marks, marks_of
from deeplink.cache.packer import PackProgress, pack
from deeplink.cache.replicate.fetching import is_unchanged
from deeplink.cache.source.opening import open_source
from tests.cache.agents import write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "few", {f"{number}.bin": bytes([number]) * 100 for number in range(5)})


def packed(few: Path, config: Config, progress: Callable[[PackProgress], None] = lambda _: None) -> Index:
    pack(str(few), "few", config=config, progress=progress)
    return Catalog(config.catalog).open("few")


def unchanged(index: Index) -> bool:
    return is_unchanged(index, 0, open_source(index.source))


def rewrite(path: Path, mtime_ns: int) -> None:
    path.write_bytes(b"Q" * 100)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_a_file_that_was_rewritten_after_it_was_read_has_changed(few: Path, config: Config) -> None:
    def rewritten(now: PackProgress) -> None:
        if now.files == now.total_files and now.shards == 0:
            rewrite(few / "3.bin", (few / "3.bin").stat().st_mtime_ns + 1)

    assert not unchanged(packed(few, config, rewritten))


def test_a_file_with_an_old_time_in_place_of_another_has_changed(few: Path, config: Config) -> None:
    index = packed(few, config)
    assert unchanged(index)
    rewrite(few / "3.bin", 1_000_000_000_000_000_000)
    assert not unchanged(index)


def test_times_before_1970_are_times(few: Path, config: Config) -> None:
    os.utime(few / "3.bin", ns=(-5_000_000_000, -5_000_000_000))
    assert unchanged(packed(few, config))


@pytest.mark.parametrize("damaged", [False, True])
def test_without_the_times_that_were_listed_files_are_read_and_compared(
    few: Path, config: Config, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    index = packed(few, config)
    marks = marks_of(index.path)
    if damaged:
        marks.write_bytes(marks.read_bytes()[:-1] + bytes([marks.read_bytes()[-1] ^ 1]))
    else:
        marks.unlink()
    assert kept_marks(index) is None
    assert ("is not used" in caplog.text) == damaged
    (few / "2.bin").touch()
    assert unchanged(index)
    rewrite(few / "3.bin", (few / "3.bin").stat().st_mtime_ns)
    assert not unchanged(index)


def test_a_changed_file_is_seen_though_the_index_is_wrong_about_its_shard(tmp_path: Path, config: Config) -> None:
    many = write_tree(tmp_path / "many", {f"{number:04d}": b"%d" % number for number in range(1000)})
    index = packed(many, config)
    rewrite(many / "0900", 1_000_000_000_000_000_000)
    with index.path.open("r+b") as file:
        file.seek(index.shard.ctypes.data - index._file.address + 900 * index.shard.itemsize)
        file.write(b"\1")
    index = Catalog(config.catalog).open("few")
    assert index.shard[900] == 1  # it lies beyond what is looked at when an index is opened
    assert not unchanged(index)
