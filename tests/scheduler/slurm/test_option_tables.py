"""The table of options against what the parsers of real versions of sbatch and srun answered for each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.sbatch_options import SBATCH, SRUN, Grammar

TABLES = sorted((Path(__file__).parents[2] / "data" / "slurm" / "options").glob("*.txt"))
GRAMMARS = {"sbatch": SBATCH, "srun": SRUN}
ROW = re.compile(r"(?P<program>\w+) --(?P<name>[\w-]+) (?P<value>none|optional|required)(?P<letters>(?: -\w)*)")
SCRIPT = "job.sh"


def rows(table: Path) -> list[tuple[Grammar, str, bool, list[str]]]:
    found = [ROW.fullmatch(line) for line in table.read_text().splitlines() if not line.startswith("#")]
    return [
        (GRAMMARS[row["program"]], row["name"], row["value"] == "required", row["letters"].split())
        for row in found
        if row is not None and row["program"] in GRAMMARS
    ]


def test_three_versions_were_recorded() -> None:
    assert [table.stem for table in TABLES] == ["22.05.8", "24.11.5", "26.05.5"]
    assert all(len(rows(table)) > 200 for table in TABLES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_every_option_of_a_version_takes_the_value_that_it_takes_there(table: Path) -> None:
    wrong = []
    for grammar, name, valued, letters in rows(table):
        for word in (f"--{name}", *letters):
            line = grammar.parse([word, "2", SCRIPT])
            expected = (SCRIPT,) if valued else ("2", SCRIPT)
            if line.rest != expected or not all(option.known for option in line.options):
                wrong.append((word, line))
    assert not wrong


def test_no_option_is_in_the_table_that_no_version_has() -> None:
    for grammar in GRAMMARS.values():
        recorded = {name for table in TABLES for one, name, _, _ in rows(table) if one is grammar}
        assert not (grammar.valued | grammar.flags) - recorded
        assert not grammar.valued & grammar.flags
