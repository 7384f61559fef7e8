"""Constants as JSON: there and back, and what else a file may hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.placement.model.constants import (
    Constants,
    ReadSpeeds,
    constants_from,
    constants_text,
)
from tests.scheduler.placement.model.models import constants


@given(constants)
def test_there_and_back(known: Constants) -> None:
    assert constants_from(constants_text(known), "file") == known


def test_no_limit_is_null() -> None:
    stored = json.loads(constants_text(Constants()))
    assert stored["path_bandwidth"] is None
    assert stored["nic"] == {"bandwidth": 12e9, "latency_s": 14e-6}
    assert stored["reads"] == {"source_of_all": None}
    assert constants_from(json.dumps(stored), "file") == Constants()


@given(constants)
def test_what_was_written_before_reading_was_timed_is_read(known: Constants) -> None:
    older = json.loads(constants_text(replace(known, reads=ReadSpeeds()))) | {"format": 1}
    del older["reads"]
    assert constants_from(json.dumps(older), "file") == replace(known, reads=ReadSpeeds())


def changed(**values: Any) -> str:
    return json.dumps(json.loads(constants_text(Constants())) | values)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[]", "format 1 or 2"),
        ("{}", "format 1 or 2"),
        (changed(format=3), "format 1 or 2"),
        (changed(reads=None), "reads is no object"),
        (changed(reads={"local": 1, "moon": 1}), "reads is no object"),
        (changed(reads={"local": "fast"}), "'fast' is no number"),
        (changed(colour="red"), "colour"),
        ('{"format": 1, "nics": 1}', "gpu"),
        (changed(nic=3), "nic is no object"),
        (changed(nic={"bandwidth": 1}), "latency_s"),
        (changed(nic={"bandwidth": "fast", "latency_s": 0}), "'fast' is no number"),
        (changed(straggling=True), "True is no number"),
        (changed(nics=1.5), "1.5 is no number of ports"),
    ],
)
def test_something_else_is_named(text: str, problem: str) -> None:
    with pytest.raises(DeepLinkError, match=problem) as refused:
        constants_from(text, "site.json")
    assert "site.json" in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"straggling": -1},
        {"nic": {"bandwidth": 0, "latency_s": 0}},
        {"straggling": None},
        {"reads": {"local": 0}},
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DeepLinkError, match=r"must be|is no number"):
        constants_from(changed(**values), "site.json")
