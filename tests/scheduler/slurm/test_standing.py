"""How a job stands, in squeue's words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deeplink.core.types import JobId
from deeplink.scheduler.slurm.client import parse_standing
from deeplink.scheduler.slurm.parse import JobRow
from deeplink.scheduler.slurm.states import JobState, SlurmTextError

JOB = JobRow(
    id=JobId(2),
    label="2",
    state=JobState.RUNNING,
    reason="",
    restarts=0,
    requeueable=True,
    user="u",
    nodes=(),
    batch_host=None,
    name="",
)
STARTED = "2026-11-22T11:45:20"


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        ("9:58", 598.0),
        ("0:00", 0.0),
        ("1:00:01", 3601.0),
        ("2-03:00:00", 183_600.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", 0.0),
    ],
)
def test_what_is_left(text: str, left_s: float | None) -> None:
    assert parse_standing(JOB, f"2|{text}|N/A|{STARTED}|\n", "|").left_s == left_s


# As recorded: the time of the preemption is there while the job runs on, and stays when it waits again.
@pytest.mark.parametrize(
    ("preempted", "state", "preempting"),
    [
        ("N/A", JobState.RUNNING, False),
        ("2026-11-22T11:45:29", JobState.RUNNING, True),
        ("2026-11-22T11:45:37", JobState.COMPLETING, False),
        ("2026-11-22T11:40:00", JobState.RUNNING, False),
    ],
)
def test_who_must_make_room(preempted: str, state: JobState, *, preempting: bool) -> None:
    row = parse_standing(replace(JOB, state=state), f"2|9:50|{preempted}|{STARTED}|\n", "|")
    assert row.preempting is preempting


@pytest.mark.parametrize("text", ["", "2|soon|N/A|N/A|", "2|9:50|N/A|", "3|9:50|N/A|N/A|"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_standing(JOB, text, "|")
