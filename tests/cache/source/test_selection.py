from __future__ import annotations

import os
import zipfile
from pathlib import Path

import fsspec
import pytest

from deeplink.cache.errors import SourceError
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.selection import Selection
from tests.cache.agents import write_tree

TREE = {
    "a.jpg": b"1",
    "a.txt": b"2",
    "train/b.jpg": b"3",
    "train/deep/c.jpg": b"4",
    "val/d.jpg": b"5",
    ".git/config": b"6",
    "train/.DS_Store": b"7",
    "train/._b.jpg": b"8",
    "val/Thumbs.db": b"9",
}
PLAIN = ["a.jpg", "a.txt", "train/b.jpg", "train/deep/c.jpg", "val/d.jpg"]


def listed(url: object, **wanted: object) -> list[str]:
    return list(open_source(str(url)).listing(Selection(**wanted)).keys)  # type: ignore[arg-type]


def test_version_control_and_litter_are_left_out_and_counted_wherever_the_files_are(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", TREE)
    memory = fsspec.filesystem("memory")
    for name, data in TREE.items():
        memory.pipe_file(f"/litter/{name}", data)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, data in TREE.items():
            archive.writestr(name, data)
    for url in (str(tree), "memory://litter", f"zip://::{tmp_path}/a.zip"):
        found = open_source(url).listing(Selection())
        assert list(found.keys) == PLAIN
        assert found.left_out == {".git": 1, ".DS_Store": 1, "._*": 1, "Thumbs.db": 1}
        assert listed(url, default_excludes=False) == sorted(TREE)
    memory.rm("/litter", recursive=True)


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        ({"include": ("*.jpg",)}, ["a.jpg", "train/b.jpg", "train/deep/c.jpg", "val/d.jpg"]),
        ({"include": ("train/",)}, ["train/b.jpg", "train/deep/c.jpg"]),
        ({"include": ("train/*.jpg", "a.*")}, ["a.jpg", "a.txt", "train/b.jpg"]),
        ({"include": ("**/*.jpg",), "exclude": ("deep",)}, ["a.jpg", "train/b.jpg", "val/d.jpg"]),
        ({"exclude": ("train/**", "[av].txt")}, ["a.jpg", "val/d.jpg"]),
        ({"exclude": ("[!d].jpg",)}, ["a.txt", "val/d.jpg"]),
    ],
)
def test_globs_take_names_and_paths(tmp_path: Path, wanted: dict[str, object], keys: list[str]) -> None:
    assert listed(write_tree(tmp_path, TREE), **wanted) == keys


def test_where_globs_leave_nothing_it_is_said_what_was_left_out(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no files but those left out.*--include\) 2"):
        listed(write_tree(tmp_path, TREE), include=("*.png",), exclude=("train", "val"))


def test_what_is_left_out_is_not_looked_at(tmp_path: Path) -> None:
    write_tree(tmp_path, TREE)
    (tmp_path / "train" / "dangling").symlink_to("nowhere")
    (tmp_path / "val" / "out").symlink_to("/etc")
    assert listed(tmp_path, exclude=("dangling", "out")) == PLAIN


def test_all_that_is_bad_is_named_at_once_and_can_be_skipped(tmp_path: Path) -> None:
    write_tree(tmp_path, TREE)
    (tmp_path / "train" / "dangling").symlink_to("nowhere")
    (tmp_path / "out").symlink_to("/etc/hostname")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "val" / "pipe")
    with open(os.fsencode(tmp_path) + b"/caf\xe9.png", "wb"):  # noqa: PTH123 - a name no text can hold
        pass
    with pytest.raises(SourceError, match="5 files cannot be packed") as refused:
        listed(tmp_path)
    for said in ("train/dangling", "outside of the source", "neither a file nor a folder", "not UTF-8"):
        assert said in str(refused.value)
    assert "--skip-bad" in refused.value.remedy
    found = open_source(str(tmp_path)).listing(Selection(skip_bad=True))
    assert list(found.keys) == PLAIN
    assert sorted(found.bad) == ["caf\udce9.png", "loop", "out", "train/dangling", "val/pipe"]
    assert found.bad_count == 5


def test_links_are_followed_where_that_is_asked_for_and_loops_are_bad(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a": b"1"})
    write_tree(tmp_path / "else", {"where/b": b"22", "c": b"333"})
    (tree / "folder").symlink_to(tmp_path / "else" / "where")
    (tree / "file").symlink_to(tmp_path / "else" / "c")
    origin = open_source(str(tree))
    found = origin.listing(Selection(follow_links=True))
    assert list(found.keys) == ["a", "file", "folder/b"]
    assert origin.read_many(list(found.keys), found.sizes.tolist()) == [b"1", b"333", b"22"]
    (tree / "loop").symlink_to(tree)
    with pytest.raises(SourceError, match="which it lies in"):
        origin.listing(Selection(follow_links=True))


def test_links_to_files_are_not_looked_at_for_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = write_tree(tmp_path / "tree", {"a/b/c": b"1"})
    (tree / "a" / "b" / "link").symlink_to("c")
    compared: list[Path] = []
    monkeypatch.setattr(Path, "samefile", lambda _self, other: compared.append(other))
    assert listed(tree, follow_links=True) == ["a/b/c", "a/b/link"]
    assert not compared


def test_folders_that_link_to_each_other_are_entered_once_on_each_way(tmp_path: Path) -> None:
    write_tree(tmp_path, {"one/a": b"1", "two/b": b"22"})
    (tmp_path / "one" / "on").symlink_to("../two")
    (tmp_path / "two" / "on").symlink_to("../one")
    found = open_source(str(tmp_path)).listing(Selection(follow_links=True, skip_bad=True))
    assert list(found.keys) == ["one/a", "one/on/b", "two/b", "two/on/a"]
    assert sorted(found.bad) == ["one/on/on", "two/on/on"]


def test_a_glob_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is no glob"):
        listed(write_tree(tmp_path, TREE), include=("[z-a]",))
