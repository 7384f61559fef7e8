"""A requeue by its user's hint: refused while a node is unreachable, else done to the end, whatever Slurm does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.liveness.probe import Address, Prober
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.parse import JOB_FIELDS, JobRow
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.requeue import (
    RequeueError,
    Requeuer,
)
from tests.scheduler.jobs.programs import job, nodes
from tests.scheduler.jobs.test_job_names import row
from tests.scheduler.slurm.answers import answer

NAMES = tuple(NodeName(f"n{number}") for number in range(6))
N3 = NodeName("n3")


class World(Prober):
    """Slurm and its nodes: a requeued job is COMPLETING for a while, then held, then runs elsewhere."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.commands: list[str] = []
        self.state, self.reason, self.restarts = "RUNNING", "None", 0
        self.excluded, self.required = "n5", ""
        self.silent: set[str] = set()
        self.node_states: dict[str, str] = {}
        self.completing_s, self.free, self.deaf = 3.0, True, False
        self._requeued_at = 0.0

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] == "squeue" and "-O" in argv:
            self._go_on()
            listed = "n[0-2]" if self.state == "RUNNING" and not self.restarts else "n[2-4]"
            one = job(7, self.state, Reason=self.reason, RestartCnt=str(self.restarts), NodeList=listed)
            return answer(argv, *(one[field] for field in JOB_FIELDS))
        if argv[0] == "squeue":
            return answer(argv, 7, "main", 3, self.excluded, self.required)
        if argv[:3] == ["scontrol", "show", "node"]:
            return "".join(nodes([name], self.node_states.get(name, "ALLOCATED")) for name in NAMES)
        if argv[:3] == ["scontrol", "show", "config"]:
            return "SlurmdPort = 6818\n"
        self.commands.append(" ".join(argv))
        if argv[1] == "requeue" and not self.deaf:
            self.state, self._requeued_at = "COMPLETING", self.clock.now
        elif argv[1] == "update" and self.state == "PENDING":
            self.reason = "released"
        return ""

    def _go_on(self) -> None:
        if self.state == "COMPLETING" and self.clock.now - self._requeued_at >= self.completing_s:
            self.state, self.reason = "PENDING", "BeginTime"
        elif self.reason == "released":
            self.state, self.reason = ("RUNNING", "None") if self.free else ("PENDING", "Resources")
            self.restarts = 1

    @override
    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        self.clock.sleep(deadline_s if self.silent else 0.01)
        return {name: ProbeResult.SILENT if name in self.silent else ProbeResult.ANSWERS for name in targets}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def world(clock: ManualClock) -> World:
    return World(clock)


def requeuer(world: World, wait_s: float = 30.0) -> Requeuer:
    return Requeuer(slurm=Slurm(world), prober=world, clock=world.clock, say=lambda _line: None, wait_s=wait_s)


def running(**facts: object) -> JobRow:
    made = dataclasses.replace(row(7, "7"), nodes=NAMES[:3])
    return dataclasses.replace(made, **facts)  # type: ignore[arg-type]


def test_it_waits_for_pending_then_excludes_and_clears_the_hold(world: World) -> None:
    one = requeuer(world)
    one.check(running(), [N3])
    done = one.requeue(running(), [N3])
    assert (done.running, done.nodes) == (True, ("n2", "n3", "n4"))
    assert world.commands == ["scontrol requeue 7", "scontrol update jobid=7 ExcNodeList=n[3,5] StartTime=now"]
    assert one.commands(running(), [N3]) == [
        ["scontrol", "requeue", "7"],
        ["scontrol", "update", "jobid=7", "ExcNodeList=n[3,5]", "StartTime=now"],
    ]


def test_nodes_that_were_wished_for_it_do_not_bind_it_to_one_that_it_must_not_have(world: World) -> None:
    world.required = "n[0-2]"
    requeuer(world).requeue(running(), [NodeName("n2")])
    assert world.commands[1] == "scontrol update jobid=7 ExcNodeList=n[2,5] ReqNodeList= StartTime=now"
    assert requeuer(world).commands(running(), [NodeName("n2")])[1][3:] == [
        "ExcNodeList=n[2,5]",
        "ReqNodeList=",
        "StartTime=now",
    ]
    assert "ReqNodeList=" not in requeuer(world).commands(running(), [N3])[1]


