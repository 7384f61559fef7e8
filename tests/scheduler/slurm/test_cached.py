"""Answers of Slurm shared by a user's processes: asked once per slot, by one, and never taken for newer."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.scheduler.slurm import cached
from deeplink.scheduler.slurm.cached import CachedRunner, answers_folder
from deeplink.scheduler.slurm.client import JobVanishedError, Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandMissingError, CommandTimeoutError
from deeplink.scheduler.slurm.parse import PATTERN
from tests.waiting import LIMIT_S

SQUEUE = ["squeue", "-h"]


class Controller:
    """Stands for Slurm's commands: counts what it is asked, and answers with a number that grows."""

    def __init__(self, clock: ManualClock, takes_s: float = 0.0) -> None:
        self.clock, self.takes_s = clock, takes_s
        self.asked: list[list[str]] = []
        self.problem: Exception | None = None

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.asked.append(list(argv))
        self.clock.sleep(self.takes_s)
        if self.problem:
            raise self.problem
        return f"answer {len(self.asked)}\n"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def slurm(clock: ManualClock) -> Controller:
    return Controller(clock)


def runner(tmp_path: Path, slurm: Controller, **options: object) -> CachedRunner:
    fields = {"folder": tmp_path / "answers", "run": slurm, "clock": slurm.clock, "env": {}, **options}
    return CachedRunner(**fields)  # type: ignore[arg-type]


def test_many_who_ask_in_one_slot_are_one_question_and_the_next_slot_is_another(
    tmp_path: Path, slurm: Controller, clock: ManualClock
) -> None:
    many = [runner(tmp_path, slurm, interval_s=2.0) for _ in range(20)]
    assert {one(SQUEUE) for one in many} == {"answer 1\n"}
    clock.sleep(2.0)
    assert {one(SQUEUE) for one in many} == {"answer 2\n"}


