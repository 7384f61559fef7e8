"""Agents of a job whose batch host died: when they have Slurm start it again, and when they keep still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deeplink.agent.batch_host import JOURNAL, SILENT_S, BatchHostWatch
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from tests.scheduler.slurm.answers import answer

ATTEMPT = Attempt(7, 1, 2)


@dataclass
class Controller:
    """What Slurm says of job 7, and what it was told."""

    state: str = "RUNNING"
    restarts: int = 1
    requeue: int = 1
    batch_host: str = "n/a"
    answers: bool = True
    told: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if not self.answers:
            raise CommandError(argv, 1, "Unable to contact slurm controller")
        if argv[0] == "squeue":
            words = [7, 7, self.state, "None", self.restarts, self.requeue, "ada", "n[1-2]", self.batch_host, "x"]
            return answer(argv, *words)
        self.told.append(" ".join(argv))
        return ""


def watch(folder: Path, slurm: Controller, silent_s: float = SILENT_S, attempt: Attempt | None = ATTEMPT) -> bool:
    found = BatchHostWatch.of_job(
        {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[0-2]"},
        lambda: silent_s,
        lambda job: attempt if job == 7 else None,
        slurm=Slurm(slurm),
        clock=ManualClock(),
        state=folder,
    )
    assert found is not None
    (folder / "jobs" / "7").mkdir(parents=True, exist_ok=True)
    return found.look()


@pytest.mark.parametrize("host", ["n/a", "n0"])
def test_a_job_without_its_batch_host_is_started_again_and_that_is_an_incident(host: str, tmp_path: Path) -> None:
    slurm = Controller(batch_host=host)
    assert watch(tmp_path, slurm)
    assert slurm.told == ["scontrol requeue 7"]
    with Journal(tmp_path / "jobs" / "7" / JOURNAL, read_only=True) as journal:
        (incident,) = journal.incidents()
    assert (incident.kind, incident.action, incident.attempt) == ("launcher-lost", "requeue", ATTEMPT)


@pytest.mark.parametrize(
    "slurm",
    [
        Controller(batch_host="n1"),
        Controller(batch_host="login"),
        Controller(state="COMPLETING"),
        Controller(requeue=0),
        Controller(answers=False),
    ],
)
def test_it_is_left_alone_and_looked_at_again(slurm: Controller, tmp_path: Path) -> None:
    assert not watch(tmp_path, slurm)
    assert not slurm.told


def test_one_whose_launcher_asks_or_never_did_is_left_alone(tmp_path: Path) -> None:
    slurm = Controller()
    assert not watch(tmp_path, slurm, silent_s=SILENT_S - 0.1)
    assert not watch(tmp_path, slurm, attempt=None)
    assert not slurm.told


def test_one_that_somebody_else_had_started_again_is_no_longer_looked_at(tmp_path: Path) -> None:
    slurm = Controller(restarts=2)
    assert watch(tmp_path, slurm)
    assert not slurm.told


def test_outside_of_a_job_there_is_nothing_to_watch(tmp_path: Path) -> None:
    nothing = BatchHostWatch.of_job(
        {}, lambda: 0.0, lambda _job: None, slurm=Slurm(Controller()), clock=ManualClock(), state=tmp_path
    )
    assert nothing is None
