"""The permutation behind an epoch's order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.data.order import shuffled

RECORDED_TEN = [4, 1, 8, 0, 7, 9, 5, 3, 6, 2]
RECORDED_FAR = [838401563315, 582219788901, 229458219084, 17079258638]

lengths = st.one_of(st.integers(1, 40), st.integers(1, 5000))


@given(length=lengths, seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6), version=st.text(max_size=8))
def test_every_sample_comes_exactly_once(length: int, seed: int, epoch: int, version: str) -> None:
    whole = shuffled(np.arange(length), length, version=version, seed=seed, epoch=epoch)
    assert sorted(whole.tolist()) == list(range(length))


@given(length=lengths, data=st.data())
def test_a_stretch_is_computed_without_the_rest(length: int, data: st.DataObject) -> None:
    whole = shuffled(np.arange(length), length, version="v", seed=3, epoch=1)
    places = data.draw(st.lists(st.integers(0, length - 1), max_size=20))
    stretch = shuffled(np.array(places, dtype=np.int64), length, version="v", seed=3, epoch=1)
    assert stretch.tolist() == whole[places].tolist()


def test_the_algorithm_is_the_one_that_states_name() -> None:
    # Recorded: should this ever differ, runs saved before would silently resume in another order.
    ten = shuffled(np.arange(10), 10, version="v1", seed=7, epoch=2)
    assert ten.tolist() == RECORDED_TEN
    far = shuffled(np.array([0, 1, 999_999, 10**12 - 1]), 10**12, version="v1", seed=7, epoch=2)
    assert far.tolist() == RECORDED_FAR


@pytest.mark.parametrize("other", [{"version": "w"}, {"seed": 1}, {"epoch": 1}])
def test_version_seed_and_epoch_each_give_another_order(other: dict[str, object]) -> None:
    base: dict[str, object] = {"version": "v", "seed": 0, "epoch": 0}
    first = shuffled(np.arange(500), 500, **base)  # type: ignore[arg-type]
    second = shuffled(np.arange(500), 500, **{**base, **other})  # type: ignore[arg-type]
    assert (first == second).sum() < 20


def test_samples_are_spread_evenly_over_the_epoch() -> None:
    # 64 samples in 64 places over 4,000 epochs: each of the 4,096 pairs is expected 62.5 times; the chi-square of
    # 63*63 degrees of freedom lies below 4,300 in all but one case of 10,000 of a fair shuffle.
    counts = np.zeros((64, 64))
    for epoch in range(4000):
        counts[np.arange(64), shuffled(np.arange(64), 64, version="v", seed=0, epoch=epoch)] += 1
    expected = 4000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 4300


def test_neighbours_in_the_dataset_are_no_neighbours_in_the_epoch() -> None:
    whole = shuffled(np.arange(100_000), 100_000, version="v", seed=0, epoch=0)
    near = np.abs(np.diff(whole)) < 100
    assert near.mean() < 0.004  # a fair shuffle: 0.002


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_of_the_epoch_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match="0 to 9"):
        shuffled(np.array([place]), 10, version="v", seed=0, epoch=0)
