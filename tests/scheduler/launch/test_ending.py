"""How a run ends: which jobs are held, which fail, and what Slurm is told; with the real Slurm: tests/cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.backend import RunContext
from deeplink.scheduler.launch.ending import ORDER_S, Ending
from deeplink.scheduler.launch.event_log import EventLog, EventSink
from deeplink.scheduler.launch.history import History, Progress, file_of
from deeplink.scheduler.launch.launch_spec import LaunchSpec
from deeplink.scheduler.launch.slurm_backend import ANSWER_S, LOOK_AGAIN_S, SlurmBackend
from deeplink.scheduler.launch.status_reporter import StatusReporter
from deeplink.scheduler.recovery.rank_failure import Cause, RelaunchLimits
from deeplink.scheduler.recovery.records import Action, Beat, IncidentKind, IncidentOutcome
from deeplink.scheduler.recovery.relaunch import AttemptVerdict, NextMove, RelaunchPolicy
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import COMMAND_TIMEOUT_S, CommandError
from tests.scheduler.slurm.answers import answer, job_answer
from tests.waiting import until

COMMAND = ("python", "train.py")
FAILED = AttemptVerdict(
    move=NextMove.FAILED,
    because="exit code 5 again at step 12: the application",
    code=5,
    kind=IncidentKind.APPLICATION_FAILED,
    cause=Cause.UNKNOWN,
)


@dataclass
class Controller:
    """Job 17 on n0 and n1, as Slurm's commands tell of it."""

    requeue: bool = True
    given_up_after: int = 0
    silent_for: int = 0
    pending_for: int = 0
    comment: str = "mine"
    told: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        self.silent_for -= 1
        if self.silent_for >= 0:
            raise CommandError(
                argv, 1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
            )
        if argv[0] == "squeue" and "%k" in " ".join(argv):
            return answer(argv, 17, self.comment)
        if argv[0] == "squeue":
            self.pending_for -= 1
            if self.pending_for >= 0:
                return job_answer(argv, 17, state="PENDING", requeueable=self.requeue, nodes="", host="n/a")
            return job_answer(argv, 17, requeueable=self.requeue)
        if argv[1] == "show":
            self.given_up_after -= 1
            return f"NodeName=n1 State={'DOWN' if self.given_up_after < 0 else 'MIXED'}+NOT_RESPONDING"
        if argv[1].startswith("requeue") and self.pending_for >= 0:
            raise CommandError(argv, 1, "Job is pending execution for job 17")
        if argv[1] == "requeuehold" and not self.requeue:
            raise CommandError(argv, 1, "Requested operation is presently disabled")
        self.told.append(tuple(argv[1:]))
        return ""


