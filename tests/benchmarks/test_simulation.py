"""The rows of a replayed trace: those of the issue, with their goals."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scheduler.simulation import great_row, rows_of, studied
from benchmarks.simulate.policies import SchedulingPolicy
from benchmarks.simulate.site import SimulatedTree


def test_a_small_trace_has_a_row_for_each_policy_and_size(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    lines = [f"{60 * row},{3600 + row},{[1, 2, 8, 16][row % 4]}" for row in range(120)]
    trace.write_text("\n".join(["submit,duration,gpus", *lines]), encoding="utf-8")
    study, took = studied(trace, 2, 80)
    rows = {row.row: row for row in rows_of(study, took)}
    for policy in SchedulingPolicy:
        assert rows[f"80 jobs replayed: {policy}"].goal == 120
    for size in ("1 GPU", "2-7 GPUs", "8 GPUs", "9-64 GPUs"):
        name = f"queueing delay, mean, deeplink minus slurm-tree, {size}"
        assert rows[f"{name}: least by the interval"].goal == 0
        assert rows[f"{name}: least by the interval"].value <= rows[name].value
    name = "predicted step, deeplink minus slurm-tree, jobs over one node"
    assert rows[f"{name}: most by the interval"].value >= rows[name].value
    great = great_row(trace, SimulatedTree(nodes=32, gpus=4), 40)
    assert (great.row, great.goal) == ("40 jobs replayed on 32 nodes: deeplink", 120)
