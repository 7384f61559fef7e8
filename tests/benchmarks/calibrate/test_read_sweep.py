"""Reading timed by ranks becomes bandwidth of places."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.calibrate.sweep import MeasuredRead, ReadPlace, ReadSweep, reads_from
from deeplink.scheduler.placement.model.constants import ReadSpeeds


def sweep(place: ReadPlace, *told: tuple[int, int, float]) -> ReadSweep:
    return ReadSweep(place, tuple(MeasuredRead(*one) for one in told))


def test_ranks_of_a_node_count_together_and_the_slowest_node_is_waited_for() -> None:
    local = sweep(ReadPlace.LOCAL, (0, 100, 1.0), (0, 300, 2.0), (1, 200, 1.0), (1, 0, 0.0))
    assert local.per_node() == {0: 250.0, 1: 200.0}
    assert local.bandwidth == 200.0


def test_nothing_read_is_not_timed_and_says_why() -> None:
    lost = ReadSweep(ReadPlace.PEER, (MeasuredRead(0, problem="no other node gave any of it"), MeasuredRead(1)))
    assert (lost.bandwidth, lost.problem) == (None, "no other node gave any of it")
    assert ReadSweep(ReadPlace.PEER, ()).problem == "there was nothing to read"
    assert reads_from([lost]) == ReadSpeeds()
    half = ReadSweep(ReadPlace.LOCAL, (MeasuredRead(0, problem="nothing"), MeasuredRead(1, 10, 1.0)))
    assert (half.bandwidth, half.problem) == (10.0, "")


@pytest.mark.parametrize(("seconds", "limit"), [(1.0, inf), (1.2, inf), (1.3, 200 / 1.3), (2.0, 100.0)])
def test_a_limit_of_the_source_shows_when_all_read_at_once(seconds: float, limit: float) -> None:
    alone = sweep(ReadPlace.SOURCE, (0, 100, 1.0))
    together = sweep(ReadPlace.TOGETHER, (0, 100, seconds), (1, 100, seconds))
    found = reads_from([alone, together])
    assert found.source == 100.0
    assert found.source_of_all == pytest.approx(limit)
    assert reads_from([together]) == ReadSpeeds()
