"""A package's first lines name the modules that other packages import; the rest is its own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.house import ROOT, modules
from tests.near import imports, module_of

NAMES = {path: module_of(str(path.relative_to(ROOT))) for path in modules()}
PATHS = {name: path for path, name in NAMES.items()}


def package_of(name: str) -> str:
    return name if PATHS[name].name == "__init__.py" else name.rpartition(".")[0]


def imported_from_elsewhere() -> dict[str, set[str]]:
    """Return, for each package, its modules that modules of another package import."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, name in NAMES.items():
        for other in imports(path.read_text()) & PATHS.keys():
            if package_of(other) not in {package_of(name), other}:
                found[package_of(other)].add(other.rpartition(".")[2])
    return found


def face(package: str) -> set[str]:
    """Return the modules that a package names as its face."""
    doc = " ".join((ast.get_docstring(ast.parse(PATHS[package].read_text())) or "").split())
    told = re.search(r"Other packages import: ([^.]*)\.", doc)
    return set(re.findall(r"`(\w+)`", told[1])) if told else set()


PACKAGES = sorted(name for name, path in PATHS.items() if path.name == "__init__.py")
IMPORTED = imported_from_elsewhere()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_what_others_import(package: str) -> None:
    assert face(package) == IMPORTED[package]


def test_most_modules_are_their_packages_own() -> None:
    assert len(PACKAGES) > 25
    assert 0 < sum(map(len, IMPORTED.values())) < len(PATHS)
