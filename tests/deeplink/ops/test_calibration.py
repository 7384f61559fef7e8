"""Samples read from one place alone, and counted as from there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from deeplink.cache.errors import DatasetMissingError
from deeplink.core.clock import SystemClock
from deeplink.core.config import Config
from deeplink.ops.calibration import ReadBounds, ReadTimer
from deeplink.scheduler.placement.sweep import RankLocation, ReadPlace
from tests.deeplink.data.packed_things import COUNT, packed_below

MUCH = ReadBounds(bytes=1 << 30, seconds=60.0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("packed"))


def timer(
    config: Config,
    bounds: ReadBounds = MUCH,
    *,
    rank: int = 0,
    node: int = 0,
    ranks: int = 1,
    dataset: str = "even",
) -> ReadTimer:
    return ReadTimer(dataset, config, RankLocation(rank, node), bounds, SystemClock(), ranks=ranks)


@pytest.mark.parametrize("place", [ReadPlace.LOCAL, ReadPlace.SOURCE, ReadPlace.TOGETHER])
def test_each_sample_is_read_once_and_counted(packed: Config, place: ReadPlace) -> None:
    with timer(packed, node=7) as reading:
        found = reading.read(place)
        rows = len(reading.rows(place))
    # A quarter of the samples are this place's; the first one is read before the clock starts.
    assert rows == COUNT // 4
    assert (found.node, found.bytes, found.problem) == (7, (rows - 1) * 100, "")
    assert found.seconds > 0
    assert found.rate == found.bytes / found.seconds


def test_no_two_ranks_and_no_two_places_read_the_same(packed: Config) -> None:
    taken = []
    for rank in range(3):
        with timer(packed, rank=rank, ranks=3, node=rank) as reading:
            taken += [
                set(reading.rows(place).tolist())
                for place in (ReadPlace.LOCAL, ReadPlace.SOURCE, ReadPlace.TOGETHER)
            ]
    assert all(one.isdisjoint(other) for one, other in combinations(taken, 2))
    assert all(taken)


def test_bounds_are_kept(packed: Config) -> None:
    with timer(packed, ReadBounds(bytes=1, seconds=60.0)) as reading:
        assert reading.read(ReadPlace.LOCAL).bytes <= 64 * 100
    with timer(packed, ReadBounds(bytes=1 << 30, seconds=0.0)) as reading:
        assert reading.read(ReadPlace.SOURCE).bytes <= 64 * 100


def test_what_is_nowhere_is_a_problem_and_no_failure(packed: Config, tmp_path: Path) -> None:
    with timer(packed) as reading:
        alone = reading.read(ReadPlace.PEER)
    assert (alone.bytes, alone.problem) == (0, "no other node gave any of it")
    with timer(replace(packed, store=tmp_path / "empty")) as reading:
        assert "empty" in reading.read(ReadPlace.LOCAL).problem
    (tmp_path / "empty").mkdir()
    with timer(replace(packed, store=tmp_path / "empty")) as reading:
        assert reading.read(ReadPlace.LOCAL).problem == "this node's store holds nothing of it"


def test_a_source_that_is_gone_is_a_problem_of_the_source_alone(tmp_path: Path) -> None:
    config = packed_below(tmp_path)
    shutil.rmtree(tmp_path / "even")
    with timer(config) as reading:
        assert reading.read(ReadPlace.SOURCE).problem
        assert reading.read(ReadPlace.LOCAL).bytes


def test_what_came_from_elsewhere_is_not_timed(tmp_path: Path) -> None:
    config = packed_below(tmp_path)
    for shard in (tmp_path / "store").glob("*.mdb"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with timer(config) as reading:
        assert len(reading.rows(ReadPlace.LOCAL))
        found = reading.read(ReadPlace.LOCAL)
    assert (found.bytes, found.problem) == (0, "this node's store holds nothing of it")


def test_there_is_no_such_dataset(packed: Config) -> None:
    with pytest.raises(DatasetMissingError):
        timer(packed, dataset="none")
