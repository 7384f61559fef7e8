"""Folders and patterns of packed trees, whatever the names: fsspec's own file system in memory is the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.cache.catalog import Catalog, PackRecord
from deeplink.cache.errors import DatasetMissingError, SourceError
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import IndexContent, ShardEntry, write_index
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import SampleKey, ShardId, Version
from deeplink.fs.copy_out import planned
from deeplink.fs.filesystem import DeepLinkFileSystem
from deeplink.fs.library import (
    DatasetNotFoundError,
    DatasetPath,
    DatasetTree,
    Library,
    forget_open_datasets,
)
from tests.cache.agents import config_below
from tests.effort import examples

if TYPE_CHECKING:
    from pathlib import Path

# "." and "0" sort around "/", "é" has two bytes, "-" sorts before all of them.
NAMES = st.text("ab.0-é", min_size=1, max_size=3).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TREES = st.sets(PATHS, min_size=1, max_size=20).map(
    lambda paths: sorted(path for path in paths if not any(other.startswith(f"{path}/") for other in paths))
)
PATTERNS = st.lists(
    st.sampled_from(["*", "**", "?", "a*", "[ab]", "a", "b", "*.a", ".", "0"]), min_size=1, max_size=4
)


def content(keys: list[str]) -> IndexContent:
    """Return an index of samples of no bytes: only the names count here."""
    zeros = np.zeros(len(keys), np.uint64)
    return IndexContent(
        source="/nowhere",
        shards=(ShardEntry(id=ShardId("0" * 40), bytes=1, samples=len(keys), blocks=1),),
        block_offsets=[np.zeros(1, np.uint64)],
        keys=[SampleKey(key) for key in keys],
        shard=zeros.astype(np.uint32),
        block=zeros.astype(np.uint32),
        offset=zeros.astype(np.uint32),
        length=zeros,
        checksum=zeros,
    )


class Model(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory of its own: fsspec's keeps one for all."""

    cachable = False

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        for key in keys:
            self.pipe(f"/{key}", b"")


def shown(paths: Any) -> list[str]:
    return sorted(path.strip("/") for path in paths if path.strip("/"))


def ours(paths: Any) -> list[str]:
    return sorted(path.removeprefix("tree").strip("/") for path in paths if path != "tree")


def test_a_packed_tree_lists_and_matches_as_fsspecs_own_do(tmp_path: Path) -> None:
    config = config_below(tmp_path)
    record = PackRecord(source="", plan="", files=1, bytes=0, shards=1, packed_unix=0)

    @settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
    @given(TREES, PATTERNS.map("/".join), st.one_of(st.none(), st.integers(1, 3)), st.booleans())
    def check(keys: list[str], pattern: str, depth: int | None, withdirs: bool) -> None:
        Catalog(config.catalog).publish("tree", content(keys), record)
        fs, model = DeepLinkFileSystem(config=config), Model(keys)
        folders = {""} | {key.rpartition("/")[0] for key in keys}
        for folder in sorted(folders) + keys:
            assert ours(fs.ls(f"tree/{folder}", detail=False)) == shown(model.ls(f"/{folder}", detail=False))
            assert fs.isdir(f"tree/{folder}") == model.isdir(f"/{folder}")
            assert fs.isfile(f"tree/{folder}") == model.isfile(f"/{folder}")
            assert ours(fs.find(f"tree/{folder}", depth, withdirs)) == shown(
                model.find(f"/{folder}", depth, withdirs=withdirs)
            )
        assert ours(fs.glob(f"tree/{pattern}", maxdepth=depth)) == shown(model.glob(f"/{pattern}", maxdepth=depth))
        walked = [(root.removeprefix("tree").strip("/"), sorted(d), sorted(f)) for root, d, f in fs.walk("tree")]
        assert sorted(walked) == sorted((root.strip("/"), sorted(d), sorted(f)) for root, d, f in model.walk("/"))

    check()


