"""Which nodes Slurm has withdrawn: what its answers mean, and asking for them without waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.launch.backend import NodesStatus
from deeplink.scheduler.launch.slurm_monitor import NODES_EVERY_S, NODES_S, NodesPoller
from deeplink.scheduler.slurm.parse import JobRow, NodeRow, parse_nodes
from deeplink.scheduler.slurm.states import JobState
from tests.waiting import LIMIT_S

N0, N1, N2 = map(NodeName, ("n0", "n1", "n2"))


def row(name: str, state: str, reason: str = "") -> NodeRow:
    (found,) = parse_nodes(
        f"NodeName={name} State={state}{f' Reason={reason} [root@2026-11-20]' if reason else ''}"
    )
    return found


def job(nodes: Collection[NodeName], *, restarts: int = 2, state: JobState = JobState.RUNNING) -> JobRow:
    return JobRow(
        id=JobId(17),
        label="17",
        state=state,
        reason="",
        restarts=restarts,
        requeueable=True,
        user="ada",
        nodes=tuple(nodes),
        batch_host=N0,
        name="resnet",
    )


ALL = job([N0, N1, N2])
FEWER = job([N0, N1])


@pytest.mark.parametrize(
    ("state", "reason", "of", "out", "taken"),
    [
        ("ALLOCATED", "", ALL, {}, {}),
        ("ALLOCATED+DRAIN", "fan", ALL, {N2: "drained: fan"}, {}),
        ("DOWN", "fan", ALL, {N2: "down: fan"}, {}),
        ("DOWN", "fan", FEWER, {}, {N2: "down: fan"}),
        # With ReturnToService=2 a node whose slurmd answers is in service again at once, for others.
        ("IDLE", "", FEWER, {}, {N2: "idle"}),
        ("ALLOCATED+DRAIN", "fan", FEWER, {}, {N2: "drained: fan"}),
        # A controller that has just come up takes the job for one that waits; a later run has nodes of its own.
        ("DOWN", "fan", job([], state=JobState.PENDING), {N2: "down: fan"}, {}),
        ("ALLOCATED", "", replace(FEWER, restarts=3), {}, {}),
    ],
)
def test_a_node_that_is_not_the_jobs_any_more_is_taken_whatever_its_state(
    state: str, reason: str, of: JobRow, out: dict[NodeName, str], taken: dict[NodeName, str]
) -> None:
    rows = [row("n0", "ALLOCATED"), row("n1", "ALLOCATED"), row("n2", state, reason)]
    assert NodesStatus.of((N0, N1, N2), rows, of, 2) == NodesStatus(out=out, taken=taken)


def test_a_node_that_slurm_knows_no_more_is_taken() -> None:
    rows = [row("n0", "ALLOCATED"), row("n1", "ALLOCATED")]
    assert NodesStatus.of((N0, N1, N2), rows, FEWER, 2) == NodesStatus(taken={N2: "unknown"})


@dataclass
class Controller:
    """Answers when it is let, as slurmctld does."""

    word: NodesStatus | None = None
    asked: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    def nodes_status(self) -> NodesStatus | None:
        self.asked += 1
        assert self.free.wait(LIMIT_S)
        return self.word


@dataclass
class Heard:
    """What was told, by event."""

    told: list[tuple[str, str]] = field(default_factory=list)

    def event(self, name: str, sentence: str = "", **_: Any) -> None:
        self.told.append((name, sentence))


def answered() -> None:
    for thread in threading.enumerate():
        if thread.name == "deeplink-nodes":
            thread.join(LIMIT_S)


def test_slurms_last_word_on_the_nodes_counts_while_it_gives_none_and_that_is_said() -> None:
    clock, controller, heard = ManualClock(), Controller(NodesStatus(taken={N1: "down: fan"})), Heard()
    service = NodesPoller(controller, clock)  # type: ignore[arg-type] # all that it uses of a backend
    assert service.look(lambda: None) == NodesStatus(), "it has never answered"
    assert clock.now >= NODES_S, "it is waited for, and not for ever"
    controller.free.set()
    assert service.look(answered) == controller.word
    controller.word = None  # the controller is away
    clock.now += 1.0
    assert service.look(answered).taken == {N1: "down: fan"}
    service.report(heard, [N0, N1], [N0])  # type: ignore[arg-type] # all that it uses of a chronicle
    assert [event for event, _ in heard.told] == ["nodes-unknown", "taken"]
    assert heard.told[-1][1] == "n1 is down: fan; Slurm has taken it from the job, it is not used any more"
    controller.word = NodesStatus()
    clock.now += 1.0
    assert service.look(answered) == NodesStatus()


def test_an_answer_to_an_earlier_question_is_no_answer_to_this_one() -> None:
    clock, controller = ManualClock(), Controller(NodesStatus())
    service = NodesPoller(controller, clock)  # type: ignore[arg-type]
    service.tick()  # under way, since before the node was taken
    clock.now += 1.0

    def listen() -> None:
        controller.free.set()
        answered()
        controller.word = NodesStatus(taken={N1: "idle"})

    assert service.look(listen).taken == {N1: "idle"}


def test_an_answer_to_what_was_asked_while_the_ranks_ended_is_not_waited_for_again() -> None:
    clock, controller = ManualClock(), Controller(NodesStatus(taken={N1: "idle"}))
    controller.free.set()
    service = NodesPoller(controller, clock)  # type: ignore[arg-type]
    asked = service.ask()
    answered()
    clock.now += NODES_S / 2
    assert service.look(answered, asked).taken == {N1: "idle"}
    assert (controller.asked, clock.now) == (1, 1_000.0 + NODES_S / 2)
    clock.now += NODES_S  # what is so old may have changed
    assert service.look(answered, asked).taken == {N1: "idle"}
    assert controller.asked == 2


def test_a_stranded_job_asks_now_and_then() -> None:
    clock, controller = ManualClock(), Controller(NodesStatus())
    controller.free.set()
    service = NodesPoller(controller, clock)  # type: ignore[arg-type]
    for _ in range(3):
        service.tick()
        answered()
    assert controller.asked == 1
    clock.now += NODES_EVERY_S
    service.tick()
    answered()
    assert controller.asked == 2
