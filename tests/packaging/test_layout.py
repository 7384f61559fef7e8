"""Folders, the list of packages and the two links stay in step (docs/decisions/0001-packages-by-links.md)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {"deeplink.cache": "cache", "deeplink.scheduler": "scheduler"}


def settings() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project


def packages_on_disk() -> set[str]:
    found: set[str] = set()
    for package, folder in {"deeplink": "deeplink", **MAPPED}.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    return found


def test_every_package_on_disk_is_in_the_wheel() -> None:
    setuptools = settings()["tool"]["setuptools"]
    assert set(setuptools["packages"]) == packages_on_disk()
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert setuptools["package-dir"] == MAPPED


def test_every_folder_of_modules_is_a_package() -> None:
    bare = {
        path.parent.relative_to(ROOT)
        for folder in ("deeplink", "cache", "scheduler")
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare


@pytest.mark.parametrize("folder", MAPPED.values())
def test_the_import_tree_links_to_the_folder(folder: str) -> None:
    link = ROOT / "deeplink" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_constraints_are_exact_and_cover_what_is_asked_for() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact, line
            assert "+" not in version, f"{line}: a local version is on no index"
            pins[name.lower().replace("_", "-")] = version
    project, groups = settings()["project"], settings()["dependency-groups"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["console"], *extras["demo"][1:]]
    asked += [entry for group in groups.values() for entry in group if isinstance(entry, str)]
    for requirement in asked:
        name, _, version = requirement.replace(">=", "==").partition("==")
        assert name.lower().replace("_", "-") in pins, f"{requirement}: not in constraints.txt"
        if "==" in requirement:
            assert pins[name.lower()] == version, f"{requirement}: constraints.txt says {pins[name.lower()]}"


def test_the_version_is_said_once_more_and_the_same() -> None:
    import deeplink

    assert settings()["project"]["version"] == deeplink.__version__