def test_two_hundred_that_look_at_moments_of_their_own_cost_what_one_costs(
    tmp_path: Path, clock: ManualClock
) -> None:
    def queries(watchers: int, slots: int) -> int:
        slurm = Controller(clock, takes_s=0.001)
        folder = tmp_path / str(watchers)
        many = [runner(tmp_path, slurm, folder=folder, interval_s=5.0) for _ in range(watchers)]
        clock.now = (clock.now // 5 + 1) * 5 + 0.1
        for _ in range(slots):
            for one in many:
                one(SQUEUE)
                clock.sleep(4.5 / watchers)
            clock.now = (clock.now // 5 + 1) * 5 + 0.1
        return len(slurm.asked)

    assert queries(1, 6) == queries(50, 6) == 6


@pytest.mark.parametrize(
    "argv",
    [
        ["scontrol", "requeue", "7"],
        ["scancel", "7"],
        ["sbatch", "x"],
        ["scontrol", "ping"],
        ["scontrol", "update"],
    ],
)
def test_what_changes_something_or_is_no_question_is_never_answered_from_the_cache(
    tmp_path: Path, slurm: Controller, argv: list[str]
) -> None:
    one = runner(tmp_path, slurm)
    one(argv)
    one(argv)
    assert slurm.asked == [argv, argv]


def test_another_question_or_another_cluster_is_another_answer(tmp_path: Path, slurm: Controller) -> None:
    runner(tmp_path, slurm)(SQUEUE)
    runner(tmp_path, slurm)([*SQUEUE, "-u", "ü"])
    runner(tmp_path, slurm, env={"SLURM_CONF": "/etc/other.conf"})(SQUEUE)
    runner(tmp_path, slurm, env={"SQUEUE_STATES": "all"})(SQUEUE)
    runner(tmp_path, slurm, env={"HOME": "/elsewhere"})(SQUEUE)
    assert len(slurm.asked) == 4


def test_the_switch_tree_is_asked_once_a_minute(tmp_path: Path, slurm: Controller, clock: ManualClock) -> None:
    one = runner(tmp_path, slurm)
    clock.now = (clock.unix() // 60 + 1) * 60 - clock.epoch
    for _ in range(30):
        one(["scontrol", "show", "topology"])
        clock.sleep(1.9)
    assert len(slurm.asked) == 1


def test_each_reader_gets_its_own_separator_in_anothers_answer(tmp_path: Path, clock: ManualClock) -> None:
    def squeue(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        found = PATTERN.search(" ".join(argv))
        assert found
        fields = ("7", "7", "RUNNING", "None", "0", "1", "eve", "n[0-1]", "n0", "a~0000000000000000~name\n")
        return "".join(f"{field}{found[0]}" for field in fields)

    asked = []

    def counted(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        asked.append(argv)
        return squeue(argv)

    rows = [
        Slurm(CachedRunner(folder=tmp_path / "a", run=counted, clock=clock, env={})).jobs(user="eve")
        for _ in range(3)
    ]
    assert len(asked) == 1
    assert rows[0] == rows[1] == rows[2]
    assert (rows[2][0].id, rows[2][0].name) == (7, "a~0000000000000000~name\\n")


def test_a_refusal_and_a_silence_are_told_to_all_who_ask(
    tmp_path: Path, slurm: Controller, clock: ManualClock
) -> None:
    problems: list[tuple[Exception, type[Exception]]] = [
        (CommandError(SQUEUE, 1, "Unable to contact slurm controller"), CommandError),
        (CommandTimeoutError(SQUEUE, 5.0), CommandTimeoutError),
        (CommandMissingError("squeue"), CommandMissingError),
    ]
    for asked, (problem, kind) in enumerate(problems, start=1):
        slurm.problem = problem
        for _ in range(3):
            with pytest.raises(kind) as told:
                runner(tmp_path, slurm)(SQUEUE)
            assert str(told.value) == str(problem)
        assert len(slurm.asked) == asked
        clock.sleep(2.0)


def test_a_slow_controller_is_left_alone_for_as_long_as_it_took(tmp_path: Path, clock: ManualClock) -> None:
    slurm = Controller(clock, takes_s=9.0)
    clock.now = 1000.0
    one = runner(tmp_path, slurm, interval_s=2.0)
    began = clock.now
    while clock.now < began + 60:
        one(SQUEUE)
        clock.sleep(0.5)
    assert len(slurm.asked) == 4  # every 18 s, however many look


def test_an_old_answer_is_given_with_its_age_where_there_is_no_new_one(
    tmp_path: Path, slurm: Controller, clock: ManualClock
) -> None:
    one = runner(tmp_path, slurm, stale_s=60.0)
    one(SQUEUE)
    answered = clock.unix()
    assert one.told["squeue"] == cached.AnswerAge(answered)
    slurm.problem = CommandError(SQUEUE, 1, "Unable to contact slurm controller")
    clock.sleep(30.0)
    assert one(SQUEUE) == "answer 1\n"
    assert one.told["squeue"].unix == answered
    assert "Unable to contact" in one.told["squeue"].problem
    clock.sleep(31.0)
    with pytest.raises(CommandError):
        one(SQUEUE)


def test_a_job_that_slurm_has_forgotten_is_not_shown_from_an_old_answer(
    tmp_path: Path, clock: ManualClock
) -> None:
    said: list[object] = [
        "".join(f"{f}SEP" for f in ("7", "7", "RUNNING", "None", "0", "1", "eve", "", "", "x")),
        CommandError(SQUEUE, 1, "slurm_load_jobs error: Invalid job id specified"),
    ]

    def squeue(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        separator = re.search(PATTERN, " ".join(argv))
        assert separator
        return str(answer).replace("SEP", separator[0])

    slurm = Slurm(CachedRunner(folder=tmp_path / "a", run=squeue, clock=clock, env={}, stale_s=1e6))
    assert slurm.job(7).name == "x"
    clock.sleep(10.0)
    with pytest.raises(JobVanishedError):
        slurm.job(7)


def test_after_a_change_of_ours_no_older_answer_counts(tmp_path: Path, slurm: Controller) -> None:
    one = runner(tmp_path, slurm)
    slurm.clock.now = 1000.0
    one(SQUEUE)
    slurm.clock.sleep(0.1)
    one.afresh()
    assert one(SQUEUE) == "answer 2\n"
    assert one(SQUEUE) == "answer 2\n"


def test_answers_are_the_users_alone(tmp_path: Path, slurm: Controller) -> None:
    before = os.umask(0)
    try:
        runner(tmp_path, slurm)(SQUEUE)
    finally:
        os.umask(before)
    folder = tmp_path / "answers"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_others_may_write_to_is_not_believed(
    tmp_path: Path, slurm: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers").chmod(0o777)
    one = runner(tmp_path, slurm)
    one(SQUEUE)
    one(SQUEUE)
    assert len(slurm.asked) == 2
    (said,) = caplog.messages
    assert said.startswith(f"answers of Slurm are not shared: {tmp_path}/answers: ")
    assert "others may write to it (mode 0777)" in said


def test_damaged_answers_and_those_of_a_clock_set_back_are_asked_anew(
    tmp_path: Path, slurm: Controller, clock: ManualClock
) -> None:
    one = runner(tmp_path, slurm)
    one(SQUEUE)
    (answer,) = (tmp_path / "answers").glob("*.answer")
    answer.write_text("{half")
    assert one(SQUEUE) == "answer 2\n"
    clock.now -= 500.0
    assert one(SQUEUE) == "answer 3\n"


def test_old_answers_are_removed(tmp_path: Path, slurm: Controller, clock: ManualClock) -> None:
    folder = tmp_path / "answers"
    folder.mkdir(mode=0o700)
    (folder / "old.answer").touch()
    os.utime(folder / "old.answer", (clock.unix() - 2 * cached.KEPT_S,) * 2)
    runner(tmp_path, slurm)(SQUEUE)
    assert not (folder / "old.answer").exists()


def test_who_waits_for_another_waits_no_longer_than_told(
    tmp_path: Path, slurm: Controller, clock: ManualClock
) -> None:
    one = runner(tmp_path, slurm)
    one(SQUEUE)
    clock.sleep(10.0)
    (lock,) = (tmp_path / "answers").glob("*.lock")
    with cached._alone(lock.with_name(lock.name.removesuffix(".lock"))) as mine:
        assert mine
        began = clock.now
        with pytest.raises(CommandTimeoutError):
            one(SQUEUE, timeout_s=3.0)
        assert clock.now - began < 3.5
    assert one(SQUEUE) == "answer 2\n"


def test_threads_that_ask_at_once_are_one_question(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []
    gate = threading.Barrier(20)
    release = threading.Event()

    def slow(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        asked.append(argv)
        release.wait(LIMIT_S)
        return "one"

    said: list[str] = []

    def ask() -> None:
        one = CachedRunner(folder=tmp_path / "a", interval_s=3600.0, run=slow, env={})
        gate.wait()
        said.append(one(SQUEUE))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    while not asked:
        release.wait(0.01)
    release.set()
    for thread in threads:
        thread.join()
    assert said == ["one"] * 20
    assert len(asked) == 1


@pytest.mark.slow
def test_processes_that_ask_at_once_are_one_question(tmp_path: Path) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\necho asked >>{tmp_path}/asked\nsleep 0.2\necho "job ü"\n')
    squeue.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from deeplink.scheduler.slurm.cached import CachedRunner; "
        "sys.stdout.write(CachedRunner(folder=Path(sys.argv[1]), interval_s=1e6)(['squeue', '-h']))"
    )
    env = {**os.environ, "PATH": f"{squeue.parent}:{os.environ['PATH']}", "PYTHONUTF8": "1"}
    many = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "answers")], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    assert {process.communicate(timeout=LIMIT_S)[0] for process in many} == {"job ü\n"}
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_answers_lie_in_memory_where_there_is_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers_folder({"XDG_RUNTIME_DIR": str(tmp_path)}, Path("/s")) == tmp_path / "deeplink" / "slurm"
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert answers_folder({"XDG_RUNTIME_DIR": "gone"}, Path("/s")).parent == Path("/s/slurm")
