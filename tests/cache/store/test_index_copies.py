"""Copies of indexes on a node's SSD: made once, whole or not at all, and never in the way of opening."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import DatasetMissingError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.budget import keep_to_budget
from deeplink.cache.store import index_copies
from deeplink.cache.store.index_copies import IndexCopies, copied_bytes
from deeplink.cache.store.store import Store
from deeplink.core.clock import ManualClock, SystemClock
from tests.cache.agents import config_below, small_files, write_tree

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.config import Config
    from deeplink.core.types import Version

RANK = """
import logging, sys
from pathlib import Path
from deeplink.cache.catalog import Catalog
from deeplink.cache.store.index_copies import IndexCopies
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
root = Path(sys.argv[1])
copies = IndexCopies(Store(root / "ssd", make=False), Catalog(root / "catalog"), SystemClock())
print(sys.stdin.readline(), copies.open_copy("digits").path)
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = config_below(tmp_path)
    pack(str(write_tree(tmp_path / "source", small_files())), "digits", config=config)
    return config


@pytest.fixture
def version(config: Config) -> Version:
    return Catalog(config.catalog).latest("digits")


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def copies(config: Config, ssd: Path) -> IndexCopies:
    return IndexCopies(Store(ssd, make=False), Catalog(config.catalog), SystemClock())


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_copies, "_said", set())


def names(copies: IndexCopies) -> set[str]:
    return {path.name for path in copies.path("digits", "").parent.glob("*")}  # type: ignore[arg-type]


def test_the_copy_is_the_index_and_is_mapped(copies: IndexCopies, config: Config, version: Version) -> None:
    index = copies.open_copy("digits")
    shared = Catalog(config.catalog).path("digits", version)
    assert index.path == copies.path("digits", version)
    assert index.path.read_bytes() == shared.read_bytes()
    assert stat.S_IMODE(index.path.stat().st_mode) == 0o600
    assert names(copies) == {index.path.name}
    inode = index.path.stat().st_ino
    assert copies.open_copy("digits", version).path.stat().st_ino == inode
    assert copied_bytes(config.store.parent / "ssd") == shared.stat().st_size


def test_ranks_that_start_at_once_make_one_copy(copies: IndexCopies, tmp_path: Path, version: Version) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert sum("was copied to" in one for one in said) == 1
    assert all(one.rstrip().endswith(str(copies.path("digits", version))) for one in said)


