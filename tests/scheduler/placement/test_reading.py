"""Where samples come from, told from how much of the data a job's nodes hold."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.placement.model import ReadSpeeds, check_reads
from deeplink.scheduler.placement.predicted import reads_of

KNOWN = ReadSpeeds(local=3e9, peer=1e9, source=0.2e9, source_of_all=0.5e9)


@given(st.floats(0, 1), st.integers(1, 512))
def test_the_shares_come_to_one(held: float, nodes: int) -> None:
    found = reads_of(KNOWN, held, nodes)
    assert found is not None
    check_reads(found)
    assert [read.name for read in found] == ["local", "peer", "source"]


def test_four_nodes_that_hold_half_of_it() -> None:
    assert [(read.share, read.bandwidth) for read in reads_of(KNOWN, 0.5, 4) or ()] == [
        (0.125, 3e9),
        (0.375, 1e9),
        (0.5, 0.5e9),
    ]


def test_the_source_is_as_fast_as_the_slower_limit() -> None:
    def source(known: ReadSpeeds, nodes: int) -> tuple[float, bool]:
        found = reads_of(known, 0.0, nodes)
        assert found is not None
        return found[-1].bandwidth, found[-1].shared

    assert source(KNOWN, 2) == (0.2e9, False)
    assert source(KNOWN, 3) == (0.5e9, True)
    assert source(ReadSpeeds(local=3e9, peer=1e9, source=0.2e9, source_of_all=inf), 512) == (0.2e9, False)


@pytest.mark.parametrize(
    "known", [ReadSpeeds(), ReadSpeeds(local=1e9, source=1e9), ReadSpeeds(local=1e9, peer=1e9)]
)
def test_a_place_that_was_not_timed_leaves_reading_out(known: ReadSpeeds) -> None:
    assert reads_of(known, 1.0, 2) is None


def test_one_node_has_no_peers() -> None:
    found = reads_of(ReadSpeeds(local=3e9, source=0.2e9), 0.75, 1)
    assert [(read.name, read.share) for read in found or ()] == [("local", 0.75), ("source", 0.25)]
