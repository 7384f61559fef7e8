"""The table of the cost model's errors, on step times made up by the model's own formulas (written by hand)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.scheduler import model_error

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = ("1", "2", "3", "4", "11", "12", "22", "13", "44", "111", "112", "1111", "1113", "2222", "234", "3333")
BATCHES = (4, 8, 16)


def made_up(shape: str, batch: int) -> float:
    """Computing, and 2(p-1)/p of a second's bytes over one path, or over two from three nodes on."""
    ranks, nodes = sum(map(int, shape)), len(shape)
    path = 0.02 if nodes == 1 else 0.5 if nodes == 2 else 0.3
    return 0.2 + 0.02 * batch + 2 * (ranks - 1) / ranks * path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dice = np.random.default_rng(0)
    at = tmp_path / "traces" / "made-up"
    at.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    for shape in SHAPES:
        lines += [f"{shape},{batch},{made_up(shape, batch) * np.exp(dice.normal(0, 0.01))},0" for batch in BATCHES]
    (at / "placements.csv").write_text("\n".join(lines) + "\n")
    (at / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n" + f"6,14,8,{made_up('332222', 8)},0\n"
    )
    return at.parent


def test_files_become_placements(folder: Path) -> None:
    work = model_error.read_workload(folder / "made-up")
    assert len(work.placements) == len(SHAPES) * len(BATCHES)
    assert work.larger is not None
    assert (work.larger.asked.nodes[0], work.larger.asked.ranks[0], work.larger.asked.busiest[0]) == (6, 14, 3)
    chosen_among = {frozenset(work.placements[place] for place in group) for group in work.groups()}
    assert frozenset({"4", "13", "22", "112", "1111"}) in chosen_among
    assert all(len({work.batches[place] for place in group}) == 1 for group in work.groups())


def test_regret_is_what_the_pick_costs_over_the_fastest() -> None:
    step_s, score = np.array([2.0, 1.0, 3.0, 3.0]), np.array([0.0, 1.0, 5.0, 4.0])
    assert model_error.regrets([[0, 1], [2, 3], [1, 2]], step_s, score) == [100, 0, 0]


def test_the_table_has_errors_and_regrets_beside_the_baselines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_error.main([str(folder), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "made-up: 9 free constants, 48 measurements" in printed
    found = {row["row"]: row for row in json.loads((tmp_path / "model_error.json").read_text())}
    assert found["made-up: error, leave one out"]["value"] < 5
    assert found["made-up: error, leave one out"]["runs"] == 48
    ours, packed = (
        found[f"all: regret, {way}, mean"]["value"] for way in ("shape alone, the choice left out", "always pack")
    )
    assert ours < packed
    assert "reached" in printed


def test_a_folder_without_measurements_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        model_error.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "no */placements.csv there" in capsys.readouterr().err


@pytest.mark.parametrize("row", ["x,4,0.5,0", "5,4,0.5,0", "1,4,0,0", "1,4"])
def test_rows_that_are_no_measurements_are_an_error(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "placements.csv").write_text(f"placement,local_bsz,step_time,sync_time\n{row}\n")
    with pytest.raises(SystemExit) as ended:
        model_error.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "job: not measurements" in capsys.readouterr().err
