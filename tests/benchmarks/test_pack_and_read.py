from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.cache.pack_and_read import run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_small_run_has_every_row_and_leaves_the_goals_as_agreed(tmp_path: Path) -> None:
    rows = run(tmp_path, files=300, repeats=2)
    goals = {row.row: row.goal for row in rows if row.goal is not None}
    assert sorted(goals.values()) == [0.7, 0.7, 0.8, 1.03, 4, 10]
    assert all(row.value > 0 and row.spread[0] <= row.value <= row.spread[1] for row in rows)
    assert {row.runs for row in rows} == {1, 2}
