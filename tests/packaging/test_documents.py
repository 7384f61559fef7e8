"""What the documents name exists: files, targets of make, verbs of the command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deeplink.cli import VERBS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "ansible").rglob("*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
MAKE = re.compile(r"(?:^|[`$;&|(]|\$ )\s*make ([a-z][a-z-]*)", re.MULTILINE)
VERB = re.compile(r"(?:^|[`;&|(]|\$ |-N\d+ |-- )\s*deeplink ([a-z][a-z-]*)", re.MULTILINE)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchor(heading: str) -> str:
    """Return the anchor that a heading gets on the usual hosts."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
class TestDocument:
    def test_every_relative_link_leads_somewhere(self, document: Path) -> None:
        prose = CODE.sub("", document.read_text())
        for target in LINK.findall(prose):
            if "://" in target or target.startswith("mailto:"):
                continue
            path, _, part = target.partition("#")
            found = document.parent / path if path else document
            assert found.exists(), f"{document.name} links {target}"
            if part:
                headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
                assert part in map(anchor, headings), f"{document.name} links {target}: no such heading"

    def test_every_make_target_and_verb_exists(self, document: Path) -> None:
        code = "\n".join(CODE.findall(document.read_text()))
        assert set(MAKE.findall(code)) <= targets()
        assert set(VERB.findall(code)) <= set(VERBS)

    def test_it_leaves_nothing_open(self, document: Path) -> None:
        assert not re.search(r"\b(TODO|FIXME|TBD|XXX)\b", document.read_text())


def test_the_patterns_find_what_they_look_for() -> None:
    text = "`make demo`\n```\n$ make test\ndeeplink pack A b\nsalloc -N4 deeplink run -- x\n```"
    code = "\n".join(CODE.findall(text))
    assert MAKE.findall(code) == ["demo", "test"]
    assert VERB.findall(code) == ["pack", "run"]


def test_every_document_is_linked_from_the_readme_or_from_one_that_is() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = {
            (document.parent / target.partition("#")[0]).resolve()
            for document in new
            for target in LINK.findall(document.read_text())
            if "://" not in target
        }
        new = {path for path in links if path.suffix == ".md" and path.exists()} - reached
    assert set((ROOT / "docs").rglob("*.md")) <= reached
