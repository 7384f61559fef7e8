"""Paths below a packed folder answer as the files themselves do, whatever is asked, and how they are written."""

from __future__ import annotations

import errno
import glob
import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deeplink.paths
from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.core.config import Config
from deeplink.paths.packed_folder import PackedFolder
from deeplink.paths.routing import PackedRoot
from tests.cache.agents import config_below, write_tree
from tests.effort import examples

# "." and "0" sort around "/", "é" has two bytes; dots at the beginning are looked at twice.
NAMES = st.text("ab.0é ", min_size=1, max_size=3).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
TREES = st.dictionaries(PATHS, st.binary(max_size=9000), min_size=1, max_size=8).map(
    lambda tree: {path: data for path, data in tree.items() if not any(o.startswith(f"{path}/") for o in tree)}
)
LONG_AGO = 1_000_000_000


def packed_tree(base: Path, files: dict[str, bytes], name: str = "tree") -> tuple[Path, Config]:
    """Pack files in folders that nobody touched for long."""
    root, config = write_tree(base / "data" / name, files), config_below(base)
    for number, path in enumerate(sorted(root.rglob("*"))):
        if path.is_file():
            os.utime(path, ns=(0, LONG_AGO * 10**9 + 123_456_789 * number))
    age(root)
    pack(str(root), name, config=config)
    return root, config


