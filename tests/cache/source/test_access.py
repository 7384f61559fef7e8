"""Who may read what was packed of a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import fsspec
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.pack.rebuild_index import ReindexRequest, ShardFinder, rebuild_index
from deeplink.cache.packer import pack
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.source import SourceAccess
from deeplink.core.clock import SystemClock
from tests.cache.agents import make_tar, write_tree

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.core.config import Config

OWNER, MEMBER, OTHER, GROUP = 1000, 1001, 1002, 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all may read, and all that lead to it."""
    for above in (tmp_path, *tmp_path.parents):  # pytest's own are for one user
        above.chmod(above.stat().st_mode | 0o011)
    return write_tree(tmp_path / "source", {"a/1": b"1", "a/2": b"2", "b/3": b"3"})


@pytest.mark.parametrize(
    ("mode", "may"),
    [(0o644, {OWNER, MEMBER, OTHER}), (0o640, {OWNER, MEMBER}), (0o600, {OWNER})],
)
def test_owner_group_and_mode_say_who_may_read(mode: int, may: set[int]) -> None:
    access = SourceAccess.parse(str(SourceAccess(OWNER, GROUP, mode)))
    users: dict[int, set[int]] = {OWNER: set(), MEMBER: {GROUP}, OTHER: {GROUP + 1}}
    assert {user for user, groups in users.items() if access.allows(user, groups)} == may
    assert access.allows(0, ())


@pytest.mark.parametrize("text", ["", "1:2", "1:2:x", "1:2:3:4"])
def test_text_that_is_no_access_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever number it is
        SourceAccess.parse(text)


@pytest.mark.parametrize(
    ("path", "mode", "left"),
    [
        ("", 0o755, 0o644),
        ("", 0o700, 0o600),
        ("", 0o705, 0o600),
        ("..", 0o701, 0o600),
        ("..", 0o710, 0o640),
        ("a", 0o750, 0o640),
        ("a", 0o711, 0o600),
        ("a/1", 0o644, 0o644),
        ("a/1", 0o640, 0o640),
        ("b/3", 0o600, 0o600),
        ("b/3", 0o604, 0o600),
    ],
)
def test_the_narrowest_mode_of_all_that_is_packed_counts(folder: Path, path: str, mode: int, left: int) -> None:
    (folder / path).chmod(mode)
    found = SourceAccess.parse(open_source(str(folder)).listing().access)
    assert found == SourceAccess(os.geteuid(), folder.stat().st_gid, left)


def test_a_file_of_another_user_leaves_nobody_but_its_readers(folder: Path) -> None:
    access, facts = SourceAccess(OWNER, GROUP, 0o644), (folder / "a/1").stat()
    assert access.narrowed(facts) == access
    (folder / "a/1").chmod(0o600)
    assert not access.narrowed((folder / "a/1").stat()).allows(OWNER, {GROUP})


def test_tars_are_for_those_who_may_read_every_one_of_them(folder: Path) -> None:
    for name in ("x-0", "x-1"):
        make_tar(folder / f"{name}.tar", {"1.jpg": b"1"})
    for pattern in ("x-{0..1}.tar", "x-*.tar"):
        (folder / "x-1.tar").chmod(0o644)
        assert SourceAccess.parse(open_source(f"{folder}/{pattern}").listing().access).mode == 0o644
        (folder / "x-1.tar").chmod(0o600)
        assert SourceAccess.parse(open_source(f"{folder}/{pattern}").listing().access).mode == 0o600


def test_index_record_and_home_have_the_access_and_a_rebuilt_index_too(folder: Path, config: Config) -> None:
    (folder / "a").chmod(0o750)
    home = config.catalog.parent / "home"
    packed = pack(str(folder), "digits", config=config, home=str(home))
    catalog = Catalog(config.catalog)
    index, record = catalog.open("digits"), catalog.record("digits", packed.version)
    assert record is not None
    assert record.access == index.access == f"{os.geteuid()}:{folder.stat().st_gid}:0640"
    assert {path.stat().st_mode & 0o777 for path in home.rglob("*.*")} == {0o640}
    index.path.unlink()
    with ShardFinder([config.store]) as finder:
        wanted = ReindexRequest(name="digits", version=packed.version)
        assert rebuild_index(catalog, wanted, finder, SystemClock()).restored
    assert catalog.open("digits").access == record.access


def test_another_mode_makes_another_version_of_the_same_shards(folder: Path, config: Config) -> None:
    first = pack(str(folder), "digits", config=config)
    folder.chmod(0o700)
    second = pack(str(folder), "digits", config=config)
    catalog = Catalog(config.catalog)
    indexes = [catalog.open("digits", result.version) for result in (first, second)]
    assert [SourceAccess.parse(index.access).mode for index in indexes] == [0o644, 0o600]
    assert [entry.id for entry in indexes[0].shards] == [entry.id for entry in indexes[1].shards]
    assert not second.read_files


def test_a_source_behind_a_url_has_none(config: Config) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/access/a", b"1")
    try:
        packed = pack("memory://access", "made", config=config)
    finally:
        memory.rm("/access", recursive=True)
    assert not Catalog(config.catalog).open("made", packed.version).access
