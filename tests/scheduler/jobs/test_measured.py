"""What was measured of a job, as others draw it, and what binds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core import process_metrics as names
from deeplink.core.types import Attempt
from deeplink.scheduler.jobs.measured import CAUSES, measured
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.journal.progress_rows import LEAST_ROWS, MOST_NUMBERS, MOST_ROWS
from deeplink.scheduler.recovery.records import Beat, Phase, ProgressPoint, RankTimes

FIRST, AGAIN = Attempt(12, 0, 0), Attempt(12, 0, 1)


def point(
    unix: float, steps: int, *, attempt: Attempt = FIRST, rank: int = 0, more: Mapping[str, float] | None = None
) -> ProgressPoint:
    metrics = {names.STEPS: float(steps), "loss": 1.0, **(more or {})}
    return ProgressPoint(attempt=attempt, step=steps, unix=unix, rank=rank, metrics=metrics)


def parts(steps: int, **seconds: float) -> dict[str, float]:
    """Counters of so many steps, each of so many seconds."""
    return {f"deeplink_{name}_s": each * steps for name, each in seconds.items()}


def times(unix: float, *own: float, data: tuple[float, ...] = (), attempt: Attempt = FIRST) -> RankTimes:
    return RankTimes(attempt=attempt, unix=unix, span_s=10.0, own_s=own, data_s=data or (0.0,) * len(own))


def test_rows_are_what_was_between_two_reports() -> None:
    counted = {names.LOADED_SAMPLES: 64.0, names.LOCAL_SAMPLES: 60.0, names.SOURCE_SAMPLES: 4.0}
    made = measured(
        [
            point(100.0, 1, more=parts(1, data=0.1, compute=0.1)),
            point(102.0, 11, more={**parts(11, data=0.1, compute=0.1), **counted, names.LOCAL_BYTES: 6e6}),
            point(104.0, 11, rank=3, more=parts(11, data=9.0)),
        ]
    )
    (row,) = made.document()["rows"]
    assert row["t"], row["span_s"] == (102.0, 2.0)
    assert (row["steps"], row["data_s"], row["compute_s"]) == (10, pytest.approx(1.0), pytest.approx(1.0))
    assert row["samples_per_s"] == pytest.approx(32.0)
    assert row["reads"] == {"local": 60, "peer": 0, "home": 0, "source": 4}
    assert row["bytes"]["local"] == 6e6
    assert json.loads(json.dumps(made.document())) == made.document()


def test_an_attempt_begins_anew_and_so_does_a_process_of_it() -> None:
    made = measured(
        [
            point(0, 50, more=parts(50, compute=1.0)),
            point(10, 60, more=parts(60, compute=1.0)),
            point(20, 5, more=parts(5, compute=1.0)),  # its launcher was told of another process
            point(30, 15, more=parts(15, compute=1.0)),
            point(40, 3, attempt=AGAIN, more=parts(3, data=1.0)),
            point(50, 13, attempt=AGAIN, more=parts(13, data=1.0)),
        ]
    )
    assert [(row.attempt, row.steps) for row in made.rows] == [("12.0.0", 10), ("12.0.0", 10), ("12.0.1", 10)]
    assert made.binds is not None
    assert made.binds.cause == "data", "the newest attempt counts"


def test_older_programs_measured_nothing() -> None:
    old = ProgressPoint(attempt=FIRST, step=3, unix=1.0, metrics={"loss": 1.0})
    assert measured([old, replace(old, step=9, unix=9.0)]).document() == {"rows": [], "ranks": [], "binds": None}
    assert measured([]).binds is None
    assert measured([point(1, 1, more=parts(1, data=1.0))]).binds is None, "one report is no span"


SPLIT = st.fixed_dictionaries({cause: st.floats(0, 100) for cause in CAUSES})
STEPS = st.lists(st.tuples(SPLIT, st.floats(-1e5, 1e5), st.integers(1, 9)), min_size=1, max_size=60)


@given(STEPS, st.integers(1, 50))
def test_the_parts_of_all_rows_are_those_of_the_counters_whatever_the_clock_does(
    steps: list[tuple[dict[str, float], float, int]], most: int
) -> None:
    totals = dict.fromkeys(CAUSES, 0.0)
    unix, count, points = 1e6, 0, [point(1e6, 0)]
    for split, later, more in steps:
        totals = {cause: totals[cause] + split[cause] for cause in CAUSES}
        unix, count = max(unix + later, 0.0), count + more
        points.append(point(unix, count, more={f"deeplink_{cause}_s": totals[cause] for cause in CAUSES}))
    made = measured(points, most_rows=most)
    assert all(row.span_s >= 0 for row in made.rows)
    assert all(min(row.parts_s.values()) >= 0 for row in made.rows)
    if points == sorted(points, key=lambda one: one.unix):
        assert len(made.rows) <= most + 1
        for cause in CAUSES:
            assert sum(row.parts_s[cause] for row in made.rows) == pytest.approx(totals[cause], abs=1e-6)
    if made.binds is not None:
        assert sum(made.binds.shares.values()) == pytest.approx(1.0)
        assert made.binds.shares[made.binds.cause] == max(made.binds.shares.values())


def binding(more: Mapping[str, float], *ranks: RankTimes, nodes: Mapping[str, range] | None = None) -> str:
    made = measured([point(0, 0), point(20, 100, more=more)], ranks, nodes=nodes)
    assert made.binds is not None
    return made.binds.text


def test_where_data_binds_it_says_where_the_reads_came_from() -> None:
    reads = {names.SOURCE_SAMPLES: 900.0, names.LOCAL_SAMPLES: 100.0, names.SOURCE_BYTES: 40e6}
    said = binding({**parts(100, data=0.06, compute=0.03, rest=0.01), **reads})
    assert said.startswith("waiting for data 60 % of 100 ms a step, computing 30 %, the loop's own code 10 %")
    assert "90 % of its reads came from the source (2 MB/s)" in said
    assert "pack the dataset" in said
    assert "`deeplink prefetch JOB`" in said
    said = binding({**parts(100, data=0.06), names.PEER_SAMPLES: 5.0})
    assert said.endswith("`deeplink prefetch JOB` brings its shards onto them"), "warm goes by the members alone"
    said = binding({**parts(100, data=0.06), names.LOCAL_SAMPLES: 5.0})
    assert "more DataLoader workers" in said
    assert "no sample was read through DeepLink" in binding(parts(100, data=0.06))


def test_where_others_bind_it_names_the_slowest_rank_and_its_node() -> None:
    waits = parts(100, others=0.06, compute=0.04)
    nodes = {"n1": range(2), "n2": range(2, 4)}
    said = binding(waits, times(10, 0.02, 0.021, 0.09, 0.02), nodes=nodes)
    assert "rank 2 on n2 is slowest: 4.50 x the median, 90 ms" in said
    assert "deeplink health" in said
    said = binding(waits, times(10, 0.02, 0.021, 0.09, 0.02, data=(0.0, 0.0, 0.08, 0.0)), nodes=nodes)
    assert said.endswith("80 ms of it waiting for data")
    assert "no rank is slow" in binding(waits, times(10, 0.02, 0.021))
    assert "is not known" in binding(waits)
    old = times(10, 0.02, 0.9, attempt=Attempt(12, 0, 5))
    assert "is not known" in binding(waits, old), "of another attempt"


def test_where_checkpoints_bind_it_says_the_seconds_of_each() -> None:
    more = {**parts(100, checkpoint=0.15, compute=0.05), names.CHECKPOINT_STEP: 90.0}
    assert "15 s for each of 1: save less often" in binding(more)
    assert "logging" in binding(parts(100, compute=0.1, rest=0.2))


def test_where_computing_binds_it_says_what_else_was_looked_at() -> None:
    seen = parts(100, compute=0.1, data=0.001)
    assert binding(seen).endswith("; no faster data would help: only less work, or faster devices")
    assert "; no faster data or network would help" in binding(seen | parts(100, others=0.001))
    alone = parts(100, compute=0.1)
    assert binding(alone).endswith("waiting for data is not measured here"), "JAX, or a loader of its own"
    assert "or network" not in binding(alone | parts(100, others=0.001))
    elsewhere = {names.HOME_SAMPLES: 9.0, names.HOME_BYTES: 20e6}
    assert binding({**alone, **elsewhere, names.WAITED_S: 0.5}).endswith("not measured here")
    said = binding({**alone, **elsewhere, names.WAITED_S: 6.0})
    assert "but reads waited 6 s for samples from elsewhere: 100 % of its reads came from the packed home" in said


def beat(*rows: RankTimes) -> Beat:
    return Beat(attempt=rows[0].attempt, phase=Phase.RUNNING, rank_times=rows)


def test_the_journal_keeps_rows_of_ranks_and_fewer_of_them_as_they_become_many(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.record_beat(beat(times(10, 0.1, 0.2, data=(0.05, 0.1))), 10.0)
        journal.record_beat(beat(times(10, 0.1, 0.2, data=(0.05, 0.1)), times(20, 0.1, 0.3)), 20.0)
        assert [row.unix for row in journal.rank_times(12)] == [10, 20], "told twice it is there once"
        assert journal.rank_times(12)[0].data_s == (0.05, 0.1)
        for number in range(3, 4 * MOST_ROWS):
            journal.record_beat(beat(times(10.0 * number, 0.1, 0.2)), 1.0)
        kept = journal.rank_times(12)
        assert MOST_ROWS / 2 <= len(kept) <= MOST_ROWS
        assert kept[-1].unix == 10.0 * (4 * MOST_ROWS - 1)
        assert journal.rank_times(12, after_unix=kept[-2].unix) == kept[-1:]
        wide = replace(times(1.0, attempt=AGAIN), own_s=(0.1,) * 4096, data_s=(0.0,) * 4096)
        for number in range(3 * LEAST_ROWS):
            journal.record_beat(beat(replace(wide, unix=float(number + 1))), 1.0)
        rows = [row for row in journal.rank_times(12) if row.attempt == AGAIN]
        assert LEAST_ROWS / 2 <= len(rows) <= max(LEAST_ROWS, MOST_NUMBERS // 8192)


def test_a_journal_of_an_older_program_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.record_beat(Beat(attempt=FIRST, phase=Phase.RUNNING), 1.0)
        journal._db.execute("DROP TABLE rank_times")
    with Journal(path, read_only=True) as journal:
        assert journal.rank_times(12) == ()
    with Journal(path) as journal:
        journal.record_beat(beat(times(10, 0.1, 0.2)), 10.0)
        assert len(journal.rank_times(12)) == 1