def test_names_of_a_hostile_index_lead_nowhere(tmp_path: Path) -> None:
    config = config_below(tmp_path)
    record = PackRecord(source="", plan="", files=2, bytes=0, shards=1, packed_unix=0)
    Catalog(config.catalog).publish("evil", content(["a/../../../out", "a/b"]), record)
    (tmp_path / "in").mkdir()
    with pytest.raises(DatasetNotFoundError, match="lead out"):
        DeepLinkFileSystem(config=config).get("evil", str(tmp_path / "in" / "to"), recursive=True)
    with pytest.raises(SourceError):
        planned(Library(config=config), ["evil"], str(tmp_path / "in" / "to"), recursive=True)
    assert list((tmp_path / "in").iterdir()) == []


def test_the_whole_tree_is_walked_with_folders_before_their_files(tmp_path: Path) -> None:
    keys = ["a.b/c", "a/b/c/d", "a/b/e", "a0", "z/y"]
    path = tmp_path / "index"
    tree = DatasetTree(Index(path, write_index(path, content(keys))))
    assert [entry.path for entry in tree.below("")] == [
        "a.b", "a.b/c", "a", "a/b", "a/b/c", "a/b/c/d", "a/b/e", "a0", "z", "z/y",
    ]  # fmt: skip
    assert [entry.path for entry in tree.below("a")] == ["a/b", "a/b/c", "a/b/c/d", "a/b/e"]
    assert [entry.path for entry in tree.below("", 2)] == ["a", "a/b", "a.b", "a.b/c", "a0", "z", "z/y"]
    assert [entry.path for entry in tree.below("none")] == []
    assert tree.entry("a/b/c") is not None
    assert tree.entry("a/b/") is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("", "", "")),
        ("deeplink://", ("", "", "")),
        ("/mnist/", ("mnist", "", "")),
        ("deeplink://mnist@3f2a/train/7/", ("mnist", "3f2a", "train/7")),
        ("mnist/a@b/c", ("mnist", "", "a@b/c")),
    ],
)
def test_a_place_is_taken_apart(text: str, parts: tuple[str, str, str]) -> None:
    place = DatasetPath.parse(text)
    assert (place.name, place.version, place.inner) == parts
    assert DatasetPath.parse(str(place)) == place


@pytest.mark.parametrize("text", ["@", "mnist@", "@3f2a", "a b/c", "../x", ".hidden", "mnist@3f2a@1"])
def test_what_cannot_be_a_place_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetMissingError):
        place = DatasetPath.parse(text)
        Catalog(tmp_path).resolved(place.name, place.version)


def test_the_beginning_of_a_version_is_enough_unless_several_begin_so(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    versions = [Version(beginning + "0" * 36) for beginning in ("abcd", "abce", "1234")]
    for version in versions:
        (folder / f"{version}.arrow").touch()
    (folder / "latest").write_text(versions[1])
    catalog = Catalog(tmp_path)
    assert catalog.resolved("x", "") == versions[1]
    assert catalog.resolved("x", "abcd") == catalog.resolved("x", versions[0]) == versions[0]
    assert catalog.resolved("x", "1") == versions[2]
    with pytest.raises(DeepLinkError) as refused:
        catalog.resolved("x", "abc")
    assert all(version in str(refused.value) for version in versions[:2])
    assert versions[2] not in str(refused.value)
    with pytest.raises(DatasetMissingError):
        catalog.resolved("x", "ffff")


def test_how_long_a_sample_is_is_said_as_it_was_packed(tmp_path: Path) -> None:
    config = config_below(tmp_path)
    record = PackRecord(source="", plan="", files=2000, bytes=0, shards=1, packed_unix=0)
    version = Catalog(config.catalog).publish("many", content([f"{n:04d}" for n in range(2000)]), record)
    index = Catalog(config.catalog).open("many", version)
    for column in (index.lengths, index.checksums):
        at = column.ctypes.data - index._file.address + 1900 * column.itemsize
        for wrong in (b"\7", b"\0"):  # and back
            with index.path.open("r+b") as file:
                file.seek(at)
                file.write(wrong)
            forget_open_datasets()
            found = Library(config=config).at("many/1900")
            assert (found.bytes, found.checksum) == (0, 0)
