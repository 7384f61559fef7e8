"""A packed home: what is put there, what comes back, and who may read it."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import fsspec
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import HomeError
from deeplink.cache.pack.parts import Part
from deeplink.cache.packer import pack
from deeplink.cache.source.home import home_beside, make_home_beside, open_home
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.source import SourceAccess
from deeplink.cache.store.store import Store
from deeplink.core.types import ShardId
from tests.cache.agents import write_tree
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.config import Config

SHARD = ShardId("ab" * 20)


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "home")
        return
    yield "memory://home"
    memory = fsspec.filesystem("memory")
    if memory.exists("/home"):
        memory.rm("/home", recursive=True)


def test_what_is_put_comes_back_and_is_put_once(url: str, tmp_path: Path) -> None:
    home = open_home(url)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 5_000_000)
    assert not home.has(SHARD, 5_000_000)
    assert home.put(SHARD, file)
    assert home.has(SHARD, 5_000_000)
    assert not home.has(SHARD, 4_999_999)
    assert not home.put(SHARD, file)
    assert b"".join(home.fetch(SHARD, 5_000_000)) == file.read_bytes()
    with pytest.raises(HomeError):
        list(home.fetch(SHARD, 5_000_001))
    with pytest.raises(HomeError):
        list(home.fetch(ShardId("cd" * 20), 1))


def test_a_home_that_cannot_be_used_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(HomeError):
        open_home(str(tmp_path / "file")).put(SHARD, tmp_path / "file")
    with pytest.raises(HomeError):
        open_home("nosuchkind://x/y")
    with pytest.raises(HomeError) as refused:
        open_home("ftp://user:secret@host/folder")
    assert "secret" not in str(refused.value)


def test_all_of_a_version_is_at_home_and_comes_back_from_there(
    url: str, source: Path, config: Config, files: dict[str, bytes]
) -> None:
    first = pack(str(source), "digits", config=config, home=url)
    index = Catalog(config.catalog).open("digits")
    assert index.home == url
    home = open_home(url)
    assert all(home.has(entry.id, entry.bytes) for entry in index.shards)
    assert not home.put_index("digits", first.version, index.path)
    shutil.rmtree(config.store)
    shutil.rmtree(source)
    source.mkdir()
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    store = Store(config.store)
    entry = index.shards[0]
    assert store.add(entry.id, home.fetch(entry.id, entry.bytes), entry.bytes)
    assert store.is_verified(entry.id)


def test_a_lost_shard_comes_from_home_and_not_from_the_source(url: str, source: Path, config: Config) -> None:
    pack(str(source), "digits", config=config, home=url)
    store = Store(config.store)
    lost = store.ids()[0]
    store.remove(lost)
    again = pack(str(source), "digits", config=config, home=url)
    assert (again.unchanged, again.read_files) == (True, 0)
    assert store.is_verified(lost)


def test_a_home_that_was_emptied_is_filled_again(url: str, source: Path, config: Config) -> None:
    first = pack(str(source), "digits", config=config, home=url)
    index = Catalog(config.catalog).open("digits")
    if "://" in url:
        fsspec.filesystem("memory").rm("/home", recursive=True)
    else:
        shutil.rmtree(url)
    again = pack(str(source), "digits", config=config, home=url)
    assert (again.version, again.read_files) == (first.version, 0)
    assert all(open_home(url).has(entry.id, entry.bytes) for entry in index.shards)


@pytest.mark.parametrize(
    ("above", "here", "mode"),
    [
        (0o755, 0o755, 0o644),
        (0o755, 0o750, 0o640),
        (0o710, 0o755, 0o640),
        (0o700, 0o755, 0o600),
        (0o755, 0o700, 0o600),
    ],
)
def test_files_at_home_are_for_those_who_may_read_the_source(
    tmp_path: Path, above: int, here: int, mode: int
) -> None:
    source = write_tree(tmp_path / "above" / "source", {"a": b"1"})
    for folder in (tmp_path, *tmp_path.parents):  # pytest's own are for one user
        folder.chmod(folder.stat().st_mode | 0o011)
    source.chmod(here)
    source.parent.chmod(above)
    access = SourceAccess.parse(open_source(str(source)).listing().access)
    assert (access.mode, access.owner) == (mode, os.geteuid())
    home = open_home(str(tmp_path / "home"), str(access))
    home.put(SHARD, source / "a")
    facts = (tmp_path / "home" / f"{SHARD}.mdb").stat()
    assert (facts.st_mode & 0o777, facts.st_gid) == (mode, source.stat().st_gid)
    elsewhere = open_home(str(tmp_path / "elsewhere"))
    elsewhere.put(SHARD, source / "a")
    assert (tmp_path / "elsewhere" / f"{SHARD}.mdb").stat().st_mode & 0o777 == 0o600


def modes(home: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in home.glob("*.mdb")}


def test_who_packs_again_with_another_mode_narrows_or_widens_what_is_at_home(
    source: Path, config: Config, files: dict[str, bytes], tmp_path: Path
) -> None:
    for folder in (source, *source.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    home, expected = tmp_path / "home", {0o755: 0o644, 0o750: 0o640, 0o700: 0o600}
    for mode in (0o750, 0o755, 0o700, 0o755, 0o750):
        source.chmod(mode)
        again = pack(str(source), "digits", config=config, home=str(home))
        assert modes(home) == {expected[mode]}
        assert again.home_lacks == 0
    # A private copy has the same shards: they stay as open as the other dataset of this user is.
    private = write_tree(tmp_path / "private", files)
    private.chmod(0o700)
    pack(str(private), "private", config=config, home=str(home))
    assert modes(home) == {0o640}
    Catalog(config.catalog).remove_all("digits")
    pack(str(private), "private", config=config, home=str(home))
    assert modes(home) == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
def test_what_another_user_put_there_is_replaced_by_whom_may_and_nothing_else_is_touched(
    source: Path, config: Config, tmp_path: Path
) -> None:
    for folder in (source, *source.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    home = tmp_path / "home"
    pack(str(source), "digits", config=config, home=str(home))
    shards = sorted(home.glob("*.mdb"))
    assert len(shards) > 1
    good = shards[0].read_bytes()
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * len(good))
    secret.chmod(0o600)
    for shard in shards:
        os.chown(shard, 54_321, -1)
        shard.chmod(0o600)
    shards[-1].write_bytes(b"x" * shards[-1].stat().st_size)
    pack(str(source), "digits", config=config, home=str(home))
    owners = {shard: (shard.stat().st_uid, shard.stat().st_mode & 0o777) for shard in shards}
    assert owners == dict.fromkeys(shards[:-1], (0, 0o644)) | {shards[-1]: (54_321, 0o600)}
    assert shards[0].read_bytes() == good
    for plant in (shards[0].symlink_to, shards[0].hardlink_to):
        shards[0].unlink()
        plant(secret)
        pack(str(source), "digits", config=config, home=str(home))
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.read_bytes() == b"x" * len(good)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
@pytest.mark.parametrize("kept_in", ["an older version", "a part", "another group's version"])
def test_a_private_copy_takes_no_readers_from_another_users_file(
    source: Path, config: Config, files: dict[str, bytes], tmp_path: Path, kept_in: str
) -> None:
    for folder in (source, *source.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    home, private = tmp_path / "home", write_tree(tmp_path / "private", files)
    source.chmod(0o755)
    mode = 0o644
    if kept_in == "a part":
        pack(str(source), "theirs", config=config, home=str(home), part=Part(1, 1))
    else:
        if kept_in == "another group's version":
            os.chown(source, -1, 54_321)
            source.chmod(0o750)
            private.chmod(0o750)
            mode = 0o640
        pack(str(source), "theirs", config=config, home=str(home))
        if kept_in == "an older version":
            write_tree(source, dict.fromkeys(files, b"other bytes"))
            pack(str(source), "theirs", config=config)
    shards = dict.fromkeys(home.glob("*.mdb"), (54_321, mode))
    for path in (*shards, *config.catalog.rglob("*.arrow")):
        os.chown(path, 54_321, -1)
    if mode == 0o644:
        private.chmod(0o700)
    pack(str(private), "private", config=config, home=str(home))
    assert {path: (path.stat().st_uid, path.stat().st_mode & 0o777) for path in shards} == shards


def test_a_file_of_ours_with_other_bytes_is_not_opened_to_others(
    source: Path, config: Config, tmp_path: Path
) -> None:
    for folder in (source, *source.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    source.chmod(0o755)
    home, private = tmp_path / "home", tmp_path / "private"
    pack(str(source), "digits", config=config, home=str(home))
    first, *others = sorted(home.glob("*.mdb"))
    for other in others:
        other.chmod(0o600)
    private.write_bytes(b"x" * first.stat().st_size)
    private.chmod(0o600)
    private.replace(first)  # whoever may write to the folder may do that with a file of the same size
    pack(str(source), "digits", config=config, home=str(home))
    assert {path: path.stat().st_mode & 0o777 for path in (first, *others)} == {first: 0o600} | dict.fromkeys(
        others, 0o644
    )


def test_the_home_beside_a_catalog_is_for_those_who_write_to_the_catalog(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    catalog.chmod(0o1777)
    make_home_beside(catalog)
    assert Path(home_beside(catalog)).stat().st_mode & 0o7777 == 0o1777
    make_home_beside(catalog)
    (tmp_path / "file").touch()
    with pytest.raises(HomeError):
        make_home_beside(tmp_path / "file" / "catalog")


def test_where_the_catalogs_group_is_not_this_users_no_other_group_has_its_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "not a member of that group")

    catalog = tmp_path / "catalog"
    catalog.mkdir()
    catalog.chmod(0o2775)
    monkeypatch.setattr(os, "chown", refused)
    make_home_beside(catalog)
    assert Path(home_beside(catalog)).stat().st_mode & 0o7777 == 0o705


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_home_ends_no_pack_and_is_completed_by_the_next(
    source: Path, config: Config, files: dict[str, bytes], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    # So small shards that the first have come before those on their way at once have no room.
    config = dataclasses.replace(config, shard_bytes=30_000)
    size = f"size={sum(map(len, files.values())) // 2}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(home)], check=True, timeout=LIMIT_S)
    try:
        short = pack(str(source), "digits", config=config, home=str(home))
        assert 0 < short.home_lacks < short.shards
        assert "No space left" in short.home_problem
        assert short.home == str(home)
        assert 0 < short.home_bytes < sum(map(len, files.values()))
        assert not list(home.glob(".*"))
        wider = ["mount", "-o", "remount,size=100m", str(home)]
        subprocess.run(wider, check=True, timeout=LIMIT_S)
        again = pack(str(source), "digits", config=config, home=str(home))
        assert (again.version, again.unchanged, again.read_files) == (short.version, True, 0)
        assert (again.home_lacks, again.home_problem) == (0, "")
    finally:
        subprocess.run(["umount", str(home)], check=True, timeout=LIMIT_S)


def test_a_home_that_takes_nothing_is_not_recorded(source: Path, config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = pack(str(source), "digits", config=config, home=str(tmp_path / "file"))
    assert (result.home, result.home_lacks, result.home_bytes) == ("", result.shards, 0)
    assert result.home_problem
    assert Catalog(config.catalog).open("digits").home == ""
