"""A storm goes on after what a storm brings, and sees what became of the jobs beside its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.watchdog import gate
from benchmarks.watchdog.slots import SLOTS, Run
from benchmarks.watchdog.stand import Stand, StandError
from benchmarks.watchdog.storm import Storm
from deeplink.core.types import NodeName
from deeplink.data.digest import DeliveryDigest
from deeplink.scheduler.slurm.states import JobState
from tests.benchmarks.test_strikes import STRUCK


@dataclass
class Refused:
    """A stand whose Slurm takes no job."""

    folder: Path

    def another(self, name: str) -> Refused:
        (self.folder / name).mkdir()
        return Refused(self.folder / name)

    def train(self, *_more: str) -> str:
        return "true"

    def submit(self, _options: str, _command: str, *, watched: bool) -> None:
        assert watched
        raise StandError("sbatch: refused")


def test_a_job_that_is_refused_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    storm = Storm(cast("Stand", Refused(tmp_path)), said.append, DeliveryDigest(), ends=0.0)
    storm.follow(more=True)
    storm.follow(more=True)
    assert len(storm.remarks) == 6
    assert not storm.runs


@pytest.mark.parametrize(
    ("state", "restarts", "well"),
    [(JobState.RUNNING, 0, True), (JobState.RUNNING, 1, False), (JobState.PENDING, 0, False)],
)
def test_the_task_beside_is_to_run_on_untouched(state: JobState, restarts: int, well: bool) -> None:
    cancelled: list[str] = []
    rows = {"7_0": SimpleNamespace(state=state, reason="", restarts=restarts)}
    slurm = SimpleNamespace(job=lambda one: rows[str(one)], cancel=lambda one: cancelled.append(str(one)))
    run = Run(SLOTS[2], cast("Stand", SimpleNamespace(job=7, slurm=slurm)), 0.0)
    run._end_neighbour()
    assert (not run.problems) == well
    assert cancelled == ["7_0"], "only that one"


def test_a_node_that_the_storm_had_drained_is_no_reason_to_wait_and_any_other_is() -> None:
    nodes: list[Any] = [
        SimpleNamespace(name=NodeName(name), drained=True, down=False, responding=True) for name in ("n3", "n4")
    ]
    assert gate.out_of_service(nodes, []) == nodes
    drain = replace(STRUCK, strike=replace(STRUCK.strike, fault="node-drained"), target="n3")
    assert gate.out_of_service(nodes, [drain]) == nodes[1:]
    nodes[0].down = True
    assert gate.out_of_service(nodes, [drain]) == nodes
