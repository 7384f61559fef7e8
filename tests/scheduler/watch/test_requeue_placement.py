"""The hint of a job that starts again: made as by the planner, near its data, or not at all."""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint import decision as record
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Recorded, Why
from deeplink.scheduler.placement.request import DataResidency
from deeplink.scheduler.slurm.command import CommandTimeoutError
from deeplink.scheduler.watch.resubmit import RequeueHints, other_user, state_folder
from tests.scheduler.placement.hint.simulated import NODES, SITE, survey_of

NOTHING = Decision(kind=HintKind.NOTHING, why=Why.AS_GOOD, words="")


@dataclass
class Bench:
    state: Path
    busy: set[NodeName] = field(default_factory=set)
    queue: list[str] = field(default_factory=list)
    residency: DataResidency = field(default_factory=DataResidency)
    silent: bool = False
    longest_s: float = 30.0
    state_of: Callable[[str], Path | None] | None = None

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.silent:
            raise CommandTimeoutError(argv, timeout_s)
        return "".join(self.queue).replace("|", argv[-1].removeprefix("%A").partition("%")[0])

    def waits(
        self,
        number: int,
        *,
        required: str = "",
        nodes: int = 1,
        label: str = "",
        priority: int = 5,
        comment: str = "",
    ) -> None:
        asks = f"{nodes}|{priority}|{required}"
        self.queue.append(
            f"{number}|{label or number}|PENDING|BeginTime|me|main|{asks}||(null)|(null)||{comment}|\n"
        )

    def note(self, decision: Decision = NOTHING, *, nodes: int = 2) -> None:
        ask = Ask(nodes=nodes, exclusive=True, data=("digits",))
        record.append(
            record.job_folder(self.state, 7), Recorded(unix=1.0, by="sbatch", ask=ask, decision=decision)
        )

    def hints(self) -> RequeueHints:
        return RequeueHints(
            run=self,
            state_of=self.state_of or (lambda user: self.state if user == "me" else None),
            ground=lambda _jobs: replace(survey_of(self.busy), residency={("digits",): self.residency}),
            clock=ManualClock(),
            longest_s=self.longest_s,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_it_is_wished_onto_nodes_that_are_close_together_and_free_of_the_excluded(bench: Bench) -> None:
    bench.note()
    bench.waits(7)  # Slurm tells a job of two nodes that lost one as one of one node
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert len(made.nodes) == 2
    assert NODES[0] not in made.nodes
    assert len({SITE.ties.fabric.leaf(name) for name in made.nodes}) == 1
    assert "ReqNodeList" in made.changes
    last = record.read(record.job_folder(bench.state, 7))[-1]
    assert (last.by, last.decision.nodes) == ("watch", made.nodes)


def test_it_is_wished_onto_the_nodes_that_hold_what_is_left_of_its_data(bench: Bench) -> None:
    bench.note()
    bench.waits(7)
    leaf = SITE.ties.fabric.leaf(NODES[-1])
    near = tuple(name for name in NODES if SITE.ties.fabric.leaf(name) == leaf)
    bench.residency = DataResidency(dict.fromkeys(near, 1 << 30), len(near) << 30)
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert {*made.nodes} <= {*near}


def test_a_wish_of_its_submission_that_holds_the_dead_node_is_replaced(bench: Bench) -> None:
    bench.note(Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(NODES[0], NODES[1])))
    bench.waits(7, required=f"{NODES[0]},{NODES[1]}", comment="deeplink-wish=n[0-1]")
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert NODES[0] not in made.nodes
    assert made.changes["Comment"] == f"deeplink-wish={made.changes['ReqNodeList']}"


def test_a_wish_of_its_submission_is_taken_back_where_there_is_no_other(bench: Bench) -> None:
    bench.note(Decision(kind=HintKind.NODES, why=Why.FREE_NOW, words="", nodes=(NODES[0], NODES[1])))
    bench.waits(7, required=f"{NODES[0]},{NODES[1]}", comment="deeplink-wish=n[0-1]")
    bench.busy = {*NODES[3:]}
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert made.changes == {"ReqNodeList": "", "Comment": ""}


def test_nothing_is_wished_where_there_is_no_choice(bench: Bench) -> None:
    bench.note()
    bench.waits(7)
    bench.busy = {*NODES[3:]}
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert (made.nodes, dict(made.changes)) == ((), {})


def test_nothing_is_wished_while_a_job_before_it_may_be_given_any_node(bench: Bench) -> None:
    bench.note()
    bench.waits(7)
    bench.waits(3, priority=9)
    bench.queue[-1] = bench.queue[-1].replace("BeginTime", "Resources")
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert made.nodes == ()


def test_nodes_that_its_user_named_are_his(bench: Bench) -> None:
    bench.note()
    bench.waits(7, required=NODES[5])
    made = bench.hints().of(7, {NODES[0]})
    assert made is not None
    assert (made.nodes, dict(made.changes)) == ((), {})


def test_of_a_job_that_nobody_noted_or_a_slurm_that_is_silent_there_is_no_wish(bench: Bench) -> None:
    bench.waits(7)
    assert bench.hints().of(7, frozenset()) is None
    bench.note()
    bench.silent = True
    assert bench.hints().of(7, frozenset()) is None


def test_a_record_that_cannot_be_read_in_time_holds_no_job_back(bench: Bench) -> None:
    folder = record.job_folder(bench.state, 7)
    folder.mkdir(parents=True)
    os.mkfifo(folder / record.NAME)
    bench.waits(7)
    assert bench.hints().of(7, frozenset()) is None
    hung = threading.Event()

    def hang(_user: str) -> None:
        hung.wait(60)

    bench.state_of, bench.longest_s = hang, 0.2
    assert bench.hints().of(7, frozenset()) is None
    hung.set()


def test_who_is_somebody_else() -> None:
    me = pwd.getpwuid(os.getuid())
    other = next(entry for entry in pwd.getpwall() if entry.pw_uid != me.pw_uid)
    assert (other_user(me.pw_name), other_user(other.pw_name)) == (None, other.pw_uid)
    assert other_user("no-such-user-here") is None


def test_the_records_of_others_are_below_their_homes() -> None:
    me = pwd.getpwuid(os.getuid())
    own = Path(me.pw_dir) / "elsewhere"
    other = next(entry for entry in pwd.getpwall() if entry.pw_uid != me.pw_uid)
    assert state_folder(own, me.pw_name) == own
    assert state_folder(own, other.pw_name) == Path(other.pw_dir) / "elsewhere"
    assert state_folder(Path("/var/lib/site"), other.pw_name) == Path(other.pw_dir) / ".local/state/deeplink"
    assert state_folder(own, "no-such-user-here") is None
