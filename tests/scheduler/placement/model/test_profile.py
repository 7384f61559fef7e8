"""A job's profile as JSON: there and back, by hand, and what else a file may hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model.job_profile import (
    Algorithm,
    Job,
    Profile,
    Scaling,
    profile_from,
    profile_text,
)
from tests.scheduler.placement.model.models import jobs

BY_HAND: dict[str, Any] = {"format": 1, "batch": 32, "sample_s": 0.0044, "gradient_bytes": 102e6}


@given(st.builds(Profile, jobs, st.none() | st.integers(1, 64)))
def test_there_and_back(profile: Profile) -> None:
    assert profile_from(profile_text(profile), "file") == profile
    assert "\n" not in profile_text(profile)


def test_by_hand_three_values_do() -> None:
    found = profile_from(json.dumps(BY_HAND), "file")
    assert found == Profile(Job(batch=32, sample_s=0.0044, gradient_bytes=102e6))
    more = profile_from(json.dumps(BY_HAND | {"scaling": "strong", "algorithm": "ring"}), "file")
    assert (more.job.scaling, more.job.algorithm) == (Scaling.STRONG, Algorithm.RING)


def test_a_measured_step_of_one_rank_does_too() -> None:
    measured = {"format": 1, "batch": 32, "step_s": 0.15, "fixed_s": 0.022, "gradient_bytes": 102e6}
    assert profile_from(json.dumps(measured), "file").job.sample_s == pytest.approx(0.004)
    with pytest.raises(DeepLinkError, match="step_s"):
        profile_from(json.dumps(measured | {"sample_s": 0.004}), "file")
    with pytest.raises(DeepLinkError, match="'1', no number"):
        profile_from(json.dumps(measured | {"step_s": "1"}), "file")
    with pytest.raises(DeepLinkError, match="measured step"):
        profile_from(json.dumps(measured | {"step_s": 0.01}), "file")


def test_ranks_are_those_told_or_one_on_each_gpu() -> None:
    plain = profile_from(json.dumps(BY_HAND), "file")
    assert [plain.ranks(8), plain.ranks(0)] == [8, 1]
    assert profile_from(json.dumps(BY_HAND | {"ranks_per_node": 2}), "file").ranks(8) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format 1"),
        (json.dumps(BY_HAND | {"format": 2}), "format 1"),
        (json.dumps(BY_HAND | {"colour": "red"}), "colour"),
        ('{"format": 1, "batch": 3}', "gradient_bytes, sample_s"),
        (json.dumps(BY_HAND | {"sample_s": "fast"}), "'fast', no number"),
        (json.dumps(BY_HAND | {"sample_s": None}), "None, no number"),
        (json.dumps(BY_HAND | {"batch": 1.5}), "1.5, no whole number"),
        (json.dumps(BY_HAND | {"ranks_per_node": True}), "True, no number"),
        (json.dumps(BY_HAND | {"scaling": "odd"}), "weak or strong"),
        (json.dumps(BY_HAND | {"scaling": ["weak"]}), "weak or strong"),
    ],
)
def test_something_else_is_named(text: str, problem: str) -> None:
    with pytest.raises(DeepLinkError, match=problem) as refused:
        profile_from(text, "bert.json")
    assert "bert.json" in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("values", [{"batch": 0}, {"overlap": 2}, {"ranks_per_node": 0}, {"sample_s": -1}])
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DeepLinkError, match=r"must be|is no number"):
        profile_from(json.dumps(BY_HAND | values), "bert.json")
