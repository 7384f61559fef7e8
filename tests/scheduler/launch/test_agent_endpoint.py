"""The place of an agent that was lost."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.environment import SEATS_VARIABLE, AgentEndpoint, NodeFacts, packed_seats, seat_in

N1 = NodeName("n1")


def test_each_node_finds_its_own_and_only_that() -> None:
    file = "/run/d-n1-x/token"
    text = packed_seats({N1: NodeFacts(node="n1", address="10.0.0.1:41233", token_file=file)})
    assert seat_in({SEATS_VARIABLE: text}, "n1") == AgentEndpoint(port=41233, folder=Path("/run/d-n1-x"))
    assert seat_in({SEATS_VARIABLE: text}, "n2") is None
    assert seat_in({}, "n1") is None


@given(st.text() | st.sampled_from(['{"n1":[0,"/a/b"]}', '{"n1":[7,""]}', '{"n1":[7,"a/b"]}', '{"n1":7}', "[]"]))
def test_what_cannot_be_read_is_no_place(text: str) -> None:
    assert seat_in({SEATS_VARIABLE: text}, "n1") is None
