"""What the documents name exists: files, targets of make, verbs of the command."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from deeplink.cli import VERBS, cli
from deeplink.scheduler.recovery.records import IncidentKind
from tests.scheduler.recovery.test_judge import TABLE

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "ansible").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
MAKE = re.compile(r"(?:^|[`$;&|(]|\$ )\s*make ([a-z][a-z-]*)", re.MULTILINE)
VERB = re.compile(r"(?:^|[`;&|(]|\$ |-N\d+ |-- )\s*deeplink ([a-z][a-z-]*)", re.MULTILINE)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def command_of(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """Return the command that `words`, behind `deeplink`, begin with, and the words behind its name."""
    if not words or words[0] not in VERBS:
        return None, []
    command = cli.get_command(click.Context(cli), words[0])
    if isinstance(command, click.Group) and words[1:] and words[1] in command.commands:
        return command.commands[words[1]], words[2:]
    assert isinstance(command, click.Command)
    return command, words[1:]


def options_of(command: click.Command) -> dict[str, bool]:
    """Return the long options of a command, and whether a value follows."""
    found = {"--help": False}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = [*parameter.opts, *parameter.secondary_opts]
            found |= dict.fromkeys(names, not (parameter.is_flag or parameter.count))
    # `sbatch` takes sbatch's options too, so click does not know ours: they are in its help.
    return found | dict.fromkeys(re.findall(r"--deeplink-[a-z-]+", command.epilog or ""), False)


OF_ANOTHER = {"sbatch", "srun", "shim"}
"""Verbs that take every option of the program that they stand for."""


def unknown_of_one(words: list[str]) -> list[str]:
    """Return the options among `words`, behind `deeplink`, that the command has not."""
    command, rest = command_of(words)
    if command is None:
        return []
    options, unknown = options_of(command), []
    left = iter(rest)
    for word in left:
        if word in {"--", "|", ";", "&&", "||"}:
            break
        if word.startswith("--"):
            option, value, _ = word.partition("=")
            if options.get(option) and not value:
                next(left, None)
            if option not in options and (command.name not in OF_ANOTHER or option.startswith("--deeplink-")):
                unknown.append(f"{command.name} {option}")
        elif not command.context_settings.get("allow_interspersed_args", True):
            break  # the rest is another program's
    return unknown


def unknown_options(code: str) -> list[str]:
    """Return `verb --option` of each option in `code` that its verb has not."""
    unknown = []
    for line in code.replace("\\\n", " ").splitlines():
        for part in re.split(r"(?<![\w/.-])deeplink(?=\s)", line.partition(" #")[0])[1:]:
            unknown += unknown_of_one([word for word in re.split(r"[\s'\"`()\[\]]+", part) if word])
    return unknown


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

    def test_every_option_of_a_verb_exists(self, document: Path) -> None:
        code = "\n".join(CODE.findall(document.read_text()))
        assert not unknown_options(code)

    def test_it_leaves_nothing_open(self, document: Path) -> None:
        assert not re.search(r"\b(TODO|FIXME|TBD|XXX)\b", document.read_text())


def test_the_patterns_find_what_they_look_for() -> None:
    text = "`make demo`\n```\n$ make test\ndeeplink pack A b\nsalloc -N4 deeplink run -- x\n```"
    code = "\n".join(CODE.findall(text))
    assert MAKE.findall(code) == ["demo", "test"]
    assert VERB.findall(code) == ["pack", "run"]


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("deeplink sandbox up --name x --nodes 4 --frob", ["up --frob"]),
        ("deeplink sandbox exec --name x ctl squeue --states=all", []),
        ("deeplink sandbox exec --nme x ctl squeue", ["exec --nme"]),
        ("deeplink sandbox exec ctl salloc --exclusive deeplink pack a b --jsn", ["pack --jsn"]),
        ("deeplink run [--spare N] -- python train.py --epochs 3", ["run --spare"]),
        ("deeplink sbatch --requeue --deeplink-spares 1 --wrap \\\n 'deeplink run --foo -- x --y'", ["run --foo"]),
        ("deeplink sbatch --deeplink-spare 1 x.sh", ["sbatch --deeplink-spare"]),
        ("deeplink watch --act   # not --this", []),
        ("deeplink console --json | jq --tab .", []),
    ],
)
def test_an_option_that_a_verb_has_not_is_found(line: str, unknown: list[str]) -> None:
    assert unknown_options(line) == unknown


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


def test_every_kind_of_incident_has_a_line_in_the_runbook_and_every_verdict_one_in_its_table() -> None:
    incidents = (ROOT / "docs/incidents.md").read_text(encoding="utf-8")
    runbook = incidents.partition("## Kinds")[2].partition("## The course")[0]
    listed = re.findall(r"^\| `([a-z-]+)` \|", runbook, re.MULTILINE)
    assert sorted(listed) == sorted(IncidentKind)
    verdicts = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")
    assert [kind for _, kind, _ in TABLE if f"`{kind}`" not in verdicts] == []