def test_another_process_is_not_waited_for_without_end(
    config: Config, ssd: Path, copies: IndexCopies, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    waiting = IndexCopies(Store(ssd), Catalog(config.catalog), clock)
    copy = copies.path("digits", version)
    copy.parent.mkdir(mode=0o700)
    with copy.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(2):
            assert waiting.open_copy("digits").path == Catalog(config.catalog).path("digits", version)
    assert clock.monotonic() > 0
    assert [record.levelname for record in caplog.records].count("WARNING") == 1  # said once
    assert copies.open_copy("digits").path == copy  # its maker was killed: the next one makes it


def test_a_copy_that_a_killed_process_left_half_is_never_used(copies: IndexCopies, version: Version) -> None:
    whole = copies.open_copy("digits").path
    content = whole.read_bytes()
    whole.unlink()
    draft = whole.with_name(f".draft-{whole.name}-abc")
    draft.write_bytes(content[:100])
    whole.write_bytes(content[:-1])  # cut short
    assert copies.open_copy("digits", version).path == whole
    assert whole.read_bytes() == content
    assert names(copies) == {whole.name}


def test_a_damaged_copy_is_replaced(
    copies: IndexCopies, config: Config, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    copy = copies.open_copy("digits").path
    copy.write_bytes(bytes(copy.stat().st_size))
    assert copies.open_copy("digits").path == Catalog(config.catalog).path("digits", version)
    assert "its copy was damaged and is removed" in caplog.text
    assert copies.open_copy("digits").path == copy


def test_a_shared_file_that_is_not_its_version_is_mapped_and_not_copied_over_and_over(
    copies: IndexCopies, config: Config, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Catalog(config.catalog).path("digits", version)
    content = bytearray(shared.read_bytes())
    content[len(content) // 2] ^= 1
    shared.write_bytes(content)
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            assert copies.open_copy("digits").path == shared
    assert caplog.text.count("is not, byte for byte") == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    lock = copies.path("digits", version).with_suffix(".lock")
    assert names(copies) == {lock.name}
    content[len(content) // 2] ^= 1  # rebuilt since
    shared.write_bytes(content)
    assert copies.open_copy("digits").path == shared  # not tried again so soon
    long_ago = lock.stat().st_mtime - 1000
    os.utime(lock, (long_ago, long_ago))
    assert copies.open_copy("digits").path == copies.path("digits", version)


def test_a_store_without_room_or_folder_is_no_obstacle(
    config: Config, ssd: Path, version: Version, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog, clock = Catalog(config.catalog), SystemClock()
    store = Store(ssd)
    keep_to_budget(store, config_below(tmp_path, store_bytes=1000), clock, staying=())
    assert IndexCopies(store, catalog, clock).open_copy("digits").path == catalog.path("digits", version)
    assert copied_bytes(ssd) == 0
    (tmp_path / "file").touch()
    nowhere = IndexCopies(Store(tmp_path / "file" / "ssd", make=False), catalog, clock)
    assert len(nowhere.open_copy("digits")) == len(small_files())
    assert "is read from shared storage" in caplog.text


def test_a_copy_counts_against_the_budget(config: Config, ssd: Path, copies: IndexCopies, tmp_path: Path) -> None:
    size = copies.open_copy("digits").path.stat().st_size
    store = Store(ssd)
    keep_to_budget(store, config_below(tmp_path, store_bytes=2 * size), SystemClock(), staying=())
    with pytest.raises(Exception, match="bytes"), store.reserve(size + 1):
        pass
    with store.reserve(size):
        pass


def test_a_wiped_ssd_gets_it_again(copies: IndexCopies, ssd: Path, config: Config, version: Version) -> None:
    index = copies.open_copy("digits")
    shutil.rmtree(ssd)
    assert index.key(0)  # who has it mapped reads on
    assert copies.open_copy("digits").path == copies.path("digits", version)
    Catalog(config.catalog).path("digits", version).chmod(0)
    assert len(copies.open_copy("digits", version)) == len(index)  # nothing is read from there any more


def test_a_copy_goes_with_its_version(copies: IndexCopies, config: Config, version: Version) -> None:
    copy = copies.open_copy("digits").path
    Catalog(config.catalog).remove("digits", version)
    with pytest.raises(DatasetMissingError):
        copies.open_copy("digits", version)
    assert copies.collect(0.0) == 0  # another catalog's, perhaps: it was opened a moment ago
    opened = copy.stat().st_mtime - 7200
    os.utime(copy, (opened, opened))
    assert copies.collect(0.0) == 1
    assert not names(copies)


def test_a_copy_in_use_stays_and_an_unused_one_goes(copies: IndexCopies, config: Config, tmp_path: Path) -> None:
    copy = copies.open_copy("digits").path
    opened = copy.stat().st_mtime - 7200
    os.utime(copy, (opened, opened))
    assert copies.collect(opened - 1) == 0
    config.catalog.rename(tmp_path / "away")
    assert copies.collect(opened + 1) == 0  # which versions there are is not known
    (tmp_path / "away").rename(config.catalog)
    assert copies.collect(opened + 1) == 1


def test_a_reader_maps_it_where_nodes_share_the_catalog(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with Reader.open("digits", config=config) as reader:
        assert reader.index.path.is_relative_to(config.catalog)
    monkeypatch.setattr(index_copies, "file_system", lambda path: "nfs4" if path == config.catalog else "ext4")
    with Reader.open("digits", config=config) as reader:
        assert reader.index.path.is_relative_to(config.store)
        assert (
            dict(zip(reader.index.keys(), map(bytes, reader.read(range(len(reader)))), strict=True))
            == small_files()
        )
