"""Who serves paths: threads, forks, spawned workers and programs; and what happens where the cache cannot."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import deeplink.paths
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import DatasetMissingError
from deeplink.cache.packer import pack
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.paths.packed_folder import packed_roots
from deeplink.paths.routing import ROOTS_VARIABLE, STARTUP, PackedRoot, environment, roots_in
from tests.deeplink.paths.test_packed_folder import FILES, packed_tree, served
from tests.pickled import copied
from tests.waiting import LIMIT_S, until

READ = "import sys; sys.stdout.write(open(sys.argv[1]).read())"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Config]]:
    """A packed folder whose files are lost: only the cache can tell what they held."""
    root, config = packed_tree(tmp_path, FILES)
    for path in FILES:
        (root / path).unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DEEPLINK_CATALOG", str(config.catalog))
    monkeypatch.setenv("DEEPLINK_STORE", str(config.store))
    yield root, config
    deeplink.paths.uninstall()


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def read_all(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in FILES}


def test_threads_read_at_once(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config), ThreadPoolExecutor(8) as pool:
        assert all(found == FILES for found in pool.map(lambda _: read_all(root), range(40)))
        assert deeplink.paths.stats().local_samples == 40 * len(FILES)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_read_however_they_are_started(tree: tuple[Path, Config], method: str) -> None:
    root, config = tree
    with served(config):
        assert (root / "top.txt").read_bytes() == b"top"
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(os.path.getsize, [str(root / path) for path in FILES]) == [*map(len, FILES.values())]


def test_programs_of_python_read_too(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        done = python("-c", READ, str(root / "top.txt"))
    assert (done.stdout, done.stderr) == ("top", "")
    assert python("-c", READ, str(root / "top.txt")).returncode == 1


def test_the_sites_own_start_is_run_as_well(tree: tuple[Path, Config], tmp_path: Path) -> None:
    root, config = tree
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.of_site = 'the site'")
    code = (
        "import sitecustomize, sys; sys.stdout.write(of_site + sitecustomize.__file__ + open(sys.argv[1]).read())"
    )
    roots = environment([PackedRoot(str(root), "tree", packed_roots(config=config)[0].version)], {})
    env = {**roots, "PYTHONPATH": f"{STARTUP}:{tmp_path / 'site'}"}
    done = python("-c", code, str(root / "top.txt"), **env)
    assert done.stdout == f"the site{tmp_path}/site/sitecustomize.pytop", done.stderr


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/", "does not serve paths, it reads the files themselves: No module named 'deeplink'"),
        (str(Path(__file__).parents[3]), "no more paths are served, files are read themselves: No module named"),
    ],
    ids=["nothing of it", "not what it needs"],
)
def test_a_python_without_us_says_so_and_reads_the_files(tmp_path: Path, folder: str, said: str) -> None:
    (tmp_path / "file").write_text("text")
    env = {**os.environ, ROOTS_VARIABLE: f"tree@0123={tmp_path}", "PYTHONPATH": STARTUP}
    argv = [sys.executable, "-S", "-c", f"import sitecustomize\n{READ}", str(tmp_path / "file")]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "text"
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_our_own_commands_see_the_files(tree: tuple[Path, Config]) -> None:
    root, config = tree
    with served(config):
        done = python("-m", "deeplink", "pack", str(root), "again")
    assert done.returncode == 2, done.stdout
    assert "it holds no files" in done.stderr


def test_a_process_that_serves_nothing_yet_has_imported_nothing(tree: tuple[Path, Config]) -> None:
    _, config = tree
    with served(config):
        done = python(
            "-c", "import sys; sys.stdout.write(str({'numpy', 'logging', 'click', 'grpc'} & {*sys.modules}))"
        )
    assert done.stdout == "set()", done.stderr


def test_what_the_node_lacks_comes_from_the_source_and_stays(tmp_path: Path) -> None:
    root, config = packed_tree(tmp_path, FILES)
    shutil.rmtree(config.store)
    with served(config):
        assert read_all(root) == FILES
        stats = deeplink.paths.stats()
        assert (stats.failures, stats.local_samples + stats.source_samples) == (0, len(FILES))
        assert stats.source_samples > 0
        # In the background, by threads of ours, which look at the files themselves.
        until(lambda: any(config.store.glob("*.mdb")))
        with served(config):  # as a process that comes later
            assert read_all(root) == FILES
            assert deeplink.paths.stats().local_samples == len(FILES)


def test_a_file_that_the_cache_cannot_give_is_read_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, config = packed_tree(tmp_path, FILES)
    shutil.rmtree(config.store)
    for name in ("top.txt", "train/a/1.txt"):
        (root / name).write_bytes(b"other than what was packed")
    with served(config), caplog.at_level(logging.WARNING, "deeplink.paths"):
        for name in ("top.txt", "train/a/1.txt", "top.txt"):
            assert (root / name).read_bytes() == b"other than what was packed"
        assert deeplink.paths.stats().source_samples == 3
    assert len([record for record in caplog.records if record.name.startswith("deeplink.paths")]) == 1
    assert "read from the files themselves" in caplog.text


def test_without_its_index_a_folder_is_read_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, config = packed_tree(tmp_path, FILES)
    with served(config), caplog.at_level(logging.WARNING, "deeplink.paths"):
        shutil.rmtree(config.catalog)
        assert read_all(root) == FILES
        assert sorted(os.listdir(root)) == ["top.txt", "train"]
        assert os.path.getsize(root / "top.txt") == 3
    assert len([record for record in caplog.records if record.name.startswith("deeplink.paths")]) == 1


def test_libraries_that_open_by_path(tmp_path: Path) -> None:
    files = tmp_path / "made"
    files.mkdir()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(files / "a.png")
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(files / "a.bmp")
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(files / "a.tiff", compression="tiff_lzw")
    np.save(files / "a.npy", np.arange(6))
    np.savez(files / "a.npz", x=np.arange(7))
    with zipfile.ZipFile(files / "a.zip", "w") as archive:
        archive.writestr("inner", b"inner")
    with tarfile.open(files / "a.tar", "w") as members:
        members.add(files / "a.npy", "a.npy")
    root, config = packed_tree(tmp_path, {path.name: path.read_bytes() for path in files.iterdir()})
    for path in root.iterdir():
        path.unlink()
    with served(config):
        for kind in ("png", "bmp", "tiff"):
            with Image.open(root / f"a.{kind}") as ours, Image.open(files / f"a.{kind}") as real:
                assert np.array_equal(np.asarray(ours), np.asarray(real))
        assert np.load(root / "a.npy").tolist() == [*range(6)]
        assert np.load(root / "a.npy", mmap_mode="r").tolist() == [*range(6)]
        with np.load(root / "a.npz") as arrays:
            assert arrays["x"].tolist() == [*range(7)]
        assert zipfile.ZipFile(root / "a.zip").read("inner") == b"inner"
        with tarfile.open(root / "a.tar") as members:
            assert members.getnames() == ["a.npy"]
        shutil.copyfile(root / "a.npy", tmp_path / "copy.npy")
    assert (tmp_path / "copy.npy").read_bytes() == (files / "a.npy").read_bytes()


def test_python_takes_ours_for_its_own(tree: tuple[Path, Config]) -> None:
    _, config = tree
    real = {name: getattr(os, name) for name in ("stat", "lstat", "scandir", "listdir", "open", "unlink")}
    opened = open
    with served(config):
        assert open is not opened
        assert [*inspect.signature(open).parameters] == [*inspect.signature(opened).parameters]
        for name, function in real.items():
            ours = getattr(os, name)
            assert ours is not function
            assert copied(ours) is ours
            assert (ours in os.supports_dir_fd, ours in os.supports_fd) == (
                function in os.supports_dir_fd,
                function in os.supports_fd,
            )
        assert copied(open) is open
    assert open is opened
    assert {name: getattr(os, name) for name in real} == real
    assert ROOTS_VARIABLE not in os.environ


def test_of_two_folders_the_inner_one_is_asked_first(tmp_path: Path) -> None:
    root, config = packed_tree(tmp_path, FILES)
    pack(str(root / "train"), "inner", config=config)
    for path in FILES:
        (root / path).unlink()
    with served(config):
        assert read_all(root) == FILES
        assert deeplink.paths.stats().local_samples == len(FILES)
    with served(config, "inner"):
        assert (root / "train/a/1.txt").exists()
        assert not (root / "top.txt").exists()


def test_which_folders_are_served(tmp_path: Path) -> None:
    root, config = packed_tree(tmp_path, FILES)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "x").write_bytes(b"x")
    pack(f"file://{tmp_path}/far", "far", config=config)
    (found,) = packed_roots(["tree"], config)
    assert (found.folder, found.name) == (str(root), "tree")
    assert packed_roots([f"tree@{found.version[:6]}"], config) == [found]
    assert [one.name for one in packed_roots(config=config)] == ["far", "tree"]
    with pytest.raises(DatasetMissingError):
        packed_roots(["none"], config)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("inner", b"inner")
    pack(f"zip://::{tmp_path}/a.zip", "zipped", config=config)
    assert [one.name for one in packed_roots(config=config)] == ["far", "tree"]
    with pytest.raises(DeepLinkError, match="no path leads there"):
        packed_roots(["zipped"], config)
    (config.catalog / "far" / "latest").write_text("damaged")
    assert [one.name for one in packed_roots(config=config)] == ["tree"]


def test_no_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DeepLinkError, match="was packed from a folder") as problem:
        deeplink.paths.install(config=Config(catalog=tmp_path))
    assert "deeplink pack FOLDER NAME" in problem.value.remedy


def test_too_many_folders_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = packed_tree(tmp_path, FILES)
    monkeypatch.setattr(Catalog, "names", lambda _: ["tree"] * 3000)
    with pytest.raises(DeepLinkError, match="too many for one variable"):
        packed_roots(config=config)


def test_the_environment_tells_children_the_same() -> None:
    roots = [PackedRoot("/data/a b=c@d", "a", "01"), PackedRoot("/data/é", "b", "02")]
    env = environment(roots, {"PYTHONPATH": f"/mine::{STARTUP}"})
    assert env["PYTHONPATH"] == f"{STARTUP}:/mine"
    assert roots_in(env) == roots
    assert roots_in({ROOTS_VARIABLE: "nothing\n@=\na@b=relative"}) == roots_in({}) == []


@pytest.mark.slow
def test_a_rank_and_what_it_starts_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = packed_tree(tmp_path, FILES)
    for name in ("catalog", "store", "state"):
        monkeypatch.setenv(f"DEEPLINK_{name.upper()}", str(tmp_path / name))
    inner = f"import os; {READ}; sys.stdout.write(oct(os.stat(sys.argv[1]).st_mode))"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}, sys.argv[1]], check=True)"
    words = ["--", sys.executable, "-c", script, str(root / "top.txt")]
    run = ["-m", "deeplink", "run", "--local", "1", "--nproc-per-node", "1"]
    done = python(*run, "--paths", *words)
    assert "top0o100444" in done.stdout, done.stderr
    done = python(*run, *words)
    assert "top0o100644" in done.stdout, done.stderr
