from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from deeplink.scheduler.node.child import NOT_FOUND, CheckProcess, clean_environment


def test_it_tells_how_a_command_ended_and_what_it_wrote() -> None:
    child = CheckProcess(SystemClock())
    child.begin(["sh", "-c", "echo out; echo err >&2; exit 3"])
    answer = child.answer(10)
    assert answer is not None
    assert (answer.code, answer.stdout, answer.stderr) == (3, "out\n", "err\n")
    assert child.age_s == 0


def test_what_is_not_there_is_127(tmp_path: Path) -> None:
    child = CheckProcess(SystemClock())
    child.begin([str(tmp_path / "nothing")])
    answer = child.answer(10)
    assert answer is not None
    assert answer.code == NOT_FOUND


def test_one_that_hangs_is_left_alone_and_found_again_when_it_returns(tmp_path: Path) -> None:
    child = CheckProcess(SystemClock())
    go, count = tmp_path / "go", tmp_path / "count"
    command = ["sh", "-c", f"echo >>{count}; while ! [ -e {go} ]; do sleep 0.02; done; echo back"]
    child.begin(command)
    assert child.answer(0.3) is None
    child.begin(command)
    assert child.answer(0.1) is None
    assert child.age_s > 0.3
    go.touch()
    answer = child.answer(10)
    assert answer is not None
    assert answer.stdout == "back\n"
    assert count.read_text() == "\n", "never more than one"


def test_who_keeps_its_pipes_open_is_not_waited_for() -> None:
    child = CheckProcess(SystemClock())
    child.begin(["sh", "-c", "echo early; sleep 20 & echo $!"])
    answer = child.answer(10)
    assert answer is not None
    os.kill(int(answer.stdout.split()[1]), 9)


def test_of_a_flood_a_part_is_kept() -> None:
    child = CheckProcess(SystemClock())
    child.begin(["sh", "-c", "head -c 5000000 /dev/zero"])
    answer = child.answer(20)
    assert answer is not None
    assert answer.code == 0
    assert len(answer.stdout) == 64 << 10


def test_a_flood_without_an_end_is_left_alone_when_the_time_is_up() -> None:
    child = CheckProcess(SystemClock())
    child.begin(["sh", "-c", "cat /dev/zero & cat /dev/zero & cat /dev/zero & wait"])
    assert child.answer(0.3) is None
    child.kill()
    assert child.age_s == 0


def test_it_is_killed_with_all_it_started() -> None:
    child = CheckProcess(SystemClock())
    child.begin(["sh", "-c", "sleep 100 & sleep 100"])
    assert child.answer(0.1) is None
    child.kill()
    assert child.age_s == 0


def test_it_may_be_killed_while_another_thread_waits_for_it() -> None:
    for _ in range(20):
        child = CheckProcess(SystemClock())
        child.begin(["sh", "-c", "echo early; sleep 100"])
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(child.answer, 30.0) for _ in range(2)]
            ending = [pool.submit(child.kill) for _ in range(2)]
            answers = [one.result(30) for one in waiting]
            for one in ending:
                one.result(30)
        assert child.age_s == 0
        assert {answer.code for answer in answers if answer} <= {-9}


@pytest.mark.parametrize("env", [{}, {"PATH": "/mine"}])
def test_there_is_a_path_also_in_a_clean_environment(env: dict[str, str]) -> None:
    made = clean_environment(env)
    assert "/usr/bin" in made["PATH"].split(":")
    assert made["LC_ALL"] == "C"
