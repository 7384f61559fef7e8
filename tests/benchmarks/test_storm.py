"""A storm goes on after what a storm brings: a job that Slurm refuses, an attempt that ends before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.watchdog.facts import Line
from benchmarks.watchdog.stand import Stand, StandError
from benchmarks.watchdog.storm import Storm, fences
from deeplink.data.digest import DeliveryDigest
from deeplink.types import Attempt


def line(relaunch: int, what: str, unix: float, rank: int = 0) -> Line:
    return Line(attempt=Attempt(1, 0, relaunch), rank=rank, what=what, unix=unix, step=0, node="n0")


def test_who_ended_before_it_resumed_fences_nobody() -> None:
    lines = [
        *(line(0, "resumed", 1.0), line(0, "step", 2.0)),
        line(1, "process", 3.0),
        *(line(2, "process", 4.0), line(2, "imported", 5.0)),
        *(line(3, "resumed", 7.0), line(3, "resumed", 7.5, rank=1), line(3, "step", 8.0)),
        line(4, "process", 9.0),
    ]
    assert fences(lines) == [(Attempt(1, 0, number), 7.5) for number in range(3)]
    assert fences([line(0, "process", 1.0), line(1, "process", 2.0)]) == []
    assert fences([]) == []


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
    storm = Storm(cast("Stand", Refused(tmp_path)), 1, said.append, DeliveryDigest(), ends=0.0)
    storm.follow(more=True)
    storm.follow(more=True)
    assert len(storm.remarks) == 6
    assert not storm.runs
