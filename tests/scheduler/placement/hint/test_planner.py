"""The loop beside a scripted Slurm: bounded questions, refusals, silence, and what is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
from deeplink.scheduler.placement.hint.planner import INTERVAL_S, LONGEST_AWAY_S, SLOW_S, SOON_S, Planner
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from tests.scheduler.placement.hint.simulated import NODES, survey_of

ASK = Ask(nodes=2, exclusive=True, data=("digits",))
FEW = Decision(kind=HintKind.SWITCHES, why=Why.BUSY, words="", switches=1, patience_s=60)
PIN = Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(NODES[0], NODES[4]))


MARK = "Comment=deeplink-wish=n[0,4]"


def line(
    number: int, *, state: str = "PENDING", reason: str = "Priority", user: str = "me", required: str = ""
) -> str:
    comment = f"deeplink-wish={required}" if required else "(null)"
    return f"{number}|{number}|{state}|{reason}|{user}|main|2|5|{required}||(null)|(null)|{comment}|\n"


@dataclass
class Scripted:
    """Slurm's commands: what squeue says, and what is refused."""

    queue: str = ""
    silent: bool = False
    refuse: bool = False
    asked: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 0.0) -> str:
        self.asked.append(tuple(argv))
        if self.silent:
            raise CommandTimeoutError(argv, timeout_s)
        if argv[0] == "squeue":
            return self.queue.replace("|", argv[-1].removeprefix("%A").partition("%")[0])
        if self.refuse:
            raise CommandError(argv, 1, "Access/permission denied for job\n")
        return ""

    @property
    def updates(self) -> list[Sequence[str]]:
        return [argv for argv in self.asked if argv[0] == "scontrol"]


@dataclass
class Bench:
    slurm: Scripted
    planner: Planner
    state: Path
    said: list[str]
    wished: list[tuple[int, tuple[str, ...], Sequence[NodeName]]]
    busy: set[NodeName] = field(default_factory=set)

    def note(self, number: int, decision: Decision) -> None:
        made = Recorded(unix=self.planner.clock.unix(), by="sbatch", ask=ASK, decision=decision)
        record.append(record.job_folder(self.state, number), made)

    def decisions(self, number: int) -> list[Recorded]:
        return record.read(record.job_folder(self.state, number))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    slurm = Scripted()
    said: list[str] = []
    wished: list[tuple[int, tuple[str, ...], Sequence[NodeName]]] = []
    planner = Planner(
        slurm=Slurm(slurm),
        user="me",
        state=tmp_path,
        survey=lambda _jobs: survey_of(made.busy),
        clock=ManualClock(),
        say=said.append,
        wished=lambda job, data, nodes: wished.append((job, data, nodes)),
    )
    made = Bench(slurm, planner, tmp_path, said, wished)
    return made


def test_nodes_are_wished_written_down_and_told_to_who_warms_them(bench: Bench) -> None:
    bench.note(7, FEW)
    bench.slurm.queue = line(7)
    assert bench.planner.tick() == SOON_S
    assert bench.slurm.updates == [
        ("scontrol", "update", "jobid=7", "ReqNodeList=n[0,4]", MARK, "Switches=2@00:00:00")
    ]
    last = bench.decisions(7)[-1]
    assert (last.by, last.decision.kind, last.done) == ("plan", HintKind.NODES, bench.slurm.updates[0])
    assert bench.wished == [(7, ("digits",), ("n0", "n4"))]


def test_nodes_that_were_wished_at_submission_are_told_once(bench: Bench) -> None:
    bench.note(7, PIN)
    bench.slurm.queue = line(7, reason="", required="n[0,4]")
    for _ in range(3):
        bench.planner.tick()
    assert bench.wished == [(7, ("digits",), ("n0", "n4"))]


def test_one_question_for_the_queue_however_many_jobs_wait_and_only_ours_are_touched(bench: Bench) -> None:
    for number in range(7, 27):
        bench.note(number, FEW)
    bench.note(40, FEW)
    bench.slurm.queue = "".join(line(number) for number in range(7, 27)) + line(40, user="other") + line(41)
    bench.planner.look()
    assert sum(argv[0] == "squeue" for argv in bench.slurm.asked) == 1
    assert {argv[2] for argv in bench.slurm.updates} == {f"jobid={number}" for number in range(7, 27)}


