"""A storm goes on after what a storm brings: a job that Slurm refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from benchmarks.watchdog.stand import Stand, StandError
from benchmarks.watchdog.storm import Storm
from deeplink.data.digest import DeliveryDigest


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
