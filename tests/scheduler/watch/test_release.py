"""Letting a requeued job go: what is asked of Slurm; which nodes it is kept off: test_exclusion.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.clock import ManualClock
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.slurm.parse import parse_nodes
from deeplink.scheduler.watch.book import BeatBook
from deeplink.scheduler.watch.evidence import Answer, Policy
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.ladder import NEXT_SECOND_S
from deeplink.scheduler.watch.observer import Cluster, Observer
from deeplink.scheduler.watch.probe import Address, TcpProber
from deeplink.scheduler.watch.records import Beat, Phase
from deeplink.scheduler.watch.release import Releaser
from deeplink.scheduler.watch.rewish import Wish, Wishes
from deeplink.types import Attempt, NodeName


@dataclass
class Controller:
    """Job 17, which waits; Slurm refuses to change `refused` of it."""

    refused: str = ""
    deaf: bool = False
    unheard: bool = False
    why: str = "slurm_update error: Invalid node name specified"
    excluded: str = ""
    told: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] == "squeue":
            (separator,) = set(re.findall("\x1f\\w+\x1f", " ".join(argv)))
            return "".join(f"{field}{separator}" for field in ("main", "2", self.excluded, ""))
        if argv[0] == "sinfo":
            return "n0\nn1\nn2\n"
        self.told.append(tuple(argv[3:]))
        if self.refused and self.refused in " ".join(argv):
            raise CommandError(argv, 1, self.why)
        if not self.deaf:
            fields = dict(word.split("=", 1) for word in argv[3:])
            self.excluded = fields.get("ExcNodeList", self.excluded)
        if self.deaf or self.unheard:
            raise CommandTimeoutError(argv, timeout_s)
        return ""


@dataclass
class Counted:
    """Nobody answers; who was tried is counted."""

    tried: list[NodeName] = field(default_factory=list)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, Answer]:
        self.tried += targets
        return dict.fromkeys(targets, Answer.SILENT)


class Wished(Wishes):
    """The wish is always for n4 and n5."""

    @override
    def anew(self, job: int, excluded: AbstractSet[NodeName]) -> Wish:
        return Wish({"ReqNodeList": "n[4-5]"}, (NodeName("n4"), NodeName("n5")))


@pytest.mark.parametrize(
    ("refused", "told", "wished"),
    [
        ("", [("ReqNodeList=n[4-5]", "StartTime=now")], True),
        ("ReqNodeList", [("ReqNodeList=n[4-5]", "StartTime=now"), ("StartTime=now",)], False),
    ],
)
def test_a_job_whose_wish_is_refused_is_let_go_without_it_at_once(
    tmp_path: Path, refused: str, told: list[tuple[str, ...]], wished: bool
) -> None:
    controller, clock, said = Controller(refused), ManualClock(), list[str]()
    slurm = Slurm(controller)
    with Journal(tmp_path / "j.sqlite") as journal:
        observer = Observer(
            slurm=slurm, prober=TcpProber(clock), book=BeatBook(), journal=journal, clock=clock, policy=Policy()
        )
        releaser = Releaser(
            slurm=slurm,
            journal=journal,
            observer=observer,
            clock=clock,
            say=said.append,
            wishes=Wished(run=controller, state_of=lambda _: None, ground=lambda _: None, clock=clock),  # type: ignore[arg-type,return-value] # the wish is not made, it is there
        )
        releaser.release(17, ())
    assert (controller.told, releaser.wished(17)) == (told, wished)
    assert len(said) == 1


@pytest.mark.parametrize(
    "controller",
    [
        pytest.param(Controller(unheard=True), id="we gave it up"),
        pytest.param(
            Controller("ReqNodeList", why="slurm_update error: Socket timed out on send/recv operation"),
            id="scontrol did",
        ),
    ],
)
def test_a_wish_whose_command_was_not_answered_in_time_may_stand_and_is_to_be_taken_back(
    tmp_path: Path, controller: Controller
) -> None:
    clock = ManualClock()
    slurm = Slurm(controller)
    with Journal(tmp_path / "j.sqlite") as journal:
        observer = Observer(
            slurm=slurm, prober=TcpProber(clock), book=BeatBook(), journal=journal, clock=clock, policy=Policy()
        )
        releaser = Releaser(
            slurm=slurm,
            journal=journal,
            observer=observer,
            clock=clock,
            say=lambda _: None,
            wishes=Wished(run=slurm.run, state_of=lambda _: None, ground=lambda _: None, clock=clock),  # type: ignore[arg-type,return-value] # the wish is not made, it is there
        )
        with pytest.raises((CommandTimeoutError, CommandError)):
            releaser.release(17, ())
        assert releaser.wished(17)


@pytest.mark.parametrize("heard", [True, False])
def test_nodes_that_we_excluded_are_never_taken_for_the_users_whatever_became_of_the_command(
    tmp_path: Path, heard: bool
) -> None:
    controller, clock = Controller(excluded="n2"), ManualClock()
    rows = parse_nodes("".join(f"NodeName=n{i} NodeAddr=n{i} NodeHostName=n{i} State=IDLE\n" for i in range(9)))
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.record_beat(Beat(attempt=Attempt(17, 0, 0), phase=Phase.RUNNING, user="ada"), 1.0)
        slurm = Slurm(controller)
        observer = Observer(
            slurm=slurm, prober=Counted(), book=BeatBook(), journal=journal, clock=clock, policy=Policy()
        )
        observer.cluster = Cluster(clock.monotonic(), {}, {row.name: row for row in rows})

        def release(exclude: tuple[NodeName, ...]) -> None:
            releaser = Releaser(slurm=slurm, journal=journal, observer=observer, clock=clock, say=lambda _: None)
            releaser.release(17, exclude, carry=bool(exclude))

        for exclude in ((NodeName("n1"),), ()):
            controller.deaf, controller.unheard = not heard, heard
            with pytest.raises(CommandTimeoutError):
                release(exclude)
            controller.deaf = controller.unheard = False
            release(exclude)
            assert controller.excluded == ("n[1-2]" if exclude else "n2")
            assert journal.excluded(17).keys() == {*exclude}


def test_whom_a_restart_suspects_again_is_suspected_from_now_on(tmp_path: Path) -> None:
    clock = ManualClock()
    rows = parse_nodes("".join(f"NodeName=n{i} NodeAddr=n{i} NodeHostName=n{i} State=IDLE\n" for i in range(9)))
    n1, n2 = NodeName("n1"), NodeName("n2")
    with Journal(tmp_path / "j.sqlite") as journal:
        slurm = Slurm(Controller())
        observer = Observer(
            slurm=slurm, prober=Counted(), book=BeatBook(), journal=journal, clock=clock, policy=Policy()
        )
        observer.cluster = Cluster(clock.monotonic(), {}, {row.name: row for row in rows})
        releaser = Releaser(slurm=slurm, journal=journal, observer=observer, clock=clock, say=lambda _: None)
        first = clock.unix()
        releaser.release(17, (n1, n2))
        clock.sleep(600.0)
        releaser.release(17, (n1,))
        assert journal.excluded(17) == {n1: first + 600.0, n2: first}


def test_a_dead_node_is_asked_in_the_second_before_the_release_and_not_again_in_it(tmp_path: Path) -> None:
    controller, clock, prober = Controller(), ManualClock(), Counted()
    rows = parse_nodes("".join(f"NodeName=n{i} NodeAddr=n{i} NodeHostName=n{i} State=IDLE\n" for i in range(3)))
    with Journal(tmp_path / "j.sqlite") as journal:
        slurm = Slurm(controller)
        observer = Observer(
            slurm=slurm, prober=prober, book=BeatBook(), journal=journal, clock=clock, policy=Policy()
        )
        observer.cluster = Cluster(clock.monotonic(), {}, {row.name: row for row in rows})
        releaser = Releaser(slurm=slurm, journal=journal, observer=observer, clock=clock, say=lambda _: None)
        releaser.look_ahead((NodeName("n1"),))
        clock.sleep(NEXT_SECOND_S)
        releaser.release(17, (NodeName("n1"),))
    assert prober.tried == ["n1"]
    assert controller.told == [("ExcNodeList=n1", "StartTime=now")]
