from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog, PackRecord
from deeplink.cache.errors import CatalogError, DatasetMissingError, DatasetNameError, IndexFormatError
from deeplink.types import Version
from tests.cache.test_index import content

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
        with pytest.raises(DatasetNameError):
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