def test_of_a_list_that_its_user_meant_the_other_nodes_stay(world: World) -> None:
    world.required = "n[1-2]"
    requeuer(world).requeue(running(), [NodeName("n2")])
    assert world.commands[1] == "scontrol update jobid=7 ExcNodeList=n[2,5] ReqNodeList=n1 StartTime=now"


def test_a_requeue_without_effect_is_not_sent_again_while_a_node_is_unreachable(world: World) -> None:
    world.deaf = True
    one = requeuer(world)
    one.say = lambda _line: world.silent.add("n1")
    with pytest.raises(RequeueError, match="does not answer"):
        one.requeue(running(), [])
    assert world.commands == ["scontrol requeue 7"]


def test_without_nodes_to_exclude_the_users_own_list_is_not_touched(world: World) -> None:
    assert requeuer(world).requeue(running(), []).running
    assert world.commands == ["scontrol requeue 7", "scontrol update jobid=7 StartTime=now"]


def test_a_node_that_does_not_answer_forbids_it(world: World) -> None:
    world.silent = {"n1"}
    with pytest.raises(RequeueError, match="does not answer") as told:
        requeuer(world).check(running(), [])
    assert "n1 does not answer" in str(told.value)
    assert "state=down" in told.value.remedy
    with pytest.raises(RequeueError, match="does not answer"):
        requeuer(world).requeue(running(), [])
    assert world.commands == []


def test_a_node_that_slurm_misses_forbids_it_and_one_that_is_down_does_not(world: World) -> None:
    world.node_states = {"n1": "ALLOCATED+NOT_RESPONDING"}
    with pytest.raises(RequeueError, match="does not answer"):
        requeuer(world).check(running(), [])
    world.node_states, world.silent = {"n1": "DOWN+NOT_RESPONDING"}, {"n1"}
    requeuer(world).check(running(), [])


@pytest.mark.parametrize(
    ("facts", "words"), [({"state": JobState.FAILED}, "has ended"), ({"requeueable": False}, "--no-requeue")]
)
def test_what_cannot_start_again_is_refused(world: World, facts: dict[str, object], words: str) -> None:
    with pytest.raises(RequeueError, match=words):
        requeuer(world).check(running(**facts), [])


def test_a_name_that_is_no_node_is_refused(world: World) -> None:
    with pytest.raises(RequeueError, match="n77") as told:
        requeuer(world).check(running(), [NodeName("n77")])
    assert told.value.exit_code == 2


def test_where_no_nodes_are_free_it_is_left_to_the_queue_with_its_exclusions(world: World) -> None:
    world.free = False
    done = requeuer(world).requeue(running(), [N3])
    assert (done.running, done.reason) == (False, "Resources: no suitable nodes are free")
    assert len(world.commands) == 2  # nothing that the user excluded is taken back


def test_a_job_that_waits_already_is_only_released(world: World) -> None:
    world.state, world.reason = "PENDING", "BeginTime"
    waiting = running(state=JobState.PENDING, nodes=())
    one = requeuer(world)
    one.check(waiting, [])
    assert one.requeue(waiting, []).running
    assert world.commands == ["scontrol update jobid=7 StartTime=now"]


def test_a_job_that_does_not_come_to_its_end_is_told_with_what_is_left_to_do(world: World) -> None:
    world.completing_s = 1e9
    with pytest.raises(RequeueError, match="is still COMPLETING") as told:
        requeuer(world).requeue(running(), [N3])
    assert told.value.begun
    assert "scontrol update jobid=7 ExcNodeList=n[3,5] StartTime=now" in told.value.remedy


def test_slurms_own_refusal_comes_through(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_self: Slurm, _job: int) -> bool:
        raise CommandError(["scontrol", "requeue"], 1, "Access/permission denied")

    monkeypatch.setattr(Slurm, "requeue", refused)
    with pytest.raises(CommandError, match="denied"):
        requeuer(world).requeue(running(), [])
