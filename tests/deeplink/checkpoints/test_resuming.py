"""A training that is resumed goes on as if nothing had happened, whatever wraps, shards or optimizes it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.deeplink.checkpoints import trainings

pytestmark = pytest.mark.slow
WAIT_S = 600


def run(target: Any, world: int, folder: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    meeting = f"file://{folder.with_name(f'{folder.name}-{target.__name__}-{world}')}"
    ranks = [
        spawn.Process(target=target, args=(rank, world, meeting, folder), daemon=True) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
    assert [process.exitcode for process in ranks] == [0] * world


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved, and two, then one, went on from."""
    folder = tmp_path_factory.mktemp("two")
    run(trainings.train, 2, folder)
    run(trainings.resume, 2, folder)
    run(trainings.resume, 1, folder)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank saved, and two went on from."""
    folder = tmp_path_factory.mktemp("one")
    run(trainings.train, 1, folder)
    run(trainings.resume, 2, folder)
    return folder


def losses(folder: Path, kind: str, who: str) -> Any:
    noted = json.loads((folder / f"{kind}.{who}.json").read_text())
    assert isinstance(noted, list), noted
    return noted


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize("kind", trainings.KINDS)
def test_two_ranks_go_on_to_the_bit(two: Path, kind: str) -> None:
    resumed = losses(two, kind, "resumed-by-2")
    assert resumed == losses(two, kind, "trained")[-len(resumed) :]
    assert len(set(resumed)) == len(resumed)


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize("kind", trainings.KINDS)
def test_one_rank_goes_on_from_what_two_saved(two: Path, kind: str) -> None:
    resumed = losses(two, kind, "resumed-by-1")
    assert resumed == pytest.approx(losses(two, kind, "trained")[-len(resumed) :], rel=1e-4)


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize("kind", trainings.KINDS)
def test_two_ranks_go_on_from_what_one_saved(one: Path, kind: str) -> None:
    resumed = losses(one, kind, "resumed-by-2")
    assert resumed == pytest.approx(losses(one, kind, "trained")[-len(resumed) :], rel=1e-4)


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize(("kind", "saved"), trainings.CROSSED)
def test_a_training_goes_on_wrapped_in_another_way(two: Path, kind: str, saved: str) -> None:
    resumed = losses(two, saved, f"resumed-as-{kind}")
    assert resumed == pytest.approx(losses(two, saved, "trained")[-len(resumed) :], rel=1e-4)
