"""Goodput: what the rank-hours were for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.goodput import (
    CAUSES,
    Goodput,
    accounted,
    goodput,
    parse_accounting,
    site_report,
    without,
)
from deeplink.scheduler.recovery.records import (
    AttemptRecord,
    Incident,
    IncidentKind,
    JobRecord,
    Phase,
    incident_id,
)

ALWAYS = {"since_unix": 0.0, "until_unix": 1e12}
RANKS = 8


def attempt(  # noqa: PLR0917 - an attempt
    number: int,
    began: float,
    beat: float,
    first: int | None = None,
    last: int | None = None,
    last_unix: float = 0.0,
    *,
    restart: int = 0,
    spares: int = 0,
) -> AttemptRecord:
    return AttemptRecord(
        attempt=Attempt(12, restart, number),
        phase=Phase.RUNNING,
        nodes=tuple(NodeName(f"n{each}") for each in range(4)),
        spares=tuple(NodeName(f"s{each}") for each in range(spares)),
        world_size=RANKS,
        began_unix=began,
        beat_unix=beat,
        first_step=first,
        last_step=last,
        last_step_unix=last_unix,
    )


def job(*attempts: AttemptRecord) -> JobRecord:
    return JobRecord(job=12, name="train", user="eva", attempts=attempts)


def incident(of: AttemptRecord, kind: str, began: float = 0.0, **facts: object) -> Incident:
    made = Incident(
        id=incident_id(of.attempt, kind), kind=kind, attempt=of.attempt, began_unix=began, detected_unix=began
    )
    return replace(made, **facts)  # type: ignore[arg-type] # its own fields


def lost(found: Goodput) -> dict[str, float]:
    return {cause: seconds / RANKS for cause, seconds in found.lost_s.items()}


def test_a_job_without_trouble_loses_its_start() -> None:
    one = attempt(0, 100, 1100, 1, 900, 1090)
    found = goodput(job(one), (), {one.attempt: 150.0}, **ALWAYS)
    assert found.held_s == RANKS * 1000
    assert lost(found) == {"start": 50}, "what it saves at its end moves training on"
    assert found.share == pytest.approx(0.95)
    done = replace(one, phase=Phase.SUCCEEDED)
    told = [incident(one, IncidentKind.NODE_SILENT), incident(one, IncidentKind.NODE_SICK)]
    assert goodput(job(done), told, {one.attempt: 150.0}, **ALWAYS) == found, "a spare that was lost, say"


def test_a_lost_node_costs_the_restart_and_the_steps_done_again() -> None:
    one, two = attempt(0, 0, 500, 1, 400, 400), attempt(1, 460, 1000, 301, 700, 900)
    record, first = job(one, two), {one.attempt: 1.0, two.attempt: 500.0}
    found = goodput(record, [incident(one, IncidentKind.NODE_DEAD, 399, recovered_unix=500)], first, **ALWAYS)
    assert found.held_s == RANKS * (500 + 540), "a beat of the old one that came later counts"
    step_s = 400 / 399
    assert lost(found) == pytest.approx({"start": 1, "restart": 100 + 40, "repeated": 100 * step_s})
    found = goodput(record, [incident(one, IncidentKind.RANKS_HUNG, 400)], first, **ALWAYS)
    assert lost(found) == pytest.approx({"start": 1, "hang": 100, "restart": 40, "repeated": 100 * step_s})


def test_an_incident_that_healed_ends_no_attempt() -> None:
    one = attempt(0, 0, 1000, 1, 400, 900)
    for kind in (IncidentKind.RANKS_HUNG, IncidentKind.NODE_SILENT):
        healed = incident(one, kind, 200, recovered_unix=300)
        assert lost(goodput(job(one), [healed], {one.attempt: 1.0}, **ALWAYS)) == {"start": 1}
        again = incident(one, kind, 905)
        found = lost(goodput(job(one), [healed, again], {one.attempt: 1.0}, **ALWAYS))
        assert sum(found.values()) == 101, "what came after it, with the tail"


def test_between_two_runs_of_slurms_nothing_is_held() -> None:
    one, two = attempt(0, 0, 500, 1, 400, 490), attempt(0, 5000, 5500, 401, 700, 5490, restart=1)
    found = goodput(job(one, two), (), {one.attempt: 10.0, two.attempt: 5020.0}, **ALWAYS)
    assert found.held_s == RANKS * 1000
    assert lost(found) == {"start": 10, "restart": 20}


def test_a_slow_rank_costs_its_part_of_each_step_and_spares_what_they_hold() -> None:
    one = attempt(0, 0, 1000, 0, 10_000, 1000, spares=1)
    said = "rank 2 on n1: 2.50 x the median of the ranks' own work, 75 ms against 30 ms, for 60 steps"
    slow = incident(one, IncidentKind.STRAGGLER, 200.0, recovered_unix=600.0, evidence=said)
    found = goodput(job(one), [slow], {one.attempt: 0.0}, **ALWAYS)
    assert found.held_s == RANKS * 1000 * 1.25
    assert lost(found) == pytest.approx({"slow": 400 * 0.45, "spare": 250}), "45 ms of a step of 100 ms"


def test_what_is_not_known_is_said() -> None:
    silent = attempt(0, 0, 1000)
    found = goodput(job(silent), (), {}, **ALWAYS)
    assert (lost(found), found.share) == ({"unknown": 1000}, None), "it reports no steps"
    stepped = attempt(0, 0, 1000, 1, 10, 900)
    assert lost(goodput(job(stepped), (), {}, **ALWAYS)) == {"unknown": 1000}, "its progress was forgotten"
    never = attempt(1, 1000, 1500)
    found = goodput(job(stepped, never), (), {stepped.attempt: 5.0}, **ALWAYS)
    assert lost(found) == {"start": 5, "restart": 500}, "an attempt that came to no step"


FLOATS = st.floats(0, 1e5)
KINDS = st.sampled_from([*IncidentKind])
COURSE = st.tuples(FLOATS, FLOATS, st.none() | FLOATS, FLOATS, st.integers(0, 500), st.integers(0, 500), KINDS)


@given(st.lists(COURSE, min_size=1, max_size=6), FLOATS, FLOATS, st.floats(0, 1))
def test_no_hour_is_lost_twice_and_windows_add_up(
    courses: list[tuple[float, float, float | None, float, int, int, str]], since: float, until: float, part: float
) -> None:
    attempts, incidents, firsts, at = [], [], {}, 0.0
    for number, (wait, length, first, last, step, more, kind) in enumerate(courses):
        at += wait
        made = attempt(number, at, at + length, step, step + more, at + last, restart=number % 2)
        attempts.append(made)
        evidence = f"{length} ms against {wait} ms"
        incidents.append(incident(made, kind, at, recovered_unix=at + last, evidence=evidence))
        if first is not None:
            firsts[made.attempt] = at + first
        at += length
    record = job(*attempts)
    whole = goodput(record, incidents, firsts, **ALWAYS)
    assert set(whole.lost_s) <= set(CAUSES)
    assert all(seconds >= 0 for seconds in whole.lost_s.values())
    assert sum(whole.lost_s.values()) <= whole.held_s * (1 + 1e-9) + 1e-6
    assert whole.share is None or 0 <= whole.share <= 1 + 1e-9
    middle = since + part * max(0.0, until - since)
    windows = [("a", since, middle), ("b", middle, max(since, until))]
    both = site_report([(record, incidents, firsts)], windows).whole
    one = site_report([(record, incidents, firsts)], [("a", since, max(since, until))]).whole
    assert both.held_s == pytest.approx(one.held_s, rel=1e-9, abs=1e-3)


def test_a_report_by_job_user_and_month() -> None:
    one = attempt(0, 0, 1000, 1, 100, 1000)
    other = replace(job(one), job=13, label="13", user="adam", name="")
    jobs = [(job(one), (), {one.attempt: 100.0}), (other, (), {one.attempt: 500.0})]
    found = site_report(jobs, [("1970-01", 0.0, 400.0), ("1970-02", 400.0, 2000.0)])
    assert [each.job for each in found.jobs] == ["13", "12"], "what lost most first"
    assert found.users["eva"].held_s == RANKS * 1000
    assert lost(found.months["1970-01"]) == {"start": 500}
    assert lost(found.months["1970-02"]) == {"start": 100}
    assert found.document()["whole"]["goodput"] == pytest.approx(0.7)


def test_slurms_accounting_of_what_no_journal_has() -> None:
    text = "12|eva|3600|4\n13|adam|7200|2\n13|adam|1800|2\n14||0|0\nsacct: error\n15|a|b|c\n"
    jobs = parse_accounting(text)
    assert [(each.job, each.node_s) for each in jobs] == [(12, 14_400), (13, 14_400), (13, 3_600), (14, 0)]
    assert without(jobs, {12}) == {"adam": (2, 18_000)}
    asked: list[list[str]] = []

    def run(argv: list[str], /, *, timeout_s: float = 0.0) -> str:
        asked.append(argv)
        return text

    accounted(run, 0.0, 86_400.0, user="eva")  # type: ignore[arg-type] # a list of words, as all are
    assert asked[0][-2:] == ["-u", "eva"]
    accounted(run, 0.0, 86_400.0)  # type: ignore[arg-type]
    assert asked[1][-1] == "-a"
