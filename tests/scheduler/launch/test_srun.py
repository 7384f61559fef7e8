"""srun as the launcher uses it: here a script of its name, with the words of 22.05.8; really in tests/cluster."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.scheduler.launch.slurm_monitor import TERMINATED
from deeplink.scheduler.launch.srun import TAKEN_S, TRY_AGAIN_S, UNANSWERED_S, SlotStep, SlurmSlots
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from tests.scheduler.slurm.answers import job_answer
from tests.waiting import LIMIT_S, until

AWAY = "Unable to contact slurm controller (connect failure)"
FROZEN = "Socket timed out on send/recv operation"
COMING_UP = "Job is pending execution"
GONE = "Invalid job id specified"
TAKEN = "Memory required by task is not available"


@dataclass
class Controller:
    """What squeue says of job 7."""

    restart: int = 2
    silent_for: int = 0
    asked: int = 0

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.asked += 1
        if self.asked <= self.silent_for:
            raise CommandError(argv, 1, f"slurm_load_jobs error: {AWAY}")
        return job_answer(argv, 7, restarts=self.restart)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def ranks(tmp_path: Path, clock: ManualClock, controller: Controller) -> Callable[..., SlotStep]:
    def start(*said: str, then: str = "exit 0") -> SlotStep:
        """Start an srun that gets these answers of slurmctld, one in each run, and then does what it is to do."""
        (tmp_path / "said").write_text("".join(f"{one}\n" for one in said), encoding="utf-8")
        script = tmp_path / "srun"
        script.write_text(
            f"""#!/bin/sh
cd {tmp_path} && echo run >>runs
word=$(sed -n "$(wc -l <runs)p" said)
[ -z "$word" ] && {{ {then}; }}
echo "srun: error: Unable to confirm allocation for job 7: $word" >&2
echo "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 7" >&2
exit 1
""",
            encoding="utf-8",
        )
        script.chmod(0o755)
        return SlotStep(
            [str(script)],
            dict(os.environ),
            Slurm(controller),
            counts={},
            run=(7, 2),
            clock=clock,
        )

    return start


def code_of(
    step: SlotStep, clock: ManualClock, most_s: float = 2 * UNANSWERED_S, tick_s: float = TRY_AGAIN_S / 4
) -> int | None:
    """Ask as the supervisor does, until the step has ended or the clock has run so far."""
    end = clock.monotonic() + most_s
    deadline = time.monotonic() + LIMIT_S
    while (code := step.ended()) is None and clock.monotonic() < end:
        assert time.monotonic() < deadline
        step._process.wait(LIMIT_S)  # however long a busy machine takes for it, by this clock it takes no time
        time.sleep(0.005)
        clock.sleep(tick_s)
    return code


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text(encoding="utf-8").splitlines())


def test_an_srun_that_slurmctld_did_not_answer_is_tried_again(
    tmp_path: Path, clock: ManualClock, ranks: Callable[..., SlotStep]
) -> None:
    assert code_of(ranks(AWAY, FROZEN, COMING_UP), clock) == 0
    assert runs(tmp_path) == 4


def test_memory_that_the_step_before_has_still_is_waited_for_and_not_for_long(
    tmp_path: Path, clock: ManualClock, ranks: Callable[..., SlotStep]
) -> None:
    assert code_of(ranks(TAKEN, AWAY, TAKEN), clock) == 0
    assert runs(tmp_path) == 4
    (tmp_path / "runs").unlink()
    began = clock.monotonic()
    assert code_of(ranks(*[TAKEN] * 200), clock, tick_s=TAKEN_S / 10) == 1
    assert TAKEN_S <= clock.monotonic() - began < UNANSWERED_S


def test_a_controller_that_is_away_meanwhile_does_not_count_as_memory_that_is_taken(
    tmp_path: Path, clock: ManualClock, controller: Controller, ranks: Callable[..., SlotStep]
) -> None:
    controller.silent_for = 3
    step = ranks(TAKEN)
    for times in (1, 2, 3):

        def is_asked(times: int = times) -> bool:
            clock.sleep(TRY_AGAIN_S / 4)
            return step.ended() is None and controller.asked >= times

        until(is_asked)
        clock.sleep(0.7 * TAKEN_S)
    assert code_of(step, clock) == 0
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("then", ["exit 1", "kill -9 $$", "exit 7"])
def test_slots_that_were_started_are_not_started_again_whatever_their_ranks_said(
    tmp_path: Path, clock: ManualClock, ranks: Callable[..., SlotStep], then: str
) -> None:
    said = f"echo 'srun: error: Unable to create step for job 7: {TAKEN}' >&2; sleep 0.3; {then}"
    step, noted = ranks(then=said), list[int]()
    slots = SlurmSlots(1, [step, ranks(then=said)], noted.append)
    assert not slots.fit({}), "nobody has heard of a slot yet"
    for step_id in (None, 3, 9):
        slots.begun(step_id)
    until(lambda: noted)
    assert code_of(step, clock) not in {None, 0}
    assert slots.ended() == step.ended()
    assert not slots.failed().is_of_rank
    slots.stop()
    assert runs(tmp_path) == 2
    assert noted == [4], "that of the step of the spares, which is the next"


def test_while_slurmctld_is_away_nobody_starts_an_srun_for_nothing(
    tmp_path: Path, clock: ManualClock, controller: Controller, ranks: Callable[..., SlotStep]
) -> None:
    controller.silent_for = 5
    assert code_of(ranks(AWAY), clock) == 0
    assert controller.asked == 6
    assert runs(tmp_path) == 2


def test_no_rank_is_started_once_the_job_runs_anew_elsewhere(
    tmp_path: Path, clock: ManualClock, controller: Controller, ranks: Callable[..., SlotStep]
) -> None:
    controller.silent_for, controller.restart = 3, 3
    step = ranks(AWAY)
    assert code_of(step, clock) == TERMINATED, "so that Slurm is asked why"
    assert step.ended() == TERMINATED
    assert runs(tmp_path) == 1


def test_what_slurm_refuses_is_final(tmp_path: Path, clock: ManualClock, ranks: Callable[..., SlotStep]) -> None:
    assert code_of(ranks(GONE), clock) == 1
    assert runs(tmp_path) == 1


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            "echo 'srun: error: --nodes is incompatible with --distribution=arbitrary' >&2; exit 1",
            "srun itself exited 1: --nodes is incompatible with --distribution=arbitrary",
        ),
        ("exit 1", "srun itself exited 1"),
        ("kill -9 $$", "srun itself exited 137"),
        (
            "echo 'srun: error: n1: task 0: Exited with exit code 127' >&2; exit 127",
            "srun itself exited 127: n1: task 0: Exited with exit code 127",
        ),
    ],
)
def test_an_error_of_sruns_own_is_no_ranks(
    clock: ManualClock, ranks: Callable[..., SlotStep], then: str, said: str
) -> None:
    step = ranks(then=then)
    assert code_of(step, clock) not in {None, 0}
    assert (step.failed().is_of_rank, step.failed().said) == (False, said)


def test_a_controller_that_stays_away_is_not_tried_for_ever(
    clock: ManualClock, ranks: Callable[..., SlotStep]
) -> None:
    began = clock.monotonic()
    assert code_of(ranks(*[AWAY] * 2_000), clock, math.inf, tick_s=UNANSWERED_S / 10) == 1
    assert clock.monotonic() - began >= UNANSWERED_S
