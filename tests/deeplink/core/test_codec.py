"""Frozen values to JSON, rows and messages and back: what is absent, older, newer or too much."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import pytest

from deeplink.core.codec import LARGEST, LONGEST_TEXT, from_message, from_row, to_json, to_message, to_row
from deeplink.core.types import Attempt
from deeplink.scheduler.recovery.records import Moment, Phase
from deeplink.v1 import common_pb2, watch_pb2


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    name: str
    colour: Colour = Colour.RED
    attempt: Attempt | None = None
    parts: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    size: int | None = None


WHOLE = Thing(
    name="a",
    colour=Colour.BLUE,
    attempt=Attempt(17, 0, 2),
    parts=("x", "y"),
    moments=(Moment(1.0, "began"),),
    figures={"loss": 0.5},
    size=0,
)


@pytest.mark.parametrize("thing", [WHOLE, Thing(name="a")])
def test_a_row_holds_all_of_it(thing: Thing) -> None:
    assert from_row(Thing, to_row(thing)) == thing


def test_the_columns_are_plain_values() -> None:
    assert to_row(WHOLE, leave_out=("figures",)) == {
        "name": "a",
        "colour": "blue",
        "job": 17,
        "restart": 0,
        "relaunch": 2,
        "parts": '["x", "y"]',
        "moments": '[[1.0, "began"]]',
        "size": 0,
    }
    assert to_row(Thing(name="a"))["job"] is None


def test_an_older_row_has_the_defaults_and_a_newer_one_more() -> None:
    assert from_row(Thing, {"name": "a", "later": 1}) == Thing(name="a")


def test_json_of_values_in_values() -> None:
    assert json.loads(to_json({"one": WHOLE}))["one"] == {
        "name": "a",
        "colour": "blue",
        "attempt": [17, 0, 2],
        "parts": ["x", "y"],
        "moments": [[1.0, "began"]],
        "figures": {"loss": 0.5},
        "size": 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    attempt: Attempt | None = None
    phase: Phase = Phase.STARTING
    nodes: tuple[str, ...] = ()
    world_size: int = 0
    step_timeout_s: float = 0.0
    detail: str = "nothing"
    called: str | None = field(default=None, metadata={"wire": "job_label"})
    elsewhere: int = 7


HEARD = Heard(attempt=Attempt(17, 0, 0), phase=Phase.FAILED, nodes=("n1",), world_size=4, called="12_3")


def test_a_message_holds_what_it_has_fields_for() -> None:
    message = to_message(HEARD, watch_pb2.BeatRequest)
    assert message.phase == watch_pb2.PHASE_FAILED
    assert message.job_label == "12_3"
    assert from_message(Heard, message) == HEARD
    assert from_message(Heard, message, leave_out=("attempt",)).attempt is None


def test_what_a_message_does_not_set_is_absent_or_the_default() -> None:
    message = watch_pb2.BeatRequest(phase=watch_pb2.PHASE_RUNNING)
    assert from_message(Heard, message) == Heard(phase=Phase.RUNNING)


def test_a_text_that_is_too_long_loses_its_end() -> None:
    message = watch_pb2.BeatRequest(phase=watch_pb2.PHASE_RUNNING, detail="x" * (LONGEST_TEXT + 1))
    assert len(from_message(Heard, message).detail) == LONGEST_TEXT


@pytest.mark.parametrize(
    "message",
    [
        watch_pb2.BeatRequest(),
        watch_pb2.BeatRequest(phase=watch_pb2.PHASE_RUNNING, step_timeout_s=float("nan")),
        watch_pb2.BeatRequest(phase=watch_pb2.PHASE_RUNNING, step_timeout_s=-1.0),
        watch_pb2.BeatRequest(phase=watch_pb2.PHASE_RUNNING, attempt=common_pb2.Attempt(job=LARGEST + 1)),
    ],
)
def test_what_cannot_be_kept_is_refused(message: watch_pb2.BeatRequest) -> None:
    with pytest.raises(ValueError, match=r"none|number"):
        from_message(Heard, message)
