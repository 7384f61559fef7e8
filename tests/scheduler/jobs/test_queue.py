"""The queue with times and output files, from one question."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.text import printable
from deeplink.scheduler.jobs.job_view import parse_queue, queue
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import PATTERN, duration_s
from deeplink.scheduler.slurm.states import JobState, SlurmTextError
from tests.hostile import TEXTS

SEPARATOR = "~0a1b2c3d4e5f6071~"
FIELDS = ["7", "7", "RUNNING", "None", "1", "1", "eve", "n[0-1]", "n0", "a\nname", "main", "1:05", "UNLIMITED",
          "2026-11-21T22:28:56", "/home/eve/slurm-%j.out", "n[4-5]"]  # fmt: skip


def text(*rows: list[str]) -> str:
    return "\n".join("".join(f"{field}{SEPARATOR}" for field in row) for row in rows) + "\n"


def test_a_row_is_read() -> None:
    (one,) = parse_queue(text(FIELDS), SEPARATOR)
    assert (one.job.id, one.job.state, one.job.name, one.job.nodes) == (
        7,
        JobState.RUNNING,
        "a\\nname",
        ("n0", "n1"),
    )
    assert (one.partition, one.used_s, one.limit_s) == ("main", 65.0, math.inf)
    assert one.start_unix is not None
    assert one.output == "/home/eve/slurm-%j.out"
    assert one.required == ("n4", "n5")


def test_rows_follow_one_another_and_none_is_no_job() -> None:
    other = ["8", "8", "PENDING", "Resources", "0", "0", "eve", "", "", "b", "main", "0:00", "1-00:00:00", "N/A"]
    rows = parse_queue(text(FIELDS, [*other, "(null)", ""]), SEPARATOR)
    assert [row.job.id for row in rows] == [7, 8]
    assert (rows[1].limit_s, rows[1].output) == (86400.0, "")
    assert parse_queue("", SEPARATOR) == []


def test_text_that_is_something_else_is_an_error() -> None:
    with pytest.raises(SlurmTextError):
        parse_queue(text(FIELDS[:-1]), SEPARATOR)


def test_a_state_of_a_newer_slurm_is_other() -> None:
    (row,) = parse_queue(text([*FIELDS[:2], "TELEPORTING", *FIELDS[3:]]), SEPARATOR)
    assert row.job.state is JobState.OTHER


@given((TEXTS | st.text(max_size=40)).filter(lambda word: not PATTERN.search(word)))
def test_any_name_arrives_as_one_printable_line_and_any_output_file_as_it_is(word: str) -> None:
    fields = [*FIELDS]
    fields[9], fields[14] = word, f"/{word}"
    (one,) = parse_queue(text(fields), SEPARATOR)
    assert (one.job.name, one.output) == (printable(word), f"/{word}")


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_none(word: str) -> None:
    found = duration_s(word)
    assert found is None or found >= 0


def test_there_is_one_question_for_all_jobs() -> None:
    asked: list[list[str]] = []

    def run(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        asked.append(list(argv))
        separator = PATTERN.search(argv[-3])
        assert separator
        return text(FIELDS, FIELDS).replace(SEPARATOR, separator[0])

    assert len(queue(Slurm(run), user="eve")) == 2
    assert [argv[0] for argv in asked] == ["squeue"]
    assert asked[0][-2:] == ["-u", "eve"]
