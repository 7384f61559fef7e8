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
    RankActivity,
    activity,
)
from deeplink.scheduler.launch.hang_detection import (
    ENOUGH_STEPS,
    IDLE_S,
    IDLE_SETUP_S,
    STEPS,
    UNHEARD_S,
    WATCHED_IDLE_S,
    LateRank,
    ProgressClock,
    Silences,
    hung,
    stopped,
)


def knowing(seconds: float = 0.5) -> Silences:
    silences = Silences()
    for _ in range(ENOUGH_STEPS):
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
    while now < 41.0:
        now, step = now + 0.5, step + 1
        made.tick(now)
        made.take(0, step, "", now)
    (late,) = made.late(now)
    assert (late.rank, late.limit_s, late.is_learned) == (1, 10.0, True)
    assert not made.are_all([late])


def test_the_same_step_again_is_nothing_new() -> None:
    made = running(pulse(), 5.0, 0)
    now = ticked(made, 5.0, 16.0)
    made.take(0, 3, "", now)
    assert made.late(now)


def test_time_in_which_we_did_not_run_ourselves_counts_for_nobody() -> None:
    made = running(pulse(), 30.0, 0, 1)
    made.tick(900.0)  # the whole job was suspended
    assert not made.late(901.0)


def test_another_section_has_a_limit_of_its_own_and_is_told_by_its_entry() -> None:
    made = running(pulse(), 30.0, 0, 1)
    made.take(0, 60, "evaluation", 30.0)
    now = ticked(made, 30.0, 45.0)
    assert [one.rank for one in made.late(now)] == [1]
    assert made.has_sections
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
    now = ticked(made, 0.0, 61.0)
    assert [(one.rank, one.section) for one in made.late(now)] == [(0, "setup"), (1, "setup"), (2, "setup")]


def test_setting_up_is_a_section_until_the_first_step() -> None:
    made = pulse(silences=Silences())
    made.take(0, None, "setup", 1.0)
    now = ticked(made, 0.0, 599.0)
    assert not made.late(now)
    assert made.is_setting_up
    assert not made.has_sections
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


def test_patience_with_ranks_that_do_not_work() -> None:
    made = running(pulse(), 300.0, 0)
    now = ticked(made, 300.0, 315.0)
    assert made.patience_s(made.late(now)) == IDLE_S
    now = ticked(made, now, 700.0)
    made.take(0, 1000, "", now)
    now = ticked(made, now, 740.0)
    assert made.patience_s(made.late(now)) == pytest.approx(1200.0), "three times the longest that ended well"
    new = pulse()
    now = ticked(new, 0.0, 100.0)
    assert new.patience_s(new.late(now)) == IDLE_SETUP_S


late_ranks = st.builds(
    LateRank,
    rank=st.integers(0, 9),
    section=st.sampled_from(["", "setup", "evaluation"]),
    silent_s=st.floats(10, 10_000),
    limit_s=st.just(10.0),
    is_learned=st.booleans(),
)


@given(
    st.lists(late_ranks, max_size=4),
    st.booleans(),
    st.sampled_from(ActivityAnswer),
    st.floats(0, 10_000),
    st.floats(600, 5000),
    st.booleans(),
)
def test_time_alone_restarts_nobody_unless_somebody_set_it(  # noqa: PLR0917 - drawn
    late: list[LateRank], all_late: bool, answer: ActivityAnswer, idle_s: float, patience_s: float, is_set: bool
) -> None:
    because = hung(
        late,
        all_late=all_late,
        seen=RankActivity(answer=answer, ranks=(3,) if answer is ActivityAnswer.STOPPED else ()),
        idle_s=idle_s if answer is ActivityAnswer.IDLE else 0.0,
        patience_s=patience_s,
        is_set=is_set,
    )
    if not late:
        assert not because
    elif answer is ActivityAnswer.STOPPED:
        assert "rank 3 is stopped" in because
    elif because:
        assert all_late
        assert is_set or (answer is ActivityAnswer.IDLE and idle_s >= WATCHED_IDLE_S)
        assert is_set or min(one.silent_s for one in late) > patience_s >= IDLE_S


