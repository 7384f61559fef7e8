"""Who is told how much: one message each in calm, gathered ones in a storm and of a node that flaps, none lost."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.watch.notify.channels import ChannelRate, Pacer
from tests.scheduler.watch.notify.things import dead, news

PACE = ChannelRate(burst=3, every_s=60.0, flaps=2, window_s=600.0)


def all_sent(pacer: Pacer, waiting: list[IncidentNews], now: float) -> list[list[int]]:
    """Send what may be sent now; return the jobs of each message."""
    told = []
    while (turn := pacer.turn(waiting, now)).batch:
        pacer.sent(turn.batch, now)
        told.append([one.incident.attempt.job for one in turn.batch if one.incident.attempt])
        for one in turn.batch:
            waiting.remove(one)
    return told


def test_in_calm_each_is_a_message_of_its_own_and_in_order() -> None:
    assert all_sent(Pacer(PACE), [news(job, f"n{job}") for job in (1, 2, 3)], 0.0) == [[1], [2], [3]]


def test_a_storm_is_one_message_and_what_comes_after_waits_for_the_next() -> None:
    pacer = Pacer(PACE)
    assert all_sent(pacer, [news(job, f"n{job}") for job in range(1, 3)], 0.0) == [[1], [2]]
    assert all_sent(pacer, [news(job, f"n{job}") for job in range(3, 50)], 1.0) == [list(range(3, 50))]
    late = [news(job, f"n{job}") for job in (50, 51)]
    assert all_sent(pacer, late, 2.0) == []
    wait = pacer.turn(late, 2.0).wait_s
    assert wait is not None
    assert 50 < wait <= 60
    assert all_sent(pacer, late, 2.0 + wait) == [[50, 51]]


def test_a_node_that_flaps_is_gathered_until_the_window_is_over() -> None:
    pacer = Pacer(PACE)
    assert all_sent(pacer, [news(1)], 0.0) == [[1]]
    assert all_sent(pacer, [news(2)], 100.0) == [[2]]
    waiting = [news(3), news(4, "n2")]
    assert all_sent(pacer, waiting, 200.0) == [[4]], "others are told"
    waiting.append(news(5))
    assert pacer.turn(waiting, 300.0).wait_s == 300.0
    assert all_sent(pacer, waiting, 599.0) == []
    assert all_sent(pacer, waiting, 601.0) == [[3, 5]]


def test_what_is_critical_does_not_wait_for_a_node_that_flaps() -> None:
    pacer = Pacer(PACE)
    for job in (1, 2):
        all_sent(pacer, [news(job)], 0.0)
    assert all_sent(pacer, [news(3), news(4, outcome=IncidentOutcome.FAILED)], 1.0) == [[4]]


@given(
    st.lists(st.tuples(st.floats(0, 400), st.sampled_from(["n0", "n1", "n2", None]), st.booleans()), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_everything_is_told_once_within_bounds_and_in_order(
    arrivals: list[tuple[float, str | None, bool]], burst: int, flaps: int
) -> None:
    pace = ChannelRate(burst=burst, every_s=60.0, flaps=flaps, window_s=300.0)
    pacer, now, waiting = Pacer(pace), 0.0, list[IncidentNews]()
    messages: list[tuple[float, list[IncidentNews]]] = []
    incoming = [
        (
            gap,
            IncidentNews(
                dataclasses.replace(
                    dead(job),
                    node=NodeName(node) if node else None,
                    outcome=IncidentOutcome.FAILED if grave else IncidentOutcome.OPEN,
                )
            ),
        )
        for job, (gap, node, grave) in enumerate(arrivals, 1)
    ]
    pending = list(incoming)
    while pending or waiting:
        turn = pacer.turn(waiting, now)
        if turn.batch:
            pacer.sent(turn.batch, now)
            messages.append((now, list(turn.batch)))
            waiting = [one for one in waiting if one not in turn.batch]
            continue
        next_s = pending[0][0] if pending else float("inf")
        wait_s = turn.wait_s if turn.wait_s is not None and waiting else float("inf")
        assert min(next_s, wait_s) < float("inf"), "news wait for nothing"
        now += min(next_s, wait_s) + 1e-6
        if next_s <= wait_s:
            waiting.append(pending.pop(0)[1])
        else:
            pending = [
                (gap - wait_s, one) if place == 0 else (gap, one) for place, (gap, one) in enumerate(pending)
            ]
    told = [one for _, batch in messages for one in batch]
    assert sorted(told, key=str) == sorted((one for _, one in incoming), key=str)
    for _, batch in messages:
        jobs = [one.incident.attempt.job for one in batch if one.incident.attempt]
        assert jobs == sorted(jobs)
    for at, _ in messages:
        within = [other for other, _ in messages if at <= other < at + 600]
        assert len(within) <= burst + 11
