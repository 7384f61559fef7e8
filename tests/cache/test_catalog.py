from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog, PackRecord
from deeplink.cache.errors import CatalogError, DatasetMissingError, IndexFormatError
from deeplink.core.types import Version
from tests.cache.format.test_index import content
from tests.deeplink.checkpoints.faults import refusing

if TYPE_CHECKING:
    from pathlib import Path

RECORD = PackRecord(source="/data", plan="p", files=2, bytes=3, shards=1, packed_unix=1.5)


def test_a_name_points_at_its_newest_version_and_older_ones_stay(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a", "b"]), RECORD)
    two = catalog.publish("digits", content(["a", "b", "c"]), RECORD)
    assert catalog.latest("digits") == two
    assert catalog.open("digits").keys() == ["a", "b", "c"]
    assert catalog.open("digits", one).keys() == ["a", "b"]
    assert set(catalog.versions("digits")) == {one, two}
    ids = tuple(entry.id for entry in content(["a", "b"]).shards)
    assert catalog.record("digits", one) == dataclasses.replace(RECORD, shard_ids=ids)
    assert catalog.names() == ["digits"]
    catalog.open("digits", two).verify()
    assert not [path for path in (tmp_path / "digits").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "-x", "x" * 101, "a\0b", "é", "a\n"]
)
def test_a_name_with_path_tricks_is_refused(tmp_path: Path, name: str) -> None:
    catalog = Catalog(tmp_path)
    for attempt in (
        lambda: catalog.latest(name),
        lambda: catalog.open(name),
        lambda: catalog.publish(name, content(["a"]), RECORD),
    ):
        with pytest.raises(DatasetMissingError, match="cannot be a dataset's name"):
            attempt()
    assert not list(tmp_path.iterdir())


