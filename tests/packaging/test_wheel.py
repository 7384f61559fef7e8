"""What `python -m build` makes is whole, and stands beside a user's own modules of the same names."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
pytestmark = [pytest.mark.slow]


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, argv)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: building writes into them."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("build") / "tree", symlinks=True, ignore=LEFT_OUT))


@pytest.fixture(scope="module")
def dist(tree: Path) -> Path:
    """A folder with sdist and wheel, the wheel built from the sdist, as `python -m build` does."""
    # The tree's own setuptools instead of a download of one: what is built is the same.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree.parent / "dist", cwd=tree)
    return tree.parent / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder.parent,
    )
    # Only the path: .pth files below it, such as that of our own editable install, are not obeyed.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_every_module_and_data_file_is_in_the_wheel(tree: Path, wheel: Path) -> None:
    sources = {
        f"deeplink/{folder}{path.relative_to(tree / 'deeplink' / folder)}"
        for folder in ("", "cache/", "scheduler/")
        for path in (tree / "deeplink" / folder).rglob("*")
        if path.is_file()
    }
    assert len(sources) > 50
    assert sources <= set(zipfile.ZipFile(wheel).namelist())
    assert {"deeplink/py.typed", "deeplink/cache/py.typed", "deeplink/scheduler/py.typed"} <= sources


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"deeplink", next(top for top in tops if top.endswith(".dist-info"))}


def test_the_sdist_holds_the_sources_of_all_three(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "deeplink/cli/__init__.py"} <= names
    assert {"cache/__init__.py", "scheduler/slurm/command.py"} <= names


def test_the_metadata_leaves_torch_to_the_user(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    requires = metadata.get_all("Requires-Dist") or []
    torch = [line for line in requires if line.startswith("torch")]
    assert torch, requires
    assert all("extra == " in line for line in torch), "torch is no core dependency"
    assert not any(mark in line.split(";")[0] for line in requires for mark in ("<", "==", "~=")), requires
    assert metadata["License-Expression"] == "Apache-2.0"


def test_it_imports_beside_a_users_own_cache_and_scheduler(clean_python: Path, tmp_path: Path) -> None:
    (tmp_path / "cache.py").write_text("WHOSE = 'the user'\n")
    (tmp_path / "scheduler.py").write_text("WHOSE = 'the user'\n")
    (tmp_path / "train.py").write_text(
        "import cache, scheduler, deeplink.cache, deeplink.scheduler\n"
        "from deeplink.scheduler.slurm import command\n"
        "assert cache.WHOSE == scheduler.WHOSE == 'the user'\n"
        "assert deeplink.cache is not cache and deeplink.scheduler is not scheduler\n"
        "print(deeplink.cache.__file__, deeplink.scheduler.__file__, deeplink.__file__, sep='\\n')\n"
    )
    for path in run(clean_python, "train.py", cwd=tmp_path).split():
        assert Path(path).is_relative_to(clean_python.parents[1])


def test_every_module_imports_from_the_wheel(clean_python: Path, tmp_path: Path) -> None:
    walk = (
        "import importlib, pkgutil, deeplink\n"
        "for found in pkgutil.walk_packages(deeplink.__path__, 'deeplink.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
    )
    run(clean_python, "-c", walk, cwd=tmp_path)


def test_the_command_answers(clean_python: Path, tmp_path: Path) -> None:
    said = run(clean_python.parent / "deeplink", "--help", cwd=tmp_path)
    assert "DeepLink makes a Slurm cluster good at deep learning" in said
    assert "sbatch" in said
    assert run(clean_python, "-m", "deeplink", "--version", cwd=tmp_path).startswith("deeplink, version ")
