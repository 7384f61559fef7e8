"""The place of an agent that was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.environment import SEATS_VARIABLE, NodeFacts, leave_seats, seat_in

N1 = NodeName("n1")


def test_each_node_finds_its_own_and_only_that(tmp_path: Path) -> None:
    file = "/run/d-n1-x/token"
    left = leave_seats(tmp_path, {N1: NodeFacts(node="n1", address="10.0.0.1:41233", token_file=file)})
    assert seat_in({SEATS_VARIABLE: str(left)}, "n1") == (41233, Path("/run/d-n1-x"))
    assert seat_in({SEATS_VARIABLE: str(left)}, "n2") is None
    assert seat_in({}, "n1") is None


ODD = st.sampled_from(['{"n1":[0,"/a/b"]}', '{"n1":[7,""]}', '{"n1":[7,"a/b"]}', '{"n1":7}', "[]"])


@given(text=st.text() | ODD)
def test_what_cannot_be_read_is_no_place(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("job") / "seats"
    assert seat_in({SEATS_VARIABLE: str(file)}, "n1") is None
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert seat_in({SEATS_VARIABLE: str(file)}, "n1") is None