def test_a_missing_dataset_or_version_is_said_so(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(DatasetMissingError):
        catalog.open("nothing")
    catalog.publish("digits", content(["a"]), RECORD)
    for version in ("0" * 40, "../digits/x"):
        with pytest.raises(DatasetMissingError):
            catalog.open("digits", Version(version))


def test_a_damaged_pointer_is_no_path(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.publish("digits", content(["a"]), RECORD)
    (tmp_path / "digits" / "latest").write_text("../../../etc/passwd\n")
    with pytest.raises(IndexFormatError):
        catalog.open("digits")


def test_a_catalog_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CatalogError) as refused:
        Catalog(tmp_path / "file").publish("digits", content(["a"]), RECORD)
    assert "DEEPLINK_CATALOG" in refused.value.remedy
    (tmp_path / "digits" / "latest").mkdir(parents=True)
    with pytest.raises(CatalogError):
        Catalog(tmp_path).open("digits")


def test_an_index_that_cannot_be_written_leaves_the_name_where_it_was(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a"]), RECORD)
    broken = content(["b"])
    broken.block_offsets[:] = []  # type: ignore[index]
    with pytest.raises(ValueError, match="concatenate"):
        catalog.publish("digits", broken, RECORD)
    assert catalog.latest("digits") == one
    assert len(list((tmp_path / "digits").iterdir())) == 3


def test_two_may_publish_at_once_and_readers_always_find_a_whole_version(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.publish("digits", content(["first"]), RECORD)
    done = threading.Event()

    def packs(who: int) -> list[Version]:
        return [catalog.publish("digits", content([f"{who}", f"{who}/{i}"]), RECORD) for i in range(3)]

    def reads() -> int:
        opened = 0
        while not done.is_set() or not opened:
            assert Catalog(tmp_path).open("digits").mend() is False
            opened += 1
        return opened

    with ThreadPoolExecutor(3) as pool:
        reading = pool.submit(reads)
        try:
            made = [version for versions in pool.map(packs, range(2)) for version in versions]
        finally:
            done.set()
        assert reading.result() > 0
    assert len(set(made)) == 6
    assert set(made) < set(catalog.versions("digits"))
    assert catalog.latest("digits") in made
    for version in made:
        catalog.open("digits", version).verify()
    assert not [path.name for path in (tmp_path / "digits").iterdir() if path.name.startswith(".")]


def test_who_reads_a_version_that_is_removed_reads_on_and_who_comes_later_is_told(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a", "b"]), RECORD)
    two = catalog.publish("digits", content(["a", "b", "c"]), RECORD)
    index = catalog.open("digits", one)
    with pytest.raises(CatalogError, match="is the newest version"):
        catalog.remove("digits", two)
    catalog.remove("digits", one)
    assert index.keys() == ["a", "b"]
    assert index.mend() is False
    with pytest.raises(DatasetMissingError) as missing:
        catalog.open("digits", one)
    assert two in missing.value.remedy
    assert catalog.record("digits", one) is None
    assert catalog.versions("digits") == [two]
    with pytest.raises(DatasetMissingError):
        catalog.remove("digits", one)
    catalog.remove("digits", two)
    assert catalog.names() == []
    with pytest.raises(DatasetMissingError):
        catalog.open("digits")
    assert catalog.publish("digits", content(["a", "b"]), RECORD) == one
    assert catalog.open("digits").keys() == ["a", "b"]


@pytest.mark.parametrize("deed", ["damaged", "lost", "unreadable"])
def test_no_version_is_removed_while_it_is_not_known_which_is_the_newest(tmp_path: Path, deed: str) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a"]), RECORD)
    two = catalog.publish("digits", content(["a", "b"]), RECORD)
    pointer = tmp_path / "digits" / "latest"
    if deed == "damaged":
        pointer.write_text("")
    elif deed == "lost":
        pointer.unlink()
    with refusing(lambda _, path: deed == "unreadable" and path == str(pointer), code=errno.EIO):
        for version in (one, two):
            with pytest.raises((IndexFormatError, DatasetMissingError, CatalogError)):
                catalog.remove("digits", version)
    assert set(catalog.versions("digits")) == {one, two}
    pointer.write_text(f"{two}\n")
    catalog.remove("digits", one)
    pointer.unlink()
    catalog.remove("digits", two)  # the only one
    assert catalog.versions("digits") == []


def test_a_dataset_whose_newest_version_is_lost_is_named_when_asked_for(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a", "b"]), RECORD)
    catalog.publish("letters", content(["a"]), RECORD)
    (tmp_path / "digits" / "latest").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").touch()
    assert catalog.names() == ["letters"]
    assert catalog.names(lost=True) == ["digits", "letters"]
    catalog.path("digits", one).unlink()
    assert catalog.names(lost=True) == ["digits", "letters"]
    catalog.remove("letters", catalog.latest("letters"))
    assert catalog.names(lost=True) == ["digits"]
    catalog.path("digits", one).with_suffix(".json").rename(catalog.path("digits", one).with_suffix(".marks"))
    assert catalog.names(lost=True) == []  # nothing is left by which it could come back


def test_what_was_taken_out_is_kept_a_week_and_drafts_a_day(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a"]), RECORD)
    catalog.publish("digits", content(["b"]), RECORD)
    catalog.remove("digits", one)
    folder = tmp_path / "digits"
    (kept,) = folder.glob(".removed-*")
    (folder / ".draft-young").touch()
    (folder / ".draft-old").touch()
    day = 86_400
    now = folder.stat().st_mtime
    os.utime(kept, (now - 6 * day, now - 6 * day))
    os.utime(folder / ".draft-old", (now - 2 * day, now - 2 * day))
    two = catalog.publish("digits", content(["c"]), RECORD)
    assert sorted(path.name for path in folder.glob(".*")) == sorted([".draft-young", kept.name])
    os.utime(kept, (now - 8 * day, now - 8 * day))
    catalog.publish("digits", content(["d"]), RECORD)
    assert not kept.exists()
    catalog.remove("digits", two, now=True)
    assert not list(folder.glob(".removed-*"))


def test_a_version_is_put_back_only_as_it_was(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    one = catalog.publish("digits", content(["a"]), RECORD)
    two = catalog.publish("digits", content(["b"]), dataclasses.replace(RECORD, packed_unix=2.5))
    before = catalog.path("digits", one).read_bytes()
    catalog.path("digits", one).write_bytes(b"x")
    assert catalog.preview("digits", content(["a"])) == one
    assert catalog.restore("digits", one, content(["b"])) == two
    assert catalog.path("digits", one).read_bytes() == b"x"
    assert catalog.restore("digits", one, content(["a"])) == one
    assert catalog.path("digits", one).read_bytes() == before
    assert catalog.latest("digits") == two
    shutil.rmtree(tmp_path / "digits")
    assert catalog.recorded("digits") == []
    assert catalog.restore("digits", one, content(["a"])) == one == catalog.latest("digits")
    assert catalog.preview("other", content(["a"])) == one
    assert catalog.names() == ["digits"]
    assert not list(tmp_path.glob(".*"))
