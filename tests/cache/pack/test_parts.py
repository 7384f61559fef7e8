"""A version that was packed in parts is the one that one packer makes, byte for byte."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from deeplink.cache.catalog import PARTS, Catalog
from deeplink.cache.errors import CatalogError, IndexFormatError, SourceChangedError, SourceError
from deeplink.cache.pack.parts import Part, _read, merge_parts, shared_listing
from deeplink.cache.pack.plan import marks_of
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.source.local_source import LocalSource
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.source import Listing
from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.config import Config
from deeplink.core.descriptors import try_lock
from tests.cache.agents import config_below, write_tree
from tests.waiting import LIMIT_S


def in_parts(source: Path, config: Config, parts: int, array: str = "", **options: object) -> None:
    numbers = list(range(1, parts + 1))
    random.Random(parts).shuffle(numbers)  # noqa: S311 - test data
    for number in numbers:
        # Each on a node of its own.
        there = dataclasses.replace(config, store=config.store / str(number))
        result = pack(str(source), "it", config=there, part=Part(number, parts, array), **options)  # type: ignore[arg-type]
        assert result.version == ""
        assert result.read_files == result.files


def _ends(_: object) -> None:
    raise SourceError("x", "it does not answer", may_pass=True)


@pytest.mark.parametrize("array", ["", "17"])
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_parts_make_what_one_packer_makes(
    source: Path, config: Config, files: dict[str, bytes], parts: int, array: str
) -> None:
    tmp_path, config = config.catalog.parent, dataclasses.replace(config, shard_bytes=50_000)
    other = config_below(tmp_path / "other", shard_bytes=50_000)
    home = str(tmp_path / "home")
    whole = pack(str(source), "it", config=other, home=home)
    assert 3 < whole.shards < 40
    in_parts(source, config, parts, array, home=home)
    catalog = Catalog(config.catalog)
    assert catalog.names() == []
    merged = merge_parts(catalog, "it")
    assert (merged.version, merged.parts) == (whole.version, parts)
    assert merged.placed.keys() == whole.placed.keys()
    here, there = (one.path("it", whole.version) for one in (catalog, Catalog(other.catalog)))
    assert here.read_bytes() == there.read_bytes()
    assert marks_of(here).read_bytes() == marks_of(there).read_bytes()
    record, expected = catalog.record("it", merged.version), Catalog(other.catalog).record("it", whole.version)
    assert record is not None
    assert expected is not None
    as_at_once = dataclasses.replace(expected, packed_unix=record.packed_unix, listed_unix=record.listed_unix)
    assert record == as_at_once
    assert list((config.catalog / "it" / ".parts").iterdir()) == []
    with Reader.open("it", config=config) as reader:
        assert [bytes(view) for view in reader.read(range(len(reader)))] == [files[key] for key in sorted(files)]


def test_a_home_that_takes_no_more_ends_no_merge(
    source: Path, config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    in_parts(source, config, 2, home=str(home))
    shutil.rmtree(home)
    home.touch()
    merged = merge_parts(Catalog(config.catalog), "it")
    assert Catalog(config.catalog).latest("it") == merged.version
    assert "the packed home lacks the index of it" in caplog.text


def test_a_merge_lets_the_shards_at_home_be_read_as_the_source_is(
    source: Path, config: Config, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    in_parts(source, config, 2, home=str(home))
    modes = {path: path.stat().st_mode for path in home.glob("*.mdb")}
    for path in modes:  # as another user's private copy left them since
        path.chmod(0o400)
    merge_parts(Catalog(config.catalog), "it")
    assert {path: path.stat().st_mode for path in modes} == modes


def test_what_is_missing_or_does_not_fit_is_said(source: Path, config: Config) -> None:
    catalog = Catalog(config.catalog)
    with pytest.raises(CatalogError, match="no part of 'it'") as nothing:
        merge_parts(catalog, "it")
    assert nothing.value.exit_code == 2
    pack(str(source), "it", config=config, part=Part(2, 4))
    with pytest.raises(CatalogError, match="parts 1, 3, 4 of 4 of 'it' are missing"):
        merge_parts(catalog, "it")
    write_tree(source, {"one/more": b"x"})
    in_parts(source, config, 4)
    pack(str(source), "it", config=config, part=Part(1, 2))
    with pytest.raises(CatalogError, match="are of 3 packings"):
        merge_parts(catalog, "it")


def test_a_damaged_part_is_not_merged(source: Path, config: Config) -> None:
    in_parts(source, config, 2)
    part = next((config.catalog / "it" / ".parts").glob("*-2-of-2.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    with pytest.raises(IndexFormatError):
        merge_parts(Catalog(config.catalog), "it")
    assert Catalog(config.catalog).names() == []


def test_an_array_lists_its_source_once_and_what_else_is_packed_lists_it_again(
    source: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[float] = []
    listing = LocalSource.listing

    def counted(self: LocalSource, wanted: Selection) -> Listing:
        listed.append(time.time())
        return listing(self, wanted)

    monkeypatch.setattr(LocalSource, "listing", counted)
    in_parts(source, config, 4, "17")
    assert len(listed) == 1
    record = json.loads(next((config.catalog / "it" / ".parts").glob("*-4-of-4.json")).read_text())["pack"]
    assert record["listed_unix"] <= listed[0]  # it is as old as the listing, whenever the part was packed
    write_tree(source, {"one/more": b"x"})
    pack(str(source), "it", config=config, part=Part(1, 4, "17"))  # of the array: what was there when it began
    assert len(listed) == 1
    assert merge_parts(Catalog(config.catalog), "it").parts == 4
    assert list((config.catalog / "it" / ".parts").iterdir()) == []
    pack(str(source), "it", config=config, part=Part(1, 1, "18"), wanted=Selection(include=("one/",)))
    pack(str(source), "it", config=config, part=Part(1, 1, "18"))
    pack(str(source), "it", config=config, part=Part(1, 1))
    assert len(listed) == 4


def test_a_task_that_found_the_source_changed_lists_it_again_when_it_is_requeued(
    source: Path, config: Config, files: dict[str, bytes]
) -> None:
    pack(str(source), "it", config=config, part=Part(1, 2, "17"))
    (source / max(files)).write_bytes(b"more than before" * 1000)
    with pytest.raises(SourceChangedError):
        pack(str(source), "it", config=config, part=Part(2, 2, "17"))
    for number in (2, 1):
        pack(str(source), "it", config=config, part=Part(number, 2, "17"))
    with pytest.raises(CatalogError, match="are of 2 packings"):
        merge_parts(Catalog(config.catalog), "it")


def test_a_merge_leaves_the_listing_of_an_array_that_runs(source: Path, config: Config) -> None:
    in_parts(source, config, 2, "17")
    listings = set((config.catalog / "it" / ".parts").glob("listing-*.npz"))
    with pytest.raises(SourceError):  # it has listed, and is still to make its part
        pack(str(source), "it", config=config, part=Part(1, 1, "18"), progress=_ends)
    (left,) = set((config.catalog / "it" / ".parts").glob("listing-*.npz")) - listings
    merge_parts(Catalog(config.catalog), "it")
    assert [path.name for path in (config.catalog / "it" / ".parts").glob("*.npz")] == [left.name]


@pytest.mark.parametrize("how", ["damaged", "another user's", "for all to write to", "linked"])
def test_a_listing_that_may_not_be_trusted_is_made_again(source: Path, config: Config, how: str) -> None:
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("acts as other users")
    pack(str(source), "it", config=config, part=Part(1, 2, "17"))
    (shared,) = (config.catalog / "it" / ".parts").glob("listing-*.npz")
    if how == "damaged":
        shared.write_bytes(shared.read_bytes()[:-200])
    elif how == "another user's":
        os.chown(shared, 54_321, -1)
    elif how == "for all to write to":
        shared.chmod(0o666)
    else:
        shared.symlink_to(shared.rename(shared.with_name("elsewhere")))
    (source / "one").mkdir()
    (source / "one" / "more").write_bytes(b"x")
    pack(str(source), "it", config=config, part=Part(2, 2, "17"))
    with pytest.raises(CatalogError, match="are of 2 packings"):
        merge_parts(Catalog(config.catalog), "it")
    assert _read(shared) is not None


def test_who_lists_is_waited_for_and_one_that_ends_without_a_listing_is_not(source: Path, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    origin, begun, go_on = LocalSource(str(source)), threading.Event(), threading.Event()
    found: list[Listing] = []

    def slowly() -> Listing:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return origin.listing()

    def never() -> Listing:
        raise AssertionError("two listed")

    first = threading.Thread(target=lambda: found.append(shared_listing(catalog, "d", "k", slowly, SystemClock())))
    first.start()
    assert begun.wait(LIMIT_S)
    second = threading.Thread(target=lambda: found.append(shared_listing(catalog, "d", "k", never, SystemClock())))
    second.start()
    go_on.set()
    first.join(LIMIT_S)
    second.join(LIMIT_S)
    assert [list(one.keys) for one in found] == [list(origin.listing().keys)] * 2

    def fails() -> Listing:
        raise SourceError("x", "it cannot be listed")

    with pytest.raises(SourceError):
        shared_listing(catalog, "d", "other", fails, SystemClock())
    assert len(shared_listing(catalog, "d", "other", origin.listing, SystemClock())) == len(found[0])
    lock = os.open(tmp_path / "d" / PARTS / "listing-held.lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    try:  # whoever holds it takes too long
        assert len(shared_listing(catalog, "d", "held", origin.listing, ManualClock())) == len(found[0])
    finally:
        os.close(lock)
