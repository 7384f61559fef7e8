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
from deeplink.scheduler.slurm.command import CommandError
from deeplink.scheduler.slurm.parse import parse_nodes
from deeplink.scheduler.watch.book import BeatBook
from deeplink.scheduler.watch.evidence import Answer, Policy
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.ladder import NEXT_SECOND_S
from deeplink.scheduler.watch.observer import Cluster, Observer
from deeplink.scheduler.watch.probe import Address, TcpProber
from deeplink.scheduler.watch.release import Releaser
from deeplink.scheduler.watch.rewish import Wish, Wishes
from deeplink.types import NodeName


@dataclass
class Controller:
    """Job 17, which waits; Slurm refuses to change `refused` of it."""

    refused: str = ""
    told: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] == "squeue":
            (separator,) = set(re.findall("\x1f\\w+\x1f", " ".join(argv)))
            return "".join(f"{field}{separator}" for field in ("main", "2", "", ""))
        if argv[0] == "sinfo":
            return "n0\nn1\nn2\n"
        self.told.append(tuple(argv[3:]))
        if self.refused and self.refused in " ".join(argv):
            raise CommandError(argv, 1, "slurm_update error: Invalid node name specified")
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
