"""The queue is read whole, and ordered as Slurm looks at it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.hint.cluster_survey import in_order, parse_queue, read_queue, stopped
from deeplink.scheduler.slurm.states import JobState, SlurmTextError

# squeue -h -a -o, Slurm 22.05.8: a job with a plan, tasks of an array, a component, one that runs.
SAID = (
    "53|53|PENDING|Resources|deeplink|main|4|1|||n[2-3,6-7]|(null)||\n"
    "22|22_[1,3-4]|PENDING|Priority|deeplink|main|2|7|n[0,4]|n3|(null)|(null)||\n"
    "30|29+1|PENDING|None|deeplink|small,main|2|1|||(null)|r|(null)|\n"
    "28|28|RUNNING|None|root|main|8|1|||(null)|(null)||\n"
)


def test_rows_are_read() -> None:
    rows = parse_queue(SAID, "|")
    assert [row.label for row in rows] == ["53", "22_[1,3-4]", "29+1", "28"]
    assert rows[0].planned == {"n2", "n3", "n6", "n7"}
    assert sorted(rows[1].required) == ["n0", "n4"]
    assert (sorted(rows[1].excluded), rows[1].record_id, rows[1].single) == (["n3"], "22", False)
    assert (rows[2].partitions, rows[2].reservation, rows[2].reason, rows[2].record_id) == (
        ("small", "main"),
        "r",
        "",
        "29",
    )
    assert not rows[3].waits
    assert [row.id for row in in_order(rows)] == [22, 30, 53]


def test_one_question_is_asked() -> None:
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str], /, *, timeout_s: float = 0.0) -> str:
        asked.append(argv)
        separator = argv[-1].removeprefix("%A").partition("%")[0]
        return SAID.replace("|", separator)

    assert len(read_queue(run)) == 4
    assert len(asked) == 1
    assert "--states=PENDING" in asked[0], "a full cluster has thousands that run, and none of them is looked at"


@pytest.mark.parametrize(
    "text", ["x|7|PENDING", SAID.replace("53|53", "53|53|more"), SAID.replace("|1|||n", "|-|||n")]
)
def test_what_is_no_queue_is_an_error(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_queue(text, "|")


def test_a_state_of_a_newer_slurm_hides_no_other_job() -> None:
    before, after = parse_queue(SAID, "|"), parse_queue(SAID.replace("RUNNING", "DREAMING", 1), "|")
    assert len(after) == len(before)
    assert sum(one.state is JobState.OTHER for one in after) == 1
    assert not any(one.waits for one in after if one.state is JobState.OTHER)


@given(st.text(alphabet="0123456789|nN[]-,PENDING \n", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_queue(text, "|")
    except SlurmTextError:
        return


@pytest.mark.parametrize(
    "reason", ["Dependency", "BeginTime", "JobHeldUser", "QOSMaxNodePerUserLimit", "Licenses", "Moon"]
)
def test_other_reasons_than_nodes_stop_a_job(reason: str) -> None:
    assert stopped(reason) == reason
