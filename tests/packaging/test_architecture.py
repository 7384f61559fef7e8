"""docs/architecture.md speaks of what is there: its modules, its packages, its picture, its words."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CELL = re.compile(r"^\| (.*?) \|", re.MULTILINE)
PATH = re.compile(r"`([\w/.]+(?:\.py|/))`")


def part(title: str) -> str:
    """Return the text below a heading of the first rank."""
    return PAGE.partition(f"# {title}\n")[2].partition("\n# ")[0]


def paths(cell: str) -> list[Path]:
    """Return what a cell names; a name that follows another one may lie in the same folder, or in one above."""
    found: list[Path] = []
    for name in PATH.findall(cell):
        folders = [ROOT, *(found[-1].parents if found else ())]
        found.append(next((folder / name for folder in folders if (folder / name).exists()), ROOT / name))
    return found


def test_every_module_of_a_flow_exists() -> None:
    named = [path for cell in CELL.findall(part("Flows")) for path in paths(cell)]
    assert len(named) > 80
    assert [path for path in named if not path.exists()] == []


def test_every_package_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    packages = {
        path.parent.name
        for top in ("deeplink", "cache", "scheduler")
        for path in (ROOT / top).glob("*/__init__.py")
        if not path.parent.is_symlink()
    }
    assert packages - words == set()


def test_the_picture_is_drawn_from_the_text_beside_it() -> None:
    digest = hashlib.sha256((ROOT / "docs" / "architecture.dot").read_bytes()).hexdigest()
    assert digest in (ROOT / "docs" / "architecture.svg").read_text(), "make picture"


def test_a_word_has_one_meaning() -> None:
    words = [word for cell in CELL.findall(part("Words")) for word in cell.split(", ")][1:]
    assert len(words) > 60
    assert len(words) == len(set(words))
