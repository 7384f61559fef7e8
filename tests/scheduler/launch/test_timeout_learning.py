"""What is learned of how long ranks are silent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.launch.hang_detection import (
    DEFAULTS,
    ENOUGH,
    ENOUGH_STEPS,
    LEAST_S,
    OTHER_S,
    STEPS,
    Silences,
)


def taught(section: str, *values: float, times: int = 1) -> Silences:
    silences = Silences()
    for value in values * times:
        silences.learn(section, value)
    return silences


@pytest.mark.parametrize("section", [*DEFAULTS, "a word of the user's"])
def test_before_anything_is_known_there_is_a_generous_default(section: str) -> None:
    limit = Silences().limit(section)
    assert limit.seconds == DEFAULTS.get(section, OTHER_S) >= 180
    assert not limit.is_learned


def test_short_steps_are_given_ten_seconds() -> None:
    limit = taught(STEPS, 0.5, times=ENOUGH_STEPS).limit(STEPS)
    assert (limit.seconds, limit.is_learned) == (LEAST_S, True)


def test_long_steps_are_given_three_times_their_time() -> None:
    assert taught(STEPS, 60.0, times=ENOUGH_STEPS).limit(STEPS).seconds == 180.0


def test_one_silence_too_few_is_not_enough() -> None:
    assert not taught(STEPS, 0.5, times=ENOUGH_STEPS - 1).limit(STEPS).is_learned


def test_sections_are_learned_apart() -> None:
    silences = taught("evaluation", 100.0, times=ENOUGH)
    assert silences.limit("evaluation").seconds == 300.0
    assert not silences.limit(STEPS).is_learned


def test_an_epochs_slow_first_step_counts_once_it_is_seen_now_and_then() -> None:
    silences = taught(STEPS, *[0.5] * 60, 20.0)
    assert silences.limit(STEPS).seconds == 60.0


def test_one_hiccup_in_five_hundred_does_not_count_but_is_remembered() -> None:
    limit = taught(STEPS, *[0.5] * 500, 90.0).limit(STEPS)
    assert (limit.seconds, limit.longest_s) == (LEAST_S, 90.0)


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
def test_nobody_is_late_sooner_than_ten_seconds_or_than_nearly_all_silences_seen(values: list[float]) -> None:
    limit = taught(STEPS, *values).limit(STEPS)
    assert limit.seconds >= LEAST_S
    assert sum(value > limit.seconds for value in values[-512:]) <= 0.01 * len(values[-512:])
    assert limit.longest_s == max(values)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from(["silences", "longest", "count"]))
def test_a_file_that_holds_something_else_teaches_nothing(value: Any, spoilt: str) -> None:
    one = {"silences": [1.0], "longest": 1.0, "count": 1, spoilt: value}
    for text in (json.dumps(value), json.dumps({"sections": {"": one}}), "not json", ""):
        assert Silences.read(text).limit(STEPS).seconds >= LEAST_S


def test_what_is_no_time_is_not_learned() -> None:
    assert not taught(STEPS, float("nan"), float("inf"), -1.0).knows(STEPS)
