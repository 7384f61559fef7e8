"""What is learned of how long ranks are silent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.hang_detection import (
    FACTOR,
    LEAST_S,
    SETUP,
    SETUP_S,
    STEPS,
    UNKNOWN_S,
    Silences,
)


def taught(section: str, *values: float, times: int = 1) -> Silences:
    silences = Silences()
    for value in values * times:
        silences.learn(section, value)
    return silences


@pytest.mark.parametrize("section", [SETUP, STEPS, "evaluation", "a word of the user's"])
def test_before_a_section_has_ended_once_its_limit_is_generous(section: str) -> None:
    silences = Silences()
    assert silences.limit(section) == (SETUP_S if section == SETUP else UNKNOWN_S) >= 600
    assert not silences.knows(section)


def test_short_steps_are_given_half_a_minute_from_the_first_one_on() -> None:
    silences = taught(STEPS, 0.5)
    assert (silences.limit(STEPS), silences.knows(STEPS)) == (LEAST_S, True)


def test_long_steps_are_given_five_times_their_time() -> None:
    assert taught(STEPS, 60.0).limit(STEPS) == 300.0


def test_sections_are_learned_apart() -> None:
    silences = taught("evaluation", 100.0)
    assert silences.limit("evaluation") == 500.0
    assert not silences.knows(STEPS)


def test_an_epochs_slow_first_step_counts_once_it_is_seen_now_and_then() -> None:
    silences = taught(STEPS, *[0.5] * 60, 20.0)
    assert silences.limit(STEPS) == 100.0


def test_one_hiccup_in_five_hundred_does_not_count() -> None:
    assert taught(STEPS, *[0.5] * 500, 90.0).limit(STEPS) == LEAST_S


silence = st.floats(0, 1e5)


@given(st.lists(st.tuples(st.sampled_from(["", "setup", "checkpoint", "mine"]), silence), max_size=200))
def test_what_is_kept_is_read_back(seen: list[tuple[str, float]]) -> None:
    silences = Silences()
    for section, seconds in seen:
        silences.learn(section, round(seconds, 3))
    again = Silences.read(silences.as_text())
    for section in ("", "setup", "checkpoint", "mine", "never"):
        assert again.limit(section) == silences.limit(section)


@given(st.lists(silence, min_size=1, max_size=600))
def test_nobody_is_late_sooner_than_by_five_times_nearly_all_silences_seen(
    values: list[float],
) -> None:
    limit = taught(STEPS, *values).limit(STEPS)
    assert limit >= LEAST_S
    assert sum(FACTOR * value > limit for value in values[-512:]) <= 0.01 * len(values[-512:])


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from(["silences", "longest", "count"]))
def test_a_file_that_holds_something_else_teaches_nothing(value: Any, spoilt: str) -> None:
    one = {"silences": [1.0], "longest": 1.0, "count": 1, spoilt: value}
    for text in (json.dumps(value), json.dumps({"sections": {"": one}}), "not json", ""):
        assert Silences.read(text).limit(STEPS) >= LEAST_S


def test_what_is_no_time_is_not_learned() -> None:
    assert not taught(STEPS, float("nan"), float("inf"), -1.0).knows(STEPS)
