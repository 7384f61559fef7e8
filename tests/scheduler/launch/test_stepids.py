"""Step numbers that a signal of an earlier run may still come for."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deeplink.scheduler.launch.srun import FILE, MOST_PASSED, StepIds


def passed(ids: StepIds, first: int = 0) -> int:
    numbers = itertools.count(first)
    return ids.let_pass(lambda: next(numbers))


def test_the_first_run_lets_none_pass(tmp_path: Path) -> None:
    assert passed(StepIds(tmp_path, 0)) == 0


def test_after_a_run_that_lost_a_node_no_number_of_its_is_used_again(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        StepIds(tmp_path, 0).note(number)
    assert passed(StepIds(tmp_path, 0)) == 0, "its own"
    assert passed(StepIds(tmp_path, 1)) == 6
    assert passed(StepIds(tmp_path, 1), first=3) == 3, "the script has used some"
    assert passed(StepIds(tmp_path, 1), first=9) == 1


def test_agents_that_are_started_again_while_ranks_are_lose_no_number(tmp_path: Path) -> None:
    StepIds(tmp_path, 0).note(0)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(40):
            pool.submit(StepIds(tmp_path, 0).add)
    assert StepIds(tmp_path, 1).highest() == 40
    StepIds(tmp_path, 0).note(39)
    assert StepIds(tmp_path, 1).highest() == 40, "it was told late"
    StepIds(tmp_path, 1).note(2)
    assert StepIds(tmp_path, 2).highest() == 2, "another run counts again"


def test_a_run_that_lost_none_leaves_nothing(tmp_path: Path) -> None:
    StepIds(tmp_path, 0).note(5)
    StepIds(tmp_path, 0).forget()
    assert passed(StepIds(tmp_path, 1)) == 0


def test_a_run_that_lost_none_does_not_forget_for_the_one_before_it(tmp_path: Path) -> None:
    StepIds(tmp_path, 0).note(5)
    assert passed(StepIds(tmp_path, 1)) == 6
    StepIds(tmp_path, 1).note(7)
    StepIds(tmp_path, 1).forget()
    assert passed(StepIds(tmp_path, 2)) == 6, "the node of the first run may still come back"
    assert passed(StepIds(tmp_path, 0)) == 0, "another job had this number before"


def test_there_is_a_bound(tmp_path: Path) -> None:
    StepIds(tmp_path, 0).note(10**6)
    assert passed(StepIds(tmp_path, 1)) == MOST_PASSED + 1


def test_steps_that_cannot_be_run_stop_nobody(tmp_path: Path) -> None:
    StepIds(tmp_path, 0).note(3)
    assert StepIds(tmp_path, 1).let_pass(lambda: None) == 0


@pytest.mark.parametrize("text", ["", "x y", "1", "0 5 7"])
def test_what_cannot_be_read_is_as_good_as_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert passed(StepIds(tmp_path, 1)) == 0
