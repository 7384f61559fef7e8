"""Who is late, and whether they hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.hang_attribution import (
    UNBROKEN_S,
    ActivityAnswer,
    ActivityHistory,
    ProcessSnapshot,
    activity,
)
from deeplink.scheduler.launch.hang_detection import (
    IDLE_S,
    SETUP_S,
    STEPS,
    STOPPED_SHARE,
    UNHEARD_S,
    LateRank,
    ProgressClock,
    Silences,
    hung,
    stopped,
)


def knowing(seconds: float = 0.5) -> Silences:
    silences = Silences()
    silences.learn(STEPS, seconds)
    silences.learn("setup", 20.0)
    return silences


def pulse(steps_s: float | None = None, silences: Silences | None = None, world: int = 2) -> ProgressClock:
    made = ProgressClock(silences or knowing(), steps_s)
    made.begin(0.0, world)
    return made


def running(made: ProgressClock, until: float, *ranks: int) -> ProgressClock:
    step, now = 0, 0.0
    while now < until:
        now, step = now + 0.5, step + 1
        made.tick(now)
        for rank in ranks:
            made.take(rank, step, "", now)
    return made


def ticked(made: ProgressClock, start: float, end: float) -> float:
    now = start
    while now < end:
        now += 0.5
        made.tick(now)
    return now


def test_who_reports_is_not_late() -> None:
    assert not running(pulse(), 60.0, 0, 1).late(60.0)


def test_the_rank_that_is_silent_is_late_though_others_go_on() -> None:
    made = running(pulse(), 30.0, 0, 1)
    now, step = 30.0, 60
    while now < 61.0:
        now, step = now + 0.5, step + 1
        made.tick(now)
        made.take(0, step, "", now)
    (late,) = made.late(now)
    assert (late.rank, late.limit_s, late.is_learned) == (1, 30.0, True)
    assert not made.are_all([late])


def test_the_same_step_again_is_nothing_new() -> None:
    made = running(pulse(), 5.0, 0)
    now = ticked(made, 5.0, 36.0)
    made.take(0, 3, "", now)
    assert made.late(now)


def test_time_in_which_we_did_not_run_ourselves_counts_for_nobody() -> None:
    made = running(pulse(), 30.0, 0, 1)
    made.tick(900.0)  # the whole job was suspended
    assert not made.late(901.0)


def test_another_section_has_a_limit_of_its_own_and_is_told_by_its_entry() -> None:
    made = running(pulse(), 30.0, 0, 1)
    made.take(0, 60, "evaluation", 30.0)
    now = ticked(made, 30.0, 61.0)
    assert [one.rank for one in made.late(now)] == [1]
    made.take(0, 60, "", now)
    now = ticked(made, now, now + 5)
    assert [one.rank for one in made.late(now)] == [1], "leaving it is news, too"


def test_a_limit_that_was_set_holds_for_steps_and_gives_sections_their_own_time() -> None:
    made = running(pulse(steps_s=3.0), 30.0, 0, 1)
    made.take(0, 60, "checkpoint", 30.0)
    now = ticked(made, 30.0, 34.0)
    late = made.late(now)
    assert [one.rank for one in late] == [1]
    assert not made.are_all(late)


def test_a_job_that_never_reports_is_never_late() -> None:
    made = pulse(silences=Silences())
    assert not made.late(ticked(made, 0.0, 3000.0))


def test_a_job_that_is_known_to_report_is_late_if_it_does_not_come_to_it() -> None:
    made = pulse(world=3)
    now = ticked(made, 0.0, 101.0)
    assert [(one.rank, one.section) for one in made.late(now)] == [(0, "setup"), (1, "setup"), (2, "setup")]


def test_setting_up_is_a_section_until_the_first_step() -> None:
    made = pulse(silences=Silences())
    made.take(0, None, "setup", 1.0)
    now = ticked(made, 0.0, SETUP_S - 1.0)
    assert not made.late(now)
    assert made.is_setting_up
    made.take(0, 1, "", now)
    assert not made.is_setting_up


def sights(states: str, cpu: float = 0.0) -> dict[int, ProcessSnapshot]:
    return {rank: ProcessSnapshot(state=state.strip("-"), cpu_s=cpu) for rank, state in enumerate(states)}


CASES = {
    "one is stopped": ("SSTS", "SSTS", 0.0, ActivityAnswer.STOPPED),
    "one is stopped while the others work": ("SSTS", "SSTS", 9.0, ActivityAnswer.STOPPED),
    "one was stopped for a moment": ("SSTS", "SSSS", 0.0, ActivityAnswer.IDLE),
    "all are stopped": ("TTTT", "TTTT", 0.0, ActivityAnswer.HELD),
    "the only one that is left is stopped": ("T", "T", 0.0, ActivityAnswer.HELD),
    "one is held by a debugger": ("StSS", "StSS", 0.0, ActivityAnswer.HELD),
    "all wait": ("SSSS", "SSSS", 0.0, ActivityAnswer.IDLE),
    "all wait, one of them in the kernel": ("SDSS", "SDSS", 0.0, ActivityAnswer.IDLE),
    "somebody works": ("SSSS", "SSSS", 0.5, ActivityAnswer.WORKING),
    "a node did not answer": ("SSS", "SSS", 0.0, ActivityAnswer.UNKNOWN),
    "nobody is there": ("----", "----", 0.0, ActivityAnswer.UNKNOWN),
    "some have ended, the others wait": ("S--S", "S--S", 0.0, ActivityAnswer.IDLE),
}


@pytest.mark.parametrize(("before", "now", "cpu", "answer"), CASES.values(), ids=CASES.keys())
def test_what_processes_do(before: str, now: str, cpu: float, answer: ActivityAnswer) -> None:
    world = 1 if len(now) == 1 else 4
    assert activity(sights(before), sights(now, cpu), 2.0, world).answer is answer


states = st.text("RSDTtZ-", min_size=4, max_size=4)


@given(states, states, st.floats(0, 10))
def test_nobody_counts_as_stopped_unless_another_is_not(before: str, now: str, cpu: float) -> None:
    found = activity(sights(before), sights(now, cpu), 2.0, 4)
    if found.answer is ActivityAnswer.STOPPED:
        assert found.ranks
        assert all(before[rank] in "Tt" and now[rank] == "T" for rank in found.ranks)
        assert any(state in "RSD" or before[rank] not in "Tt" for rank, state in enumerate(now))


def test_nobody_works_for_as_long_as_was_seen_without_a_break() -> None:
    watch = ActivityHistory()
    for at in range(0, 100, 10):
        watch.look(sights("SS"), float(at), 2)
    assert watch.idle_s() == 90.0
    watch.look(sights("SS", 5.0), 100.0, 2)
    assert watch.idle_s() == 0.0
    watch.look(sights("SS", 5.0), 110.0, 2)
    assert watch.idle_s() == 10.0
    watch.forget()
    assert (watch.idle_s(), watch.newest.answer) == (0.0, ActivityAnswer.UNKNOWN)


def test_each_rank_is_idle_for_as_long_as_it_was_seen_so() -> None:
    watch = ActivityHistory()
    for at in range(0, 20, 2):
        now = {0: ProcessSnapshot(state="S", cpu_s=0.0), 1: ProcessSnapshot(state="R", cpu_s=float(at))}
        watch.look(now, float(at), 2)
    assert watch.idle() == {0}
    watch.look({rank: ProcessSnapshot(state="S", cpu_s=30.0) for rank in (0, 1)}, 20.0, 2)
    assert watch.idle() == set()


late_ranks = st.builds(
    LateRank,
    rank=st.integers(0, 9),
    section=st.sampled_from(["", "setup", "evaluation"]),
    silent_s=st.floats(30, 10_000),
    limit_s=st.just(30.0),
    is_learned=st.booleans(),
)


@given(
    st.lists(late_ranks, max_size=4),
    st.booleans(),
    st.sampled_from(["", "no bytes pass between n1 and n2"]),
    st.floats(0, 10_000),
    st.booleans(),
)
def test_time_alone_restarts_nobody_unless_somebody_set_it(
    late: list[LateRank], all_late: bool, why: str, idle_s: float, is_set: bool
) -> None:
    because = hung(late, all_late=all_late, why=why, idle_s=idle_s, is_set=is_set)
    assert bool(because) == bool(late and all_late and (is_set or why or idle_s >= IDLE_S))
    assert not because or why in because


T, R = ProcessSnapshot(state="T", cpu_s=1.0), ProcessSnapshot(state="S", cpu_s=1.0)


def looked(watch: ActivityHistory, start: float, end: float, *sights: ProcessSnapshot) -> float:
    at = start
    while at <= end:
        watch.look(dict(enumerate(sights)), at, len(sights))
        at += 3.0
    return at


def test_a_rank_that_is_seen_stopped_for_ten_seconds_hangs_whatever_was_learned() -> None:
    watch = ActivityHistory()
    looked(watch, 0.0, 9.0, R, T)
    assert (watch.newest.ranks, watch.stopped_s()) == ((1,), 9.0)
    assert not stopped(watch.newest, watch.stopped_s(), (), is_heard=True)
    looked(watch, 12.0, 12.0, R, T)
    assert stopped(watch.newest, watch.stopped_s(), (), is_heard=True).startswith(
        "rank 1 is stopped by a signal, for 12"
    )
    assert not stopped(watch.newest, watch.stopped_s(), (), is_heard=False), "who knows what the others do"
    looked(watch, 15.0, UNHEARD_S, R, T)
    assert stopped(watch.newest, watch.stopped_s(), (), is_heard=False)
    looked(watch, 33.0, 33.0, R, R)
    assert watch.stopped_s() == 0.0


def test_a_rank_that_is_stopped_and_late_by_a_third_hangs_at_the_second_look() -> None:
    watch, made = ActivityHistory(), running(pulse(), 30.0, 0, 1)
    now = ticked(made, 30.0, 40.5)
    looked(watch, now - 3.0, now, R, T)
    late = made.late(now, STOPPED_SHARE)
    because = stopped(watch.newest, watch.stopped_s(), late, is_heard=True)
    assert because == (
        "rank 1 is stopped by a signal, and nothing new of ranks 0, 1 for 10 s (the limit is 30 s, learned)"
    )


def test_all_of_them_stopped_is_no_hang_however_long() -> None:
    watch = ActivityHistory()
    looked(watch, 0.0, 90.0, T, T)
    assert not stopped(watch.newest, watch.stopped_s(), (), is_heard=True)


def test_what_was_between_looks_far_apart_is_not_known() -> None:
    watch = ActivityHistory()
    looked(watch, 0.0, 3.0, R, T)
    looked(watch, 3.5 + UNBROKEN_S, 3.5 + UNBROKEN_S, R, T)
    assert watch.stopped_s() == 0.0


def test_who_reports_is_not_quiet_and_while_nobody_does_all_are() -> None:
    made = running(pulse(silences=Silences()), 5.0, 0, 1)
    assert not made.quiet(5.0)
    now = ticked(made, 5.0, 36.0)
    assert made.quiet(now) == {0, 1}
    unheard = pulse(silences=Silences(), world=3)
    now = ticked(unheard, 0.0, 31.0)
    assert (len(unheard.quiet(now)), unheard.is_heard) == (3, False)


def test_a_rank_that_was_never_heard_of_is_missed_where_most_others_were() -> None:
    made = running(pulse(world=3), 40.0, 0, 2)
    assert made.quiet(40.0) == {1}
    assert not running(pulse(world=3), 40.0, 0).quiet(40.0), "only rank 0 reports, as in many jobs"


@given(st.floats(0, 400), st.none() | st.floats(0.1, 600), st.lists(st.floats(0, 300), max_size=60))
def test_who_is_late_is_quiet(now: float, steps_s: float | None, learned: list[float]) -> None:
    silences = Silences()
    for one in learned:
        silences.learn(STEPS, one)
    made = pulse(steps_s, silences)
    made.take(0, 1, "", 0.0)
    ticked(made, 0.0, now)
    assert {one.rank for one in made.late(now, 0.7)} <= made.quiet(now, 0.7)
