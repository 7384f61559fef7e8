"""Traces: Philly's columns and others, and rows that make no sense."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate.errors import DirtyTraceError, TraceError
from benchmarks.simulate.trace import TraceJob, parse_trace, read_trace

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:13:03,2951.0,8,23608.0,6214e9
2017-10-09 06:13:36,2759.0,1,2759.0,6214e9
"""


def test_jobs_are_in_order_of_submission_whatever_the_files() -> None:
    trace = parse_trace(PHILLY.splitlines(), "philly.csv")
    assert trace.jobs == (
        TraceJob(0, 0.0, 2951.0, 8),
        TraceJob(1, 33.0, 2759.0, 1),
        TraceJob(2, 2932.0, 66.0, 1),
    )
    assert trace.faults == ()


def test_packed_or_not_is_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.csv", tmp_path / "b"
    plain.write_text("\ufeff" + PHILLY, encoding="utf-8")
    packed.write_bytes(gzip.compress(PHILLY.encode()))
    assert read_trace(plain) == read_trace(packed)


def test_a_gzip_file_cut_short_is_an_error(tmp_path: Path) -> None:
    packed = tmp_path / "cut.gz"
    packed.write_bytes(gzip.compress(PHILLY.encode() * 1000)[:200])
    with pytest.raises(TraceError, match="no whole gzip file"):
        read_trace(packed)


def test_a_trace_of_nodes() -> None:
    trace = parse_trace(["Submit, Duration, Nodes", "100,5,3", "90,7,1"], "own.csv")
    assert trace.jobs == (TraceJob(0, 0.0, 7.0, 0, 1), TraceJob(1, 10.0, 5.0, 0, 3))


def test_one_virtual_cluster_and_the_first_jobs() -> None:
    trace = parse_trace(PHILLY.splitlines(), "philly.csv", cluster="6214e9", limit=1)
    assert [(job.submit_s, job.gpus) for job in trace.jobs] == [(0.0, 8)]
    with pytest.raises(TraceError, match="no job of 'x'"):
        parse_trace(PHILLY.splitlines(), "philly.csv", cluster="x")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("yesterday,66.0,1", "'yesterday' is no time of submission"),
        ("inf,66.0,1", "the time of submission is 'inf', no finite number"),
        ("5,soon,1", "duration is 'soon', no number"),
        ("5,nan,1", "duration is 'nan', no finite number"),
        ("5,-3,1", "a duration of -3"),
        ("5,0,1", "a duration of 0"),
        ("5,66,0", "neither GPUs nor nodes"),
        ("5,66,1.5", "gpus is '1.5', no number of things"),
        ("5,66,-1", "gpus is '-1', no number of things"),
        ("5,66", "2 fields, where the first line names 3"),
        ("5,66,1,9", "4 fields, where the first line names 3"),
        ("1760000000000,66,1", "the time of submission is '1760000000000', more than 1e+12"),
        ("5,1e300,1", "duration is '1e300', more than 1e+12"),
    ],
)
def test_a_dirty_row_is_named_and_left_out_where_that_was_allowed(row: str, why: str) -> None:
    lines = ["submit,duration,gpus", "1,2,3", row]
    trace = parse_trace(lines, "own.csv", skip=1)
    assert len(trace.jobs) == 1
    (fault,) = trace.faults
    assert fault.startswith("line 3: ")
    assert why in fault
    with pytest.raises(DirtyTraceError, match=r"1 of 2 rows cannot be read: line 3: ") as raised:
        parse_trace(lines, "own.csv", skip=0)
    assert raised.value.faults == (fault,)


def test_one_row_of_a_hundred_may_be_dirty_where_nobody_says_how_many() -> None:
    rows = ["submit,duration,gpus", *["1,2,3"] * 99, "x,2,3"]
    assert len(parse_trace(rows, "own.csv").jobs) == 99
    with pytest.raises(DirtyTraceError, match="1 of 99 rows"):
        parse_trace([*rows[:-2], rows[-1]], "own.csv")


def test_lines_that_an_open_quote_swallows_are_counted_each() -> None:
    rows = [f"{row},2,3" for row in range(1000)]
    rows[100], rows[400] = '"' + rows[100], rows[400] + '"'
    lines = [line + "\n" for line in ("submit,duration,gpus", *rows)]
    with pytest.raises(DirtyTraceError, match="301 of 1,000 rows cannot be read: line 102: 1 field, where"):
        parse_trace(lines, "own.csv")
    trace = parse_trace(lines, "own.csv", skip=301)
    assert len(trace.jobs) == 699
    assert trace.faults[-1] == "line 402: within what was quoted in line 102"


def test_a_quoted_field_may_go_over_lines() -> None:
    text = 'submit,name,duration,gpus\n1,"two\nlines",5,1\n2,one,5,x\n'
    trace = parse_trace(text.splitlines(keepends=True), "own.csv", skip=1)
    assert (len(trace.jobs), trace.faults) == (1, ("line 4: gpus is 'x', no number",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lacks the columns submit, duration, gpus or nodes"),
        ("submit,gpus\n1,2\n", "lacks the columns duration"),
        ("submit,duration,gpus\n", "no job"),
        ("submit,duration,gpus,gpus\n1,2,3,4\n", "two of its columns have the same name"),
        ('submit,duration,gpus\n"' + "x" * 200_000 + '",1,1\n', "no CSV"),
    ],
)
def test_what_is_no_trace_is_an_error(text: str, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        parse_trace(text.splitlines(keepends=True), "own.csv")


@given(st.text(max_size=300))
def test_any_text_is_a_trace_or_a_trace_error(text: str) -> None:
    for head in ("", "submit,duration,gpus,nodes\n"):
        try:
            trace = parse_trace((head + text).splitlines(keepends=True), "any")
        except TraceError:
            continue
        assert all(job.duration_s > 0 and job.gpus + job.nodes > 0 for job in trace.jobs)