class NoAgents:
    starter = doubt = ""
    gone = frozenset[NodeName]()

    def announced(self) -> list[Any]:
        return []

    def ended(self) -> None:
        return None

    def killed(self) -> frozenset[NodeName]:
        return frozenset()

    def last_words(self) -> str:
        return ""

    def abandon(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Run:
    """The end of a run of job 17, up to what watchdog and people hear of it."""

    folder: Path
    chronicle: EventLog
    clock: ManualClock
    beats: list[Beat]

    def ending(
        self, controller: Controller, *, hold: bool | None = None, limits: RelaunchLimits | None = None
    ) -> Ending:
        nodes = (NodeName("n0"), NodeName("n1"))
        backend = SlurmBackend(
            17,
            0,
            "ada",
            "resnet",
            nodes,
            {"SLURM_JOB_ID": "17"},
            self.folder,
            slurm=Slurm(controller),
            clock=self.clock,
        )
        agents = AgentPool(NoAgents(), lambda _: "", self.clock)
        spec = LaunchSpec(command=COMMAND, per_node=1, count=2, hold=hold)
        policy = RelaunchPolicy(limits=limits or RelaunchLimits())
        run = RunContext(backend, agents, self.chronicle, self.clock, spec, policy)
        self.account = StatusReporter(run)
        return Ending(run, self.account, lambda: any(order[0] == "requeuehold" for order in controller.told))

    def log(self, *, best: int | None = 12, restart: int = 0) -> History:
        found = History(file_of(self.folder, COMMAND), restart, Progress())
        found.progress.best = best
        return found

    def end(self, ending: Ending, *, lost: Sequence[NodeName] = (), requeueable: bool = True) -> int:
        log = self.log()
        action = ending.action_for(FAILED, log, requeueable=requeueable)
        self.account.open(IncidentKind.APPLICATION_FAILED, None, 0.0, FAILED.because, action)
        return ending.give_up(FAILED, action, log, 2, lost=lost)

    def heard(self) -> tuple[list[dict[str, Any]], Beat]:
        self.chronicle.close()
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], self.beats[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    clock, beats = ManualClock(), list[Beat]()
    chronicle = EventLog(tmp_path, clock, [EventSink(beats.append, "test")])
    yield Run(tmp_path, chronicle, clock, beats)
    chronicle.close()


def test_a_job_is_held_once_a_controller_that_was_away_answers_again(run: Run) -> None:
    controller = Controller(silent_for=25)
    assert run.end(run.ending(controller)) == 5
    assert controller.told[-1] == ("requeuehold", "17")


def test_a_controller_that_has_just_come_up_and_takes_the_job_for_one_that_waits_gets_no_order(run: Run) -> None:
    controller = Controller(silent_for=3, pending_for=4)
    assert run.end(run.ending(controller), lost=[NodeName("n1")]) == 5
    assert controller.told[-1] == ("requeuehold", "17")


def test_nothing_is_ordered_after_it_was_told_that_slurm_refuses() -> None:
    # The last look begins before ANSWER_S is over: the job, its nodes, its comment (read and written), the order.
    assert ORDER_S > ANSWER_S + LOOK_AGAIN_S + 5 * COMMAND_TIMEOUT_S


def test_a_controller_that_never_answers_is_waited_for_within_bounds(run: Run) -> None:
    controller, began = Controller(silent_for=10_000), run.clock.monotonic()
    assert run.end(run.ending(controller)) == 5
    assert not controller.told
    assert ANSWER_S <= run.clock.monotonic() - began < 2 * ANSWER_S
    events, _ = run.heard()
    assert [event["event"] for event in events] == ["ended"]


def test_an_application_that_fails_after_steps_is_held_with_the_reason_beside_the_job(run: Run) -> None:
    controller = Controller()
    assert run.end(run.ending(controller)) == 5
    said, held = controller.told
    assert said == ("update", "jobid=17", f"Comment=mine | deeplink: held: {FAILED.because}")
    assert held == ("requeuehold", "17")
    events, beat = run.heard()
    assert [event["event"] for event in events] == ["held", "ended"]
    assert "scontrol release 17" in events[-1]["because"]
    assert [(one.action, one.outcome) for one in beat.incidents] == [(Action.HOLD, IncidentOutcome.FAILED)]


def test_a_hold_that_slurm_refuses_is_told_as_none(run: Run) -> None:
    controller = Controller(requeue=False)
    assert run.end(run.ending(controller, hold=True)) == 5
    events, beat = run.heard()
    assert [event["event"] for event in events] == ["ended"]
    assert "release" not in events[-1]["because"]
    assert [(one.action, one.outcome) for one in beat.incidents] == [(Action.NONE, IncidentOutcome.FAILED)]


@pytest.mark.parametrize(("looks", "held"), [(3, True), (1_000, False)])
def test_never_while_a_lost_node_is_still_a_part_of_the_job(run: Run, looks: int, held: bool) -> None:
    controller = Controller(given_up_after=looks)
    assert run.end(run.ending(controller), lost=[NodeName("n1")]) == 5
    assert (("requeuehold", "17") in controller.told) is held


def before_the_first_step(run: Run) -> History:
    return run.log(best=None)


def after_a_step_of_this_run(run: Run) -> History:
    return run.log(best=12)


def after_a_step_of_an_earlier_run(run: Run) -> History:
    run.log(best=None).note_step()
    until(lambda: bool(list(run.folder.glob("stepped.*"))))
    return run.log(best=None, restart=1)


def after_a_run_that_ended_so(run: Run) -> History:
    run.log(best=None).leave(FAILED, 0.0)
    return run.log(best=None, restart=1)


@pytest.mark.parametrize(
    ("log", "held"),
    [
        (before_the_first_step, False),
        (after_a_step_of_this_run, True),
        (after_a_step_of_an_earlier_run, True),
        (after_a_run_that_ended_so, True),
    ],
)
def test_a_job_is_held_where_there_is_something_to_go_on_from(
    run: Run,
    log: Callable[[Run], History],
    held: bool,
) -> None:
    left = log(run)
    wanted = Action.HOLD if held else Action.NONE
    assert run.ending(Controller()).action_for(FAILED, left, requeueable=True) is wanted
    assert run.ending(Controller(), hold=True).action_for(FAILED, left, requeueable=True) is Action.HOLD
    assert run.ending(Controller(), hold=False).action_for(FAILED, left, requeueable=True) is Action.NONE


@pytest.mark.parametrize("limits", [RelaunchLimits(retries=False), RelaunchLimits(final_codes=frozenset({5}))])
def test_a_code_that_somebody_waits_for_ends_the_job(run: Run, limits: RelaunchLimits) -> None:
    ending = run.ending(Controller(), limits=limits)
    assert ending.action_for(FAILED, run.log(), requeueable=True) is Action.NONE


def test_a_job_that_slurm_may_not_requeue_ends(run: Run) -> None:
    assert run.ending(Controller()).action_for(FAILED, run.log(), requeueable=False) is Action.NONE


@pytest.mark.parametrize(
    "kind", [IncidentKind.RANK_FAILED, IncidentKind.RANKS_HUNG, IncidentKind.NODE_SILENT, IncidentKind.TIME_LIMIT]
)
def test_what_is_not_the_applications_fault_is_not_held(run: Run, kind: IncidentKind) -> None:
    other = AttemptVerdict(move=NextMove.FAILED, because="it", code=5, kind=kind)
    assert run.ending(Controller()).action_for(other, run.log(), requeueable=True) is Action.NONE


def test_the_word_of_a_step_is_left_once_and_counts_for_no_other_job_of_that_number(tmp_path: Path) -> None:
    path = file_of(tmp_path, COMMAND)
    assert not History(path, 1, Progress()).goes_on
    first = History(path, 0, Progress())
    first.note_step()
    assert first.goes_on
    until(lambda: bool(list(tmp_path.glob("stepped.*"))))
    assert History(path, 1, Progress()).goes_on
    assert not History(path, 0, Progress()).goes_on, "the number of the job was used before"
    assert not History(file_of(tmp_path, ("other",)), 1, Progress()).goes_on
