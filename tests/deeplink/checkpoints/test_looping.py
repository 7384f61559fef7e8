"""One line in a plain loop: an interrupted training ends up where an uninterrupted one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deeplink.checkpoints import Checkpoints, folder
from deeplink.checkpoints.training_states import Waiting
from deeplink.core.types import Attempt


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


class Sampler:
    """Hands out numbers from where training stands; `finished` moves it on."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, 0

    def __iter__(self) -> Any:
        yield from range(self.place, self.length)

    def finished(self) -> None:
        self.place += 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class KilledError(Exception):
    pass


def train(folder: Path, attempt: Attempt, *, killed_at: int | None = None) -> tuple[list[float], int, list[int]]:
    torch.manual_seed(attempt.relaunch)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    sampler = Sampler(20)
    seen = []
    if attempt.relaunch == 0:
        torch.manual_seed(1)
    with Checkpoints(folder, attempt=attempt) as checkpoints:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
        for number in checkpoints.over(sampler, every=3, **parts):
            seen.append(number)
            if number == killed_at:
                raise KilledError
            loss = model(torch.full((2, 3), float(number))).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        steps = checkpoints.step
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), steps, seen


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, steps, seen = train(tmp_path / "whole", Attempt(1, 0, 0))
    assert (steps, seen) == (20, list(range(20)))
    for relaunch, at in enumerate((7, 8, 16)):
        with pytest.raises(KilledError):
            train(tmp_path / "cut", Attempt(1, 0, relaunch), killed_at=at)
    again, steps, seen = train(tmp_path / "cut", Attempt(1, 0, 3))
    assert (steps, seen) == (20, list(range(15, 20)))
    assert again == whole  # weights, moments, dropout's random numbers, samples


def test_a_job_that_is_about_to_lose_its_nodes_saves_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "should_save", lambda *, step: step == 5)
    with pytest.raises(KilledError):
        train(tmp_path, Attempt(1, 0, 0), killed_at=5)
    found = Checkpoints(tmp_path, attempt=Attempt(1, 0, 1)).latest()
    assert found is not None
    assert found.step == 5


def test_each_step_is_reported_for_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(folder, "count_step", told.append)
    train(tmp_path, Attempt(1, 0, 0))
    assert told == list(range(1, 21))


def test_resuming_first_tells_where_training_stands(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, attempt=Attempt(1, 0, 0)) as checkpoints:
        assert checkpoints.resume(model=nn.Linear(1, 1)) is None
        assert list(checkpoints.over("abcd", every=2)) == list("abcd")
    with Checkpoints(tmp_path, attempt=Attempt(1, 0, 1)) as checkpoints:
        found = checkpoints.resume(model=nn.Linear(1, 1))
        assert found is not None
        assert checkpoints.step == found.step == 4


@pytest.mark.parametrize("waiting", ["wait", "skip"])
def test_the_last_step_is_saved_and_a_resumed_run_begins_behind_it(tmp_path: Path, waiting: Waiting) -> None:
    with Checkpoints(tmp_path, attempt=Attempt(1, 0, 0), waiting=waiting) as checkpoints:
        sampler = Sampler(5)
        parts: dict[str, Any] = {"model": nn.Linear(1, 1), "sampler": sampler}
        assert list(checkpoints.over(sampler, every=2, **parts)) == [0, 1, 2, 3, 4]
        sampler.length = 8  # the next epoch
        for number in checkpoints.over(sampler, every=100):
            if number == 7:
                break  # leaves the loop before step 8 is done
    with Checkpoints(tmp_path, attempt=Attempt(1, 0, 1)) as checkpoints:
        sampler = Sampler(8)
        found = checkpoints.resume(model=nn.Linear(1, 1), sampler=sampler)
        assert found is not None
        assert (found.step, checkpoints.step, sampler.place) == (5, 5, 5)
        assert list(checkpoints.over(sampler, every=100)) == [5, 6, 7]
    newest = Checkpoints(tmp_path, attempt=Attempt(1, 0, 2)).latest()
    assert newest is not None
    assert newest.step == 8


def test_a_loop_over_nothing_saves_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, attempt=Attempt(1, 0, 0)) as checkpoints:
        assert list(checkpoints.over([], every=1, model=nn.Linear(1, 1))) == []
        assert checkpoints.latest() is None


def test_a_loop_without_parts_or_sense_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="nothing to save"):
        next(checkpoints.over([1], every=1))
    with pytest.raises(ValueError, match="every must be"):
        next(checkpoints.over([1], every=0, model=nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="call no part random"):
        next(checkpoints.over([1], every=1, random=Sampler(3)))


def test_the_parts_that_the_loop_names_are_saved_also_after_a_resume_of_some(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(model=model)
        list(checkpoints.over(range(2), every=1, model=model, other=nn.Linear(1, 1)))
        found = checkpoints.latest()
    assert found is not None
    assert set(found.load()) == {"model", "other"}
