from __future__ import annotations

import os
import sys
import zipfile
from functools import partial
from typing import TYPE_CHECKING

import fsspec
import pytest

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.format.names import Names
from deeplink.cache.source import local_source
from deeplink.cache.source.opening import open_source
from tests.cache.agents import make_tar, write_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def bucket(files: dict[str, bytes]) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file(f"/bucket/{name}", data)
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def test_a_folder_and_a_url_list_and_read_alike(source: Path, bucket: str, files: dict[str, bytes]) -> None:
    for url in (str(source), f"{source}/", f"file://{source}", bucket, f"{bucket}/"):
        origin = open_source(url)
        listing = origin.listing()
        assert listing.keys == sorted(files)
        assert listing.sizes.tolist() == [len(files[key]) for key in sorted(files)]
        assert listing.marked
        for key, data in files.items():
            assert origin.read(key, len(data)) == data
            assert origin.read_range(key, len(data) // 2, len(data) - len(data) // 2) == data[len(data) // 2 :]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_is_a_source_too(tmp_path: Path, files: dict[str, bytes], kind: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    make_tar(tmp_path / "a.tar", files)
    origin = open_source(f"{kind}://::{tmp_path}/a.{kind}")
    assert origin.listing().keys == sorted(files)
    assert all(origin.read(key, len(data)) == data for key, data in files.items())


@pytest.mark.parametrize(
    "url", ["", "file://", "nothing/here", "memory://nothing/here", "zip://::/nothing.zip", "nosuchkind://x/y"]
)
def test_a_source_that_is_not_there_is_said_so(url: str) -> None:
    with pytest.raises(SourceError) as refused:
        open_source(url).listing()
    assert refused.value.remedy


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_is_none_is_said_so(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cut").write_bytes(b"PK no archive")
    with pytest.raises(SourceError, match="cut"):
        open_source(f"{kind}://::{tmp_path}/cut").listing()


def test_an_empty_source_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "only" / "folders").mkdir(parents=True)
    with pytest.raises(SourceError, match="holds no files"):
        open_source(str(tmp_path)).listing()


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="not a folder"):
        open_source(str(tmp_path / "file")).listing()


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(SourceError, match="Protocol not known: s4") as caught:
        open_source("s4://bucket/tiles")
    assert "s3://, http://, zip://" in caught.value.remedy


@pytest.mark.parametrize("module", ["s3fs", "paramiko"])
def test_the_package_a_kind_needs_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    kind = {"s3fs": "s3", "paramiko": "sftp"}[module]
    with pytest.raises(SourceError) as caught:
        open_source(f"{kind}://place/tiles")
    assert f"pip install {module}," in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(SourceError) as refused:
        open_source("ftp://user:secret@host/folder")
    assert "secret" not in str(refused.value)


