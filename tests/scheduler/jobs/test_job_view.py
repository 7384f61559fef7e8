"""Looking at jobs by shared answers: few questions, old answers with their age, vanished jobs too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.scheduler.jobs.job_names import JobNameError
from deeplink.scheduler.jobs.job_view import _MORE, Viewer
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.cached import CachedRunner
from deeplink.scheduler.slurm.parse import JOB_FIELDS
from tests.scheduler.jobs.left import launched
from tests.scheduler.jobs.programs import TOPOLOGY, job, nodes


class Slurm:
    """Answers as Slurm's commands do, from values."""

    def __init__(self) -> None:
        self.jobs = [job(7), job(8, UserName="bob"), job(9, "PENDING", Reason="Resources")]
        self.asked: list[str] = []
        self.silent = False

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.asked.append(" ".join(argv[:3]) if argv[0] == "scontrol" else f"squeue {' '.join(argv[7:])}".strip())
        if self.silent:
            raise command.CommandError(argv, 1, "slurm_load_jobs error: Unable to contact slurm controller")
        if argv[0] == "squeue":
            separator = argv[6].partition(":")[2].partition(",")[0]
            user = argv[8] if len(argv) > 7 else ""
            rows = [one for one in self.jobs if not user or one["UserName"] == user]
            return "\n".join(
                "".join(f"{one[field]}{separator}" for field in (*JOB_FIELDS, *_MORE)) for one in rows
            )
        return nodes(["n0", "n1", "n2"]) if argv[2] == "node" else TOPOLOGY


@pytest.fixture
def clock() -> ManualClock:
    clock = ManualClock()
    clock.now = (clock.unix() // 60 + 1) * 60 - clock.epoch
    return clock


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


def viewer(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> Viewer:
    asked = CachedRunner(folder=tmp_path / "answers", run=slurm, clock=clock, env={}, stale_s=600.0)
    return Viewer(asked=asked, state=tmp_path, clock=clock, user="eve")


def test_the_table_is_of_jobs_that_left_something_and_counts_the_others(
    tmp_path: Path, slurm: Slurm, clock: ManualClock
) -> None:
    launched(tmp_path, 7, clock.unix())
    table = viewer(tmp_path, slurm, clock).table()
    assert [(one.id, one.phase) for one in table.pictures] == [(7, "running")]
    assert (table.hidden, table.problem, table.told_unix) == (1, "", clock.unix())
    everything = viewer(tmp_path, slurm, clock).table(everything=True)
    assert [one.id for one in everything.pictures] == [7, 8, 9]
    assert slurm.asked == ["squeue -u eve", "squeue"]


def test_one_job_is_one_question_of_each_kind(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> None:
    launched(tmp_path, 7, clock.unix())
    for _ in range(5):
        one = viewer(tmp_path, slurm, clock).one("7")
        assert one.picture.label == "7"
        assert one.fabric.path(one.picture.seats[0].node) == ("core", "leaf1")  # type: ignore[arg-type]
    assert slurm.asked == ["squeue -u eve", "scontrol show node", "scontrol show topology"]


def test_a_job_that_is_not_among_ours_is_looked_for_among_all_as_they_are_now(
    tmp_path: Path, slurm: Slurm, clock: ManualClock
) -> None:
    eye = viewer(tmp_path, slurm, clock)
    assert eye.one("9").picture.state == "PENDING"
    slurm.jobs.append(job(10))  # just submitted: the shared answer does not have it yet
    clock.sleep(0.1)
    assert eye.one("10").picture.state == "RUNNING"
    assert viewer(tmp_path, slurm, clock).one("8").picture.user == "bob"


def test_a_job_nobody_knows_is_asked_for_once_and_said(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> None:
    eye = viewer(tmp_path, slurm, clock)
    with pytest.raises(JobNameError, match="Slurm knows no such job"):
        eye.one("99")
    with pytest.raises(JobNameError, match="it is no job id"):
        eye.one("n0")


def test_a_vanished_job_is_watched_from_its_folder_without_asking_more(
    tmp_path: Path, slurm: Slurm, clock: ManualClock
) -> None:
    launched(tmp_path, 5, clock.unix())
    eye = viewer(tmp_path, slurm, clock)
    for _ in range(4):
        found = eye.one("5").picture
        assert (found.gone, found.pace.step) == (True, 5)
        clock.sleep(2.0)
    assert slurm.asked.count("squeue") == 1
    assert slurm.asked.count("squeue -u eve") == 4


def test_where_slurm_is_silent_the_last_answer_is_shown_with_its_age(
    tmp_path: Path, slurm: Slurm, clock: ManualClock
) -> None:
    launched(tmp_path, 7, clock.unix())
    eye = viewer(tmp_path, slurm, clock)
    eye.one("7")
    told = clock.unix()
    slurm.silent = True
    clock.sleep(30.0)
    one = eye.one("7")
    assert "Unable to contact" in one.problem
    assert (one.told_unix, one.picture.state, one.picture.gone) == (told, "RUNNING", False)
    clock.sleep(700.0)
    old = eye.one("7")
    assert (old.picture.state, old.picture.gone, old.picture.pace.step) == ("", False, 5)
    with pytest.raises(JobNameError, match="Slurm does not answer"):
        eye.one("98")


def test_a_silent_slurm_is_asked_one_thing(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> None:
    launched(tmp_path, 7, clock.unix())
    slurm.silent = True
    viewer(tmp_path, slurm, clock).one("7")
    assert slurm.asked == ["squeue -u eve"]


def test_a_state_of_a_newer_slurm_hides_no_other_job(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> None:
    slurm.jobs = [job(7, "TELEPORTING"), job(8)]
    pictures = viewer(tmp_path, slurm, clock).table(everything=True).pictures
    assert {one.state for one in pictures} == {"OTHER", "RUNNING"}


def test_several_tasks_of_an_array_are_told_apart(tmp_path: Path, slurm: Slurm, clock: ManualClock) -> None:
    slurm.jobs = [job(12, JobArrayID="12_1"), job(13, JobArrayID="12_2")]
    eye = viewer(tmp_path, slurm, clock)
    assert eye.one("12_2").picture.id == 13
    with pytest.raises(JobNameError, match=r" is [0-9]+ jobs"):
        eye.one("12_*")
    found = {word: [one.job.label for one in jobs] for word, jobs in eye.every(["12_[1-2]", "44"]).items()}
    assert found == {"12_[1-2]": ["12_1", "12_2"], "44": []}
