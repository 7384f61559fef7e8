from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.rows import code, make_row, table, write_rows

if TYPE_CHECKING:
    from pathlib import Path


def test_a_row_is_the_median_with_its_spread_held_against_its_goal() -> None:
    row = make_row("reads: raw files", [5.0, 3.0, 4.5], at_least=4)
    assert (row.value, row.spread, row.runs, row.goal, row.reached) == (4.5, (3.0, 5.0), 3, 4, True)
    assert not make_row("reads: raw files", [5.0, 3.0, 3.9], at_least=4).reached
    assert "cores" in row.machine
    assert row.machine.endswith(f"DeepLink at {code()}")
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", code())


def test_less_may_be_better_and_a_goal_may_be_missing() -> None:
    assert make_row("space", [1.02], at_most=1.03).reached
    assert make_row("space", [1.04], at_most=1.03).reached is False
    assert make_row("rate", [7.0], "1/s").reached is None


def test_a_row_without_runs_or_with_two_goals_is_refused() -> None:
    with pytest.raises(ValueError, match="no runs"):
        make_row("space", [])
    with pytest.raises(ValueError, match="two goals"):
        make_row("space", [1.0], at_least=1, at_most=2)


def test_the_file_holds_the_agreed_fields_and_replaces_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "bench"
    write_rows("pack", [make_row("space", [2.0], at_most=1.03)], folder=folder)
    path = write_rows("pack", [make_row("space", [1.02], at_most=1.03)], folder=folder)
    assert [entry.name for entry in folder.iterdir()] == ["pack.json"]
    (row,) = json.loads(path.read_text())
    assert set(row) == {"row", "value", "unit", "goal", "reached", "spread", "runs", "machine"}
    assert (row["value"], row["goal"], row["reached"], row["spread"]) == (1.02, 1.03, True, [1.02, 1.02])


def test_the_table_says_reached_and_short() -> None:
    rows = [make_row("a", [2.0], at_least=1), make_row("b", [0.5], at_least=1), make_row("c", [3.0], "us")]
    head, *lines = table(rows).splitlines()
    assert head.split() == ["row", "value", "spread", "runs", "goal"]
    assert [line.split()[-1] for line in lines[:2]] == ["reached", "short"]
    assert lines[2].split()[:3] == ["c", "3", "us"]