def test_what_is_neither_file_nor_folder_is_refused_by_name(source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(SourceError, match="cannot be packed") as refused:
        open_source(str(source)).listing()
    assert refused.value.key == "pipe"


def test_a_name_that_is_not_utf8_is_refused_by_name(source: Path) -> None:
    with open(os.fsencode(source) + b"/caf\xe9.png", "wb"):  # noqa: PTH123 - a name no text can hold
        pass
    with pytest.raises(SourceError, match="not UTF-8") as refused:
        open_source(str(source)).listing()
    assert refused.value.key == "caf\udce9.png"


def test_links_within_are_followed_and_links_out_are_refused(tmp_path: Path, source: Path) -> None:
    (source / "also.bin").symlink_to(source / "train/a/00003.bin")
    origin = open_source(str(source))
    assert "also.bin" in origin.listing().keys
    secret = write_tree(tmp_path / "elsewhere", {"secret": b"x"})
    (source / "out").symlink_to(secret / "secret")
    with pytest.raises(SourceError, match="outside"):
        origin.listing()
    (source / "out").unlink()
    (source / "loop").symlink_to(source)
    with pytest.raises(SourceError, match="link to the folder"):
        origin.listing()
    (source / "loop").unlink()
    (source / "dangling").symlink_to(source / "nothing")
    with pytest.raises(SourceError, match="cannot be read"):
        origin.listing()


@pytest.mark.parametrize("size", [3, 5])
def test_a_file_of_another_size_than_listed_has_changed(tmp_path: Path, size: int) -> None:
    write_tree(tmp_path, {"a": bytes(size)})
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/changed/a", bytes(size))
    for url in (str(tmp_path), "memory://changed"):
        with pytest.raises(SourceChangedError):
            open_source(url).read("a", 4)
    memory.rm("/changed", recursive=True)
    with pytest.raises(SourceChangedError):
        open_source(str(tmp_path)).read_range("a", 2, 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a/b": b"x"})
    for key in ("gone", "a"):  # not there; a folder, which root cannot read as a file either
        with pytest.raises(SourceError, match="cannot be read") as refused:
            open_source(str(tmp_path)).read(key, 1)
        assert refused.value.key == key
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((SourceError, SourceChangedError)):  # and it does not wait for a writer
        open_source(str(tmp_path)).read("pipe", 1)


def test_a_file_that_goes_away_while_it_is_packed_is_said_to_have_gone(tmp_path: Path) -> None:
    write_tree(tmp_path, {"a": b"x"})
    fsspec.filesystem("memory").pipe_file("/gone/a", b"x")
    for url in (str(tmp_path), "memory://gone"):
        source = open_source(url)
        reads: tuple[Callable[[], object], ...] = (
            partial(source.read, "b", 1),
            partial(source.read_range, "b", 0, 1),
            partial(source.fill, Names.of(["b"]), [1], memoryview(bytearray(2))),
        )
        for read in reads:
            with pytest.raises(SourceError, match="'b' cannot be read: it went away") as gone:
                read()
            assert gone.value.remedy.startswith("Run `deeplink pack` again")
            assert isinstance(gone.value.__cause__, FileNotFoundError)
            assert gone.value.exit_code == 1


def test_a_name_in_an_archive_that_can_be_no_path_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("/abs", "x/y"):
            archive.writestr(name, b"1")
    with pytest.raises(SourceError, match="'/abs' cannot be packed: the path is absolute"):
        open_source(f"zip://::{tmp_path}/a.zip").listing()


def test_a_tree_of_many_folders_lists_alike_wherever_it_is(tmp_path: Path) -> None:
    names = [
        f"{a}/{b}{'/' * (b % 3 > 0)}{'x.y/' * (b % 3 > 1)}{c}" for a in "abc" for b in range(12) for c in "z-"
    ]
    names += ["a.b", "a-b/c", "root.bin", "é/ü"]
    files = {name: name.encode() for name in names}
    tree = write_tree(tmp_path / "tree", files)
    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file(f"/many/{name}", data)
    here, there = open_source(str(tree)).listing(), open_source("memory://many").listing()
    memory.rm("/many", recursive=True)
    assert list(here.keys) == list(there.keys) == sorted(files, key=str.encode)
    assert here.sizes.tolist() == there.sizes.tolist()


def test_a_folder_of_very_many_files_is_listed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{i * 7919 % 1000:03d}": bytes(i % 5) for i in range(300)} | {"150x/deep": b"1", "2/z": b""}
    tree = write_tree(tmp_path, files)
    monkeypatch.setattr(local_source, "_AT_ONCE", 16)
    found = open_source(str(tree)).listing()
    assert list(found.keys) == sorted(files)
    assert found.sizes.tolist() == [len(files[key]) for key in sorted(files)]
    assert found.marks.tolist() == [(tree / key).stat().st_mtime_ns for key in sorted(files)]


def test_a_server_that_gives_names_alone_is_asked_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/unsized/a/b", b"four")
    listed = type(memory).ls
    monkeypatch.setattr(
        type(memory), "ls", lambda self, path, **kw: [f | {"size": None} for f in listed(self, path, **kw)]
    )
    found = open_source("memory://unsized").listing()
    memory.rm("/unsized", recursive=True)
    assert (list(found.keys), found.sizes.tolist()) == (["a/b"], [4])


def test_a_listing_that_fails_ahead_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a/1", "b/2", "c/3"):
        memory.pipe_file(f"/failing/{name}", b"x")
    listed = type(memory).ls

    def ls(self: object, path: str, **options: object) -> list[dict[str, object]]:
        if path.endswith("/c"):
            raise OSError("the server is on fire")
        found: list[dict[str, object]] = listed(self, path, **options)
        return found

    monkeypatch.setattr(type(memory), "ls", ls)
    with pytest.raises(SourceError, match="on fire"):
        open_source("memory://failing").listing()
    monkeypatch.undo()
    memory.rm("/failing", recursive=True)
