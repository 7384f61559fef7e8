"""Who is persistently slow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.hang_detection import IN_A_ROW, SLOW_LEAST_S, WINDOW, Stragglers, slow_ranks

STEP_S = SLOW_LEAST_S / (WINDOW * (IN_A_ROW - 1))
"""So that four windows are ten seconds."""
BOUND = WINDOW * (IN_A_ROW + 2)
"""Steps within which a straggler is found."""


def told(ranks: int, steps: int, times: dict[int, float], noise: float, seed: int) -> tuple[Stragglers, list[int]]:
    """Let ranks report every step, with noise; return what was found, and in which steps somebody was."""
    generator = random.Random(seed)  # noqa: S311 - noise
    found, when = Stragglers(), []
    recent: dict[int, list[float]] = {rank: [] for rank in range(ranks)}
    for step in range(1, steps + 1):
        for rank in range(ranks):
            took = 0.1 * times.get(rank, 1.0) * generator.lognormvariate(0.0, noise)
            recent[rank] = [*recent[rank], took][-WINDOW:]
            found.take(rank, step, sorted(recent[rank])[len(recent[rank]) // 2], step * STEP_S)
        if found.found:
            when.append(step)
    return found, when


@given(st.integers(3, 24), st.floats(0.0, 0.3), st.integers(0, 10_000))
def test_there_is_no_straggler_among_equals_whatever_the_noise(ranks: int, noise: float, seed: int) -> None:
    assert not told(ranks, 10 * WINDOW, {}, noise, seed)[1]


@given(st.integers(4, 16), st.floats(0.0, 0.05), st.integers(0, 10_000), st.data())
def test_a_rank_half_as_fast_again_is_found_within_bounded_steps(
    ranks: int, noise: float, seed: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    found, when = told(ranks, BOUND, {slow: 1.5}, noise, seed)
    assert when
    assert set(found.found) == {slow}
    assert 1.3 < found.found[slow].factor < 1.7


@given(st.integers(3, 16), st.integers(1, 60), st.floats(2, 100))
def test_one_hiccup_makes_no_straggler(ranks: int, at: int, times: float) -> None:
    found = Stragglers()
    for step in range(1, 8 * WINDOW):
        for rank in range(ranks):
            # The median over the window of the rank that hiccups does not see it; its worst window would.
            slow = rank == 0 and at <= step < at + 2 * WINDOW
            found.take(rank, step, 0.1 * (times if slow else 1.0), step * STEP_S)
        assert not found.found


@given(st.integers(2, 2 * WINDOW), st.integers(0, 2 * WINDOW), st.floats(2, 100))
def test_who_does_something_else_every_so_many_steps_is_not_slow(every: int, at: int, times: float) -> None:
    found = Stragglers()
    for step in range(1, 12 * WINDOW):
        for rank in range(4):
            # As measured by the loop itself, of that step alone.
            odd = rank == 0 and step % every == at % every
            found.take(rank, step, 0.1 * (times if odd else 1.0), step * STEP_S)
        assert not found.found


def test_slow_by_turns_is_nobody() -> None:
    found = Stragglers()
    for step in range(1, 20 * WINDOW):
        for rank in range(4):
            found.take(rank, step, 0.2 if step // (3 * WINDOW) % 4 == rank else 0.1, step * STEP_S)
        assert not found.found


def test_however_fast_the_steps_are_it_takes_ten_seconds_to_last() -> None:
    found, step_s = Stragglers(), 0.001
    for step in range(1, int(1.2 * SLOW_LEAST_S / step_s), 300):  # a report every 0.3 s
        for rank in range(4):
            found.take(rank, step, 0.002 if rank == 3 else 0.001, step * step_s)
        assert bool(found.found) is (step * step_s >= SLOW_LEAST_S + 0.3), step


def test_who_is_fast_again_is_forgotten() -> None:
    found = Stragglers()
    for step in range(1, 20 * WINDOW):
        for rank in range(4):
            found.take(rank, step, 0.2 if rank == 3 and step < 10 * WINDOW else 0.1, step * STEP_S)
        if step == 9 * WINDOW:
            assert set(found.found) == {3}
    assert not found.found


@pytest.mark.parametrize(
    ("work", "slow"),
    [
        ([1.0, 2.0], []),
        ([1.0, 1.0, 2.0], [2]),
        ([1.0, 1.0, 1.2], []),
        ([1.0, 1.0, 2.0, 2.0], []),
        ([0.0, 0.0, 0.0, 2.0], []),
        ([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 3.0, 1.0], [6]),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], []),
    ],
)
def test_who_is_slow_in_one_window(work: list[float], slow: list[int]) -> None:
    assert sorted(slow_ranks(dict(enumerate(work)))) == slow


@given(st.lists(st.floats(1e-6, 1e6), min_size=0, max_size=40))
def test_at_most_a_third_is_slow(work: list[float]) -> None:
    assert 3 * len(slow_ranks(dict(enumerate(work)))) <= len(work)


def test_what_is_not_measured_is_not_compared() -> None:
    found = Stragglers()
    for step in range(1, 20 * WINDOW):
        for rank, work in enumerate((0.0, float("nan"), float("inf"), -1.0)):
            found.take(rank, step, work, step * STEP_S)
    assert not found.found
