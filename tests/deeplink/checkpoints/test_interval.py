"""How often to save: the formulas against brute force, and what they are fed with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.checkpoints import Checkpoints, NoAdviceError
from deeplink.checkpoints.interval import (
    advise,
    availability,
    availability_optimal,
    daly,
    mtbf_of_nodes,
    mtbf_of_starts,
    young,
)
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt

saves = st.floats(0.01, 100)
mtbfs = st.floats(1_000, 1e6)


@given(save=saves, mtbf=mtbfs, restart=st.floats(0, 1_000))
def test_no_interval_is_better_than_the_optimal_one(save: float, mtbf: float, restart: float) -> None:
    best = availability_optimal(save, mtbf, restart)
    at_best = availability(best, save, mtbf, restart)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        if best * factor > save:
            assert availability(best * factor, save, mtbf, restart) < at_best


@given(save=saves, mtbf=mtbfs)
def test_the_three_agree_where_saves_are_cheap(save: float, mtbf: float) -> None:
    if save < mtbf / 1e4:
        first = young(save, mtbf)
        assert daly(save, mtbf) == pytest.approx(first, rel=0.02)
        assert availability_optimal(save, mtbf, 0) == pytest.approx(first, rel=0.02)


def test_published_figures() -> None:
    # Daly (2006), where the save is so dear that the next failure comes first.
    assert daly(100, 40) == 40
    # 6.50 failures per 1,000 node-days: 1.8 h at 16,384 GPUs, 14 min at 131,072 (arXiv 2410.21680), 8 GPUs a node.
    assert mtbf_of_nodes(16_384 // 8) / 3600 == pytest.approx(1.8, abs=0.05)
    assert mtbf_of_nodes(131_072 // 8) / 60 == pytest.approx(14, abs=0.5)


def test_advice_keeps_to_what_a_save_takes() -> None:
    quick = advise(stall_s=0.1, save_s=5, mtbf_s=3_600, restart_s=60, basis="as given")
    assert quick.every_s == quick.optimal_s == pytest.approx(27.2, abs=0.1)
    slow = advise(stall_s=0.1, save_s=500, mtbf_s=3_600, restart_s=60, basis="as given")
    assert slow.every_s == 500
    for wrong in ({"stall_s": 0.0}, {"mtbf_s": 0.0}, {"restart_s": -1.0}, {"save_s": float("nan")}):
        times = {"stall_s": 1.0, "save_s": 1.0, "mtbf_s": 1.0, "restart_s": 1.0, **wrong}
        with pytest.raises(ValueError, match="no interval"):
            advise(**times, basis="")


def test_starts_tell_the_rate_from_the_second_on() -> None:
    assert mtbf_of_starts([], 10) is None
    assert mtbf_of_starts([5.0], 10) is None
    assert mtbf_of_starts([5.0, 5.0], 5.0) is None


def test_a_folder_advises_from_its_own_saves_and_restarts(tmp_path: Path) -> None:
    clock = ManualClock()

    def save(attempt: Attempt, step: int) -> Checkpoints:
        checkpoints = Checkpoints(tmp_path, attempt=attempt, clock=clock, from_scratch=True)
        with checkpoints.save(step=step) as draft:
            clock.sleep(2)
            (draft / "a").write_bytes(b"a")
        return checkpoints

    (tmp_path / "step-0000000009.a1").mkdir()  # damaged: says nothing
    with pytest.raises(NoAdviceError, match="what it cost"):
        Checkpoints(tmp_path).advice(mtbf_s=10)
    only = save(Attempt(3, 0, 0), 1)
    with pytest.raises(NoAdviceError, match="not restarted"):
        only.advice()
    clock.sleep(3_596)
    again = save(Attempt(3, 1, 0), 2)
    clock.sleep(3_600)
    advice = again.advice(restart_s=30)
    assert (advice.stall_s, advice.save_s) == (2.0, 2.0)
    assert advice.mtbf_s == pytest.approx(7_200, abs=3)
    assert advice.basis == "1 restart in 2.0 h"
    assert again.advice(mtbf_s=100).basis == "as given"
