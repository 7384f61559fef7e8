"""Which job a word means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import JobId
from deeplink.scheduler.jobs.job_names import JobName, JobNameError, matching, the_one
from deeplink.scheduler.slurm.parse import JobRow
from deeplink.scheduler.slurm.states import JobState


def row(number: int, label: str, state: JobState = JobState.RUNNING) -> JobRow:
    return JobRow(
        id=JobId(number),
        label=label,
        state=state,
        reason="",
        restarts=0,
        requeueable=True,
        user="eve",
        nodes=(),
        batch_host=None,
        name="x",
    )


QUEUE = [row(12, "12_1"), row(13, "12_2"), row(14, "12_3", JobState.FAILED), row(20, "20"), row(31, "30+1")]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("20", [20]),
        ("12_1", [12]),
        ("13", [13]),
        ("12_[2-3]", [13, 14]),
        ("12_[1-3:2]", [12, 14]),
        ("12_[1,3%1]", [12, 14]),
        ("12_*", [12, 13, 14]),
        ("12", [12, 13, 14]),
        ("30+1", [31]),
        ("30+2", []),
        ("99", []),
    ],
)
def test_a_word_means_these_jobs(word: str, found: list[int]) -> None:
    assert [job.id for job in matching(JobName.parse(word), QUEUE)] == found


NO_JOBS = [
    "x",
    "12a",
    "0",
    "-1",
    "12_",
    "12_[",
    "12_[a]",
    "12_[1-]",
    "12+",
    "12.",
    "12_3_4",
    "12_[1-99999999]",
    "12;rm",
]


@pytest.mark.parametrize("word", [*NO_JOBS, "", "1" * 30, "\uff11\uff12", "12\n", " 12"])
def test_what_names_no_job_is_said(word: str) -> None:
    with pytest.raises(JobNameError) as told:
        JobName.parse(word)
    assert told.value.exit_code == 2


@given(st.text(max_size=30))
def test_any_text_is_a_job_or_is_refused(text: str) -> None:
    try:
        name = JobName.parse(text)
    except JobNameError:
        return
    assert str(name) == text
    matching(name, QUEUE)


@given(st.integers(1, 4_000_000_000), st.integers(0, 4_000_000), st.sampled_from(["", ".0", ".batch", ".extern"]))
def test_what_slurm_prints_is_understood(job: int, task: int, step: str) -> None:
    for word in (f"{job}{step}", f"{job}_{task}{step}", f"{job}+{task}{step}"):
        assert str(JobName.parse(word)) == word


def test_one_job_is_wanted_and_several_are_named() -> None:
    with pytest.raises(JobNameError, match="12_1, 12_2"):
        the_one("12_*", QUEUE)
    with pytest.raises(JobNameError, match="a step"):
        the_one("20.0", QUEUE)
    assert the_one("99", QUEUE) is None


def test_of_an_array_with_one_task_left_that_one_is_meant() -> None:
    left = [row(12, "12_1"), row(13, "12_2", JobState.COMPLETED)]
    found = the_one("12", left)
    assert found is not None
    assert found.label == "12_1"
