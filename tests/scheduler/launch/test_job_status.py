"""Asking Slurm how the job stands, without waiting for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from deeplink.core.clock import ManualClock
from deeplink.scheduler.launch.backend import JobStatus
from deeplink.scheduler.launch.slurm_monitor import AGAIN_S, SELDOM_S, STATUS_EVERY_S, StatusPoller
from tests.waiting import LIMIT_S


@dataclass
class Controller:
    """Answers when it is let, as slurmctld does."""

    answer: JobStatus | None = None
    asked: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    def job_status(self) -> JobStatus | None:
        self.asked += 1
        assert self.free.wait(LIMIT_S)
        return self.answer


def settled(desk: StatusPoller) -> None:
    for thread in threading.enumerate():
        if thread.name == "deeplink-status":
            thread.join(LIMIT_S)


def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    clock, controller = ManualClock(), Controller(JobStatus(ours=True, runs=True, left_s=100.0, requeueable=True))
    desk = StatusPoller(controller, clock)  # type: ignore[arg-type] # all that it uses of a backend
    desk.tick()
    clock.now += 5.0
    assert desk.since(clock.now - 5.0) is None, "it is not waited for"
    controller.free.set()
    settled(desk)
    assert desk.since(clock.now - 5.0) is controller.answer
    assert desk.since(clock.now) is None
    assert desk.left_s() == 95.0
    assert desk.requeueable


def test_one_question_at_a_time_and_none_too_often() -> None:
    clock, controller = ManualClock(), Controller(JobStatus(ours=True, runs=True))
    desk = StatusPoller(controller, clock)  # type: ignore[arg-type]
    for _ in range(5):
        desk.tick()
    controller.free.set()
    settled(desk)
    desk.tick()
    settled(desk)
    assert controller.asked == 1
    clock.now += SELDOM_S
    desk.tick()
    settled(desk)
    assert controller.asked == 2


def test_who_wants_an_answer_asks_again_until_there_is_one() -> None:
    clock, controller = ManualClock(), Controller()
    controller.free.set()
    desk = StatusPoller(controller, clock)  # type: ignore[arg-type]
    begun = clock.now
    for _ in range(3):
        desk.ask_since(begun)
        settled(desk)
        desk.ask_since(begun)
        settled(desk)
        clock.now += AGAIN_S
    assert controller.asked == 3
    assert desk.since(begun) is None
    controller.answer = JobStatus(ours=False, runs=True)
    desk.ask_since(begun)
    settled(desk)
    assert desk.since(begun) == controller.answer
    desk.ask_since(begun)
    settled(desk)
    assert controller.asked == 4


def test_who_presses_for_an_ever_later_moment_does_not_flood_slurm() -> None:
    clock, controller = ManualClock(), Controller(JobStatus(ours=True, runs=True))
    controller.free.set()
    desk = StatusPoller(controller, clock)  # type: ignore[arg-type]
    for _ in range(50):
        desk.ask_since(clock.now)
        settled(desk)
        clock.now += AGAIN_S / 10
    assert controller.asked == 5


def test_while_nobody_has_said_whether_there_is_a_limit_it_is_asked_often() -> None:
    clock, controller = ManualClock(), Controller()
    controller.free.set()
    desk = StatusPoller(controller, clock)  # type: ignore[arg-type]
    for answer in (None, JobStatus(ours=True, runs=True, left_s=100.0)):
        controller.answer = answer
        desk.tick()
        settled(desk)
        assert (desk.left_s() is None) is (answer is None)
        clock.now += STATUS_EVERY_S