def test_what_stays_as_it_is_is_written_down_once(bench: Bench) -> None:
    bench.busy = set(NODES)
    bench.note(7, Decision(kind=HintKind.NOTHING, why=Why.STARTS_LATER, words="it is held"))
    bench.slurm.queue = line(7)
    for _ in range(5):
        assert bench.planner.tick() == INTERVAL_S
    assert [made.decision.why for made in bench.decisions(7)] == [Why.STARTS_LATER, Why.BUSY]
    assert not bench.slurm.updates


def test_a_refused_change_is_told_once_and_not_asked_for_for_ever(bench: Bench) -> None:
    bench.note(7, FEW)
    bench.slurm.queue, bench.slurm.refuse = line(7), True
    for _ in range(20):
        bench.planner.tick()
    assert 1 <= len(bench.slurm.updates) <= 6
    assert sum("refused" in words for words in bench.said) == 1
    words = [made.decision.words for made in bench.decisions(7)]
    assert sum("Access/permission denied" in one for one in words) == 1
    assert words[-1] == "Slurm refuses every change of it"
    assert bench.decisions(7)[-1].decision.kind is HintKind.SWITCHES


def test_a_silent_slurm_is_waited_for_with_pauses_that_grow_and_told_once(bench: Bench) -> None:
    bench.slurm.silent = True
    pauses = [bench.planner.tick() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_AWAY_S
    assert len(bench.said) == 1
    bench.slurm.silent = False
    bench.planner.tick()
    assert "answers again" in bench.said[-1]


def test_a_job_in_a_state_of_a_newer_slurm_keeps_no_other_from_being_planned(bench: Bench) -> None:
    bench.note(7, FEW)
    bench.slurm.queue = line(7) + line(8, state="DREAMING")
    bench.planner.tick()
    assert bench.said[0].startswith("job 7: hint at")
    bench.slurm.queue = line(7) + line(8, state="dreaming?")
    bench.planner.tick()
    assert "dreaming?" in bench.said[-1]


def test_without_jobs_it_is_slow_and_then_idle(bench: Bench) -> None:
    assert bench.planner.tick() == SLOW_S
    idle = [bench.planner.idle]
    bench.planner.tick()
    assert [*idle, bench.planner.idle] == [False, True]
    assert bench.planner.over


def test_a_job_that_is_queued_again_is_freed_of_the_nodes_wished_for_its_last_run(bench: Bench) -> None:
    bench.note(7, PIN)
    bench.slurm.queue = line(7, state="RUNNING", required="n[0,4]")
    assert bench.planner.tick() == SLOW_S
    bench.slurm.queue = line(7, reason="Resources", required="n[0,4]")
    bench.planner.tick()
    assert bench.slurm.updates == [("scontrol", "update", "jobid=7", "ReqNodeList=", "Comment=")]


def test_to_say_what_would_be_done_changes_nothing(bench: Bench) -> None:
    bench.planner.act = False
    bench.note(7, FEW)
    bench.slurm.queue = line(7)
    assert bench.planner.look().moves
    assert not bench.slurm.updates
    assert len(bench.decisions(7)) == 1
    assert bench.said


def test_one_job_alone(bench: Bench) -> None:
    bench.planner.only = 7
    for number in (7, 8):
        bench.note(number, FEW)
    bench.slurm.queue = line(7) + line(8)
    bench.planner.tick()
    assert [argv[2] for argv in bench.slurm.updates] == ["jobid=7"]
    bench.slurm.queue = line(7, state="RUNNING") + line(8)
    bench.planner.tick()
    assert bench.planner.over


def test_a_wish_that_somebody_took_back_is_none(bench: Bench) -> None:
    bench.busy = set(NODES)
    bench.note(7, PIN)
    bench.slurm.queue = line(7)
    (move,) = bench.planner.look().moves
    assert move.decision.kind is HintKind.NOTHING
