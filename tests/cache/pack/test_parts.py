"""A version that was packed in parts is the one that one packer makes, byte for byte."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import CatalogError, IndexFormatError
from deeplink.cache.pack.parts import Part, merge_parts
from deeplink.cache.pack.plan import marks_of
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.core.config import Config
from tests.cache.agents import config_below, write_tree


def in_parts(source: Path, config: Config, parts: int, **options: object) -> None:
    numbers = list(range(1, parts + 1))
    random.Random(parts).shuffle(numbers)  # noqa: S311 - test data
    for number in numbers:
        # Each on a node of its own.
        there = dataclasses.replace(config, store=config.store / str(number))
        result = pack(str(source), "it", config=there, part=Part(number, parts), **options)  # type: ignore[arg-type]
        assert result.version == ""
        assert result.read_files == result.files


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_parts_make_what_one_packer_makes(
    source: Path, config: Config, files: dict[str, bytes], tmp_path: Path, parts: int
) -> None:
    config = dataclasses.replace(config, shard_bytes=50_000)
    other = config_below(tmp_path / "other", shard_bytes=50_000)
    home = str(tmp_path / "home")
    whole = pack(str(source), "it", config=other, home=home)
    assert 3 < whole.shards < 40
    in_parts(source, config, parts, home=home)
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