def age(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        os.utime(folder, (LONG_AGO, LONG_AGO))


@contextmanager
def served(config: Config, *names: str) -> Iterator[None]:
    deeplink.paths.install(*names, config=config)
    try:
        yield
    finally:
        deeplink.paths.uninstall()


def facts(found: os.stat_result) -> tuple[int, int, int, float]:
    kind = found.st_mode & 0o170000
    if kind == 0o040000:
        return kind, found.st_mode, found.st_ino, found.st_mtime
    return kind, found.st_size, found.st_mtime_ns, found.st_mtime


def told(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or how it fails."""
    try:
        return call()
    except (OSError, ValueError, LookupError) as problem:
        return type(problem), getattr(problem, "errno", None)


def read(path: str, *arguments: Any, **options: Any) -> Any:
    with open(path, *arguments, **options) as file:
        return file.read(), file.name, file.mode, type(file) if options.get("buffering") != 0 else None


def by_descriptor(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def mapped(path: str) -> bytes:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view[:]


def scanned(path: str) -> list[Any]:
    with os.scandir(path) as entries:
        return sorted(
            (entry.name, entry.path, entry.is_dir(), entry.is_file(), entry.is_symlink(), facts(entry.stat()))
            for entry in entries
        )


def pieces(path: str) -> Any:
    with open(path, "rb") as file:
        return file.read(3), file.seek(-1, os.SEEK_END) if file.peek() else 0, file.read(), file.tell()


FILE_CALLS: list[Callable[[str], Any]] = [
    lambda path: read(path, "rb"),
    lambda path: read(path, encoding="latin-1", newline=""),
    lambda path: read(path, encoding="utf-8", errors="replace"),
    lambda path: read(path, "rb", buffering=0),
    lambda path: read(path, "rb", encoding="utf-8"),
    lambda path: read(path, "r", buffering=0),
    lambda path: read(path, "rz"),
    lambda path: read(path, encoding="no such"),
    pieces,
    mapped,
    by_descriptor,
    lambda path: np.fromfile(path, np.uint8).tolist(),
    lambda path: Path(path).read_bytes(),
    lambda path: facts(os.stat(path)),
    lambda path: facts(os.lstat(path)),
    lambda path: facts(Path(path).stat()),
    lambda path: (os.path.exists(path), os.path.isfile(path), os.path.isdir(path), os.path.islink(path)),
    lambda path: (Path(path).exists(), Path(path).is_file(), Path(path).is_dir()),
    os.path.getsize,
    os.path.getmtime,
    os.path.realpath,
    lambda path: Path(path).resolve(strict=True),
    lambda path: os.path.samefile(path, path),
    lambda path: os.access(path, os.R_OK),
]
FOLDER_CALLS: list[Callable[[str], Any]] = [
    lambda path: sorted(os.listdir(path)),
    scanned,
    lambda path: sorted((top, sorted(folders), sorted(files)) for top, folders, files in os.walk(path)),
    lambda path: sorted(Path(path).iterdir()),
    lambda path: sorted(glob.glob(f"{glob.escape(path)}/**/*", recursive=True)),
    lambda path: sorted(Path(path).rglob("*")),
    lambda path: sorted(Path(path).glob("*a*/*")),
]


def answers(paths: list[str]) -> list[Any]:
    return [(path, told(lambda: call(path))) for call in [*FILE_CALLS, *FOLDER_CALLS] for path in paths]  # noqa: B023


def spelt(root: Path, alias: Path, inner: str) -> list[str]:
    """Return ways to write a path below a folder: some of them are wrong for a file."""
    ways = [f"{root}/{inner}", f"{root}//{inner}", f"{root}/./{inner}", f"{root}/{inner}/", f"{root}/{inner}/.."]
    ways += [f"{root.parent}/{folder}/../{root.name}/{inner}" for folder in ("config", "none", "alias")]
    ways += [f"{alias}/{inner}", os.path.relpath(f"{root}/{inner}")]
    return [*ways, f"{root}/a/../{inner}", f"{root}/{inner}x", f"{root}/{inner}/x", f"{root}/{inner}\0"]


@given(TREES)
@settings(max_examples=examples(40), deadline=None)
def test_every_call_answers_as_the_files_do(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        root, config = packed_tree(base, files)
        (root.parent / "config").mkdir()
        (root.parent / "alias").symlink_to("tree")
        inner = sorted({*files, *(str(parent) for path in files for parent in Path(path).parents)} - {"."})
        paths = [str(root), f"{root}/", str(root.parent), f"{root.parent}/none"]
        paths += [way for one in inner for way in spelt(root, root.parent / "alias", one)]
        expected = answers(paths)
        with served(config):
            found = answers(paths)
            stats = deeplink.paths.stats()
        for real, ours in zip(expected, found, strict=True):
            assert ours == real
        assert stats.local_samples >= 5 * len(files)
        assert stats.source_samples == 0


@given(TREES, st.lists(st.tuples(st.sampled_from("wapmdrntu"), PATHS, PATHS), max_size=6))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_changed_is_the_real_file_again(
    files: dict[str, bytes], changes: list[tuple[str, str, str]]
) -> None:
    """The same changes are made to an unpacked twin; afterwards both trees must look alike."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        root, config = packed_tree(base, files)
        twin = base / "twin"
        shutil.copytree(root, twin)
        every = sorted(files)
        with served(config):
            for kind, one, other in changes:
                mine, theirs = (told(lambda: change(top, kind, one, other, every)) for top in (root, twin))  # noqa: B023
                assert mine == theirs
            assert looks(root) == looks(twin)


def change(top: Path, kind: str, one: str, other: str, every: list[str]) -> Any:
    """Change one thing: half of the time something that was packed."""
    packed = top / every[len(one) % len(every)]
    target = packed if len(other) % 2 else top / one
    moved = packed if kind == "r" or packed.parent == top else packed.parent
    changes: dict[str, Callable[[], Any]] = {
        "w": lambda: target.write_bytes(other.encode()),
        "a": lambda: appended(target),
        "p": lambda: overwritten(target, other.encode()),
        "m": lambda: os.makedirs(target, exist_ok=True),
        "d": lambda: os.remove(target),
        "r": lambda: os.rename(moved, top / one),
        "n": lambda: os.rename(moved, top / one),
        "t": lambda: os.truncate(target, 1),
        "u": lambda: os.utime(target, (5, 5)),
    }
    return changes[kind]()


def appended(path: Path) -> int:
    with open(path, "ab") as file:
        return file.write(b"more")


def overwritten(path: Path, data: bytes) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return os.write(descriptor, data)
    finally:
        os.close(descriptor)


def looks(top: Path) -> dict[str, Any]:
    """Return what lies below a folder, by what is listed and by what is opened."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(top):
        inner = os.path.relpath(folder, top)
        found[inner] = sorted(folders), sorted(files)
        for name in files:
            data = Path(folder, name).read_bytes()
            assert os.path.getsize(Path(folder, name)) == len(data)
            found[f"{inner}/{name}"] = data
    return found


FILES = {"train/a/1.txt": b"one\ntwo\n", "train/a/2.bin": bytes(5000), "train/b/3.txt": b"", "top.txt": b"top"}


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, Config]:
    return packed_tree(tmp_path, FILES)


def test_a_packed_folder_is_served_where_its_files_are_lost(tree: tuple[Path, Config]) -> None:
    root, config = tree
    for path in FILES:
        (root / path).unlink()
    age(root)
    with served(config):
        assert {path: (root / path).read_bytes() for path in FILES} == FILES
        assert [entry.name for entry in os.scandir(root / "train" / "a")] == ["1.txt", "2.bin"]
        assert os.path.getsize(root / "train/a/2.bin") == 5000
    assert not (root / "top.txt").exists()


def test_a_folder_with_news_is_listed_as_it_is(tree: tuple[Path, Config]) -> None:
    root, config = tree
    (root / "train" / "a" / "new.txt").write_text("new")  # by whomever, before
    (root / "train" / "empty").mkdir()
    os.utime(root / "train", (LONG_AGO, LONG_AGO))
    with served(config):
        assert sorted(os.listdir(root / "train" / "a")) == ["1.txt", "2.bin", "new.txt"]
        assert sorted(os.listdir(root / "train")) == ["a", "b", "empty"]
        assert (root / "train" / "a" / "new.txt").read_text() == "new"


@pytest.mark.parametrize(
    ("links", "problem", "is_listed"),
    [(4, 0, True), (1, 0, False), (4, errno.EIO, True), (4, errno.EACCES, False)],
)
def test_a_folder_is_listed_from_the_cache_where_it_is_known_to_be_whole(
    tree: tuple[Path, Config], links: int, problem: int, is_listed: bool
) -> None:
    root, config = tree

    def stat(path: str) -> os.stat_result:
        if problem:
            raise OSError(problem, "as a file system says")
        facts = list(os.stat(path))
        facts[3] = links
        return os.stat_result(facts)

    version = Catalog(config.catalog).latest("tree")
    folder = PackedFolder(PackedRoot(str(root), "tree", version), config, stat)
    assert folder.listing("train") == ([("a", True), ("b", True)] if is_listed else None)


def test_a_file_that_is_changed_by_its_folders_descriptor_is_itself_again(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        folder = os.open(root / "train" / "a", os.O_RDONLY)
        os.unlink("1.txt", dir_fd=folder)
        os.rename("2.bin", "moved", src_dir_fd=folder, dst_dir_fd=folder)
        os.close(folder)
        assert os.listdir(root / "train" / "a") == ["moved"]
        for name in ("1.txt", "2.bin"):
            with pytest.raises(FileNotFoundError):
                (root / "train" / "a" / name).read_bytes()


def test_a_folder_of_which_files_were_left_out_is_listed_as_it_is(tmp_path: Path) -> None:
    root, config = packed_tree(tmp_path, FILES | {"train/a/.DS_Store": b"litter"})
    with served(config):
        assert sorted(os.listdir(root / "train" / "a")) == [".DS_Store", "1.txt", "2.bin"]
        assert (root / "train" / "a" / ".DS_Store").read_bytes() == b"litter"


def test_making_a_folder_that_is_there_changes_nothing(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        os.makedirs(root / "train" / "a", exist_ok=True)
        (root / "train" / "a" / "1.txt").read_bytes()
        assert deeplink.paths.stats().local_samples == 1


def test_a_change_counts_under_every_name_of_the_file(tree: tuple[Path, Config], tmp_path: Path) -> None:
    root, config = tree
    (tmp_path / "alias").symlink_to(root)
    with served(config):
        (tmp_path / "alias" / "top.txt").write_bytes(b"changed")
        assert (root / "top.txt").read_bytes() == b"changed"


def test_a_removed_tree_is_removed(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        shutil.rmtree(root / "train" / "a")
        assert not (root / "train" / "a" / "1.txt").exists()
        shutil.rmtree(root)
        assert not root.exists()
        with pytest.raises(FileNotFoundError):
            os.listdir(root / "train")


def test_long_samples_are_read_in_pieces(tmp_path: Path) -> None:
    data = np.random.default_rng(3).bytes((33 << 20) + 17)
    root, config = packed_tree(tmp_path, {"long.bin": data})
    with served(config), open(root / "long.bin", "rb") as file:
        file.seek((32 << 20) - 5)
        assert file.read(10) == data[(32 << 20) - 5 :][:10]
        assert file.seek(-17, os.SEEK_END) == len(data) - 17
        assert (file.read(), file.read()) == (data[-17:], b"")
        file.seek(0)
        assert file.read() == data
        with pytest.raises(OSError, match="Invalid argument"):
            file.seek(-1)
        assert by_descriptor(str(root / "long.bin")) == data[: 1 << 20]
        assert mapped(str(root / "long.bin")) == np.fromfile(root / "long.bin", np.uint8).tobytes() == data


def test_a_long_sample_that_the_cache_cannot_give_is_read_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, config = packed_tree(tmp_path, {"long.bin": bytes(33 << 20)})
    shutil.rmtree(config.store)
    (root / "long.bin").write_bytes(b"x" * (33 << 20))
    with served(config), open(root / "long.bin", "rb") as file:
        file.seek(5)
        assert file.read() == b"x" * ((33 << 20) - 5)
    assert caplog.text.count("is read itself") == 1


def test_a_served_file_is_not_written_to(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        for mode, buffering in (("rb", 0), ("rb", -1), ("r", -1)):
            with open(root / "top.txt", mode, buffering) as file:
                assert not file.writable()
                with pytest.raises(io.UnsupportedOperation):
                    file.write(b"x" if "b" in mode else "x")
                with pytest.raises(io.UnsupportedOperation):
                    file.truncate(1)
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.write(file.fileno(), b"x")
    assert (root / "top.txt").read_bytes() == b"top"


def test_descriptors_are_given_back(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        (root / "top.txt").read_bytes()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            file = open(root / "top.txt", "rb")  # noqa: SIM115 - forgotten on purpose
            assert os.fstat(file.fileno()).st_size == 3
            del file
        assert len(os.listdir("/proc/self/fd")) <= before
