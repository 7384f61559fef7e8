from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.node.slurmd import STABLE_S, Restarts, RestartStep, next_step


def steps(*looks: tuple[float, bool], most: int = 3) -> list[RestartStep]:
    before, found = Restarts(), []
    for now, alive in looks:
        step, before = next_step(before, alive=alive, now=now, most=most)
        found.append(step)
    return found


def test_it_is_started_anew_at_the_second_look_that_misses_it() -> None:
    assert steps((0, True), (2, False), (4, False)) == [RestartStep.NOTHING, RestartStep.WAIT, RestartStep.RESTART]
    assert steps((0, True), (2, False), (4, True)) == [RestartStep.NOTHING, RestartStep.WAIT, RestartStep.NOTHING]


def test_tries_have_pauses_and_end() -> None:
    looks = [(float(now), False) for now in range(0, 200, 2)]
    found = steps(*looks)
    assert [looks[n][0] for n, step in enumerate(found) if step is RestartStep.RESTART] == [2, 8, 38]
    assert found[-1] is RestartStep.GIVEN_UP


def test_one_that_lives_on_may_die_as_often_again() -> None:
    long = [(float(now), True) for now in (100, 100 + STABLE_S)]
    dead = [(float(now), False) for now in range(1000, 1200, 2)]
    found = steps(*[(float(now), False) for now in range(0, 90, 2)], *long, *dead)
    assert found.count(RestartStep.RESTART) == 6


@given(st.lists(st.tuples(st.floats(0.1, 100), st.booleans()), max_size=100), st.integers(1, 4))
def test_it_is_never_started_more_often_than_allowed_between_stable_lives(
    looks: list[tuple[float, bool]], most: int
) -> None:
    before, now, tries, alive_since = Restarts(), 0.0, 0, None
    for step_s, alive in looks:
        now += step_s
        step, before = next_step(before, alive=alive, now=now, most=most)
        if alive:
            assert step is RestartStep.NOTHING
            alive_since = now if alive_since is None else alive_since
            if now - alive_since >= STABLE_S:
                tries = 0
        else:
            alive_since = None
        tries += step is RestartStep.RESTART
        assert tries <= most