@given(st.lists(st.tuples(st.floats(0.1, 400.0), st.booleans()), min_size=1, max_size=12), st.integers(0, 99))
def test_a_clean_job_is_never_restarted_whatever_its_pauses(pauses: list[tuple[float, bool]], seed: int) -> None:
    """Of two ranks one pauses as it likes, at work or asleep; the other waits for it. Nobody declares anything."""
    made, watch = running(pulse(silences=Silences()), 30.0, 0, 1), ActivityHistory()
    now, cpu, step = 30.0, 0.0, 1000
    for seconds, works in pauses:
        until = now + seconds
        while now < until:
            now = min(until, now + 0.9)
            cpu += 0.9 if works else 0.0
            made.tick(now)
            if made.late(now, 0.7):
                asleep = "SDR"[seed % 3]
                watch.look(
                    {0: ProcessSnapshot(state=asleep, cpu_s=cpu), 1: ProcessSnapshot(state="S", cpu_s=0.0)}, now, 2
                )
            else:
                watch.forget()
            late = made.late(now)
            assert not hung(
                late,
                all_late=made.are_all(late),
                seen=watch.newest,
                idle_s=watch.idle_s(),
                patience_s=made.patience_s(late),
                is_set=False,
            )
        step += 1
        for rank in (0, 1):
            made.take(rank, step, "", now)


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
    assert not stopped(watch.newest, watch.stopped_s(), is_heard=True)
    looked(watch, 12.0, 12.0, R, T)
    assert stopped(watch.newest, watch.stopped_s(), is_heard=True).startswith(
        "rank 1 is stopped by a signal, for 12"
    )
    assert not stopped(watch.newest, watch.stopped_s(), is_heard=False), "who knows what the others do"
    looked(watch, 15.0, UNHEARD_S, R, T)
    assert stopped(watch.newest, watch.stopped_s(), is_heard=False)
    looked(watch, 33.0, 33.0, R, R)
    assert watch.stopped_s() == 0.0


def test_all_of_them_stopped_is_no_hang_however_long() -> None:
    watch = ActivityHistory()
    looked(watch, 0.0, 90.0, T, T)
    assert not stopped(watch.newest, watch.stopped_s(), is_heard=True)


def test_what_was_between_looks_far_apart_is_not_known() -> None:
    watch = ActivityHistory()
    looked(watch, 0.0, 3.0, R, T)
    looked(watch, 3.5 + UNBROKEN_S, 3.5 + UNBROKEN_S, R, T)
    assert watch.stopped_s() == 0.0


def test_who_reports_is_not_quiet_and_while_nobody_does_all_are() -> None:
    made = running(pulse(silences=Silences()), 5.0, 0, 1)
    assert not made.quiet(5.0)
    now = ticked(made, 5.0, 16.0)
    assert [one.rank for one in made.quiet(now)] == [0, 1]
    assert not made.late(now), "nothing was learned"
    unheard = pulse(silences=Silences(), world=3)
    now = ticked(unheard, 0.0, 11.0)
    assert (len(unheard.quiet(now)), unheard.is_heard) == (3, False)


def test_a_rank_that_was_never_heard_of_is_missed_where_most_others_were() -> None:
    made = running(pulse(world=3), 20.0, 0, 2)
    assert [one.rank for one in made.quiet(20.0)] == [1]
    assert not running(pulse(world=3), 20.0, 0).quiet(20.0), "only rank 0 reports, as in many jobs"


@given(st.floats(0, 400), st.none() | st.floats(0.1, 600), st.lists(st.floats(0, 300), max_size=60))
def test_who_is_late_is_quiet(now: float, steps_s: float | None, learned: list[float]) -> None:
    silences = Silences()
    for one in learned:
        silences.learn(STEPS, one)
    made = pulse(steps_s, silences)
    made.take(0, 1, "", 0.0)
    ticked(made, 0.0, now)
    assert {one.rank for one in made.late(now, 0.7)} <= {one.rank for one in made.quiet(now, 0.7)}
