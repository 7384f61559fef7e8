"""Letting a requeued job go: what is asked of Slurm; which nodes it is kept off: test_exclusion.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.liveness.probe import Address
from deeplink.scheduler.recovery.evidence import ProbeResult, WatchPolicy
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.scheduler.recovery.recovery_steps import NEXT_SECOND_S
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.slurm.parse import fresh_separator, parse_jobs, parse_nodes
from deeplink.scheduler.watch.actor import Actor
from deeplink.scheduler.watch.observer import ClusterAnswers, Observer
from tests.scheduler.slurm.answers import answer, job_answer

N1, N2 = NodeName("n1"), NodeName("n2")
_SEPARATOR = fresh_separator()
(JOB,) = parse_jobs(job_answer([_SEPARATOR], 17, state="PENDING", nodes="", host="n/a"), _SEPARATOR)


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
            return answer(argv, 17, "main", 2, self.excluded, "")
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

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        self.tried += targets
        return dict.fromkeys(targets, ProbeResult.SILENT)


@dataclass
class Bench:
    """A job, nine idle nodes, and whoever lets the job go."""

    journal: Journal
    controller: Controller = field(default_factory=Controller)
    prober: Counted = field(default_factory=Counted)
    clock: ManualClock = field(default_factory=ManualClock)

    def releaser(self) -> Actor:
        """Return one that has let nobody go yet."""
        slurm = Slurm(self.controller)
        observer = Observer(
            slurm=slurm,
            prober=self.prober,
            heartbeats=HeartbeatTable(),
            journal=self.journal,
            clock=self.clock,
            policy=WatchPolicy(),
        )
        told = (f"NodeName=n{i} NodeAddr=n{i} NodeHostName=n{i} State=IDLE\n" for i in range(9))
        rows = parse_nodes("".join(told))
        observer.cluster = ClusterAnswers(self.clock.monotonic(), {}, {row.name: row for row in rows})
        return Actor(
            slurm=slurm,
            journal=self.journal,
            observer=observer,
            clock=self.clock,
            metrics=WatchMetrics(CollectorRegistry()),
            say=lambda _line: None,
        )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Journal(tmp_path / "j.sqlite") as journal:
        yield Bench(journal)


@pytest.mark.parametrize("heard", [True, False])
def test_nodes_that_we_excluded_are_never_taken_for_the_users_whatever_became_of_the_command(
    bench: Bench, heard: bool
) -> None:
    bench.journal.record_beat(Beat(attempt=Attempt(17, 0, 0), phase=Phase.RUNNING, user="ada"), 1.0)
    controller = bench.controller
    controller.excluded = "n2"
    for exclude in ((N1,), ()):
        controller.deaf, controller.unheard = not heard, heard
        with pytest.raises(CommandTimeoutError):
            bench.releaser().release(JOB, exclude, carry=bool(exclude))
        controller.deaf = controller.unheard = False
        bench.releaser().release(JOB, exclude, carry=bool(exclude))
        assert controller.excluded == ("n[1-2]" if exclude else "n2")
        assert bench.journal.excluded(17).keys() == {*exclude}


def test_whom_a_restart_suspects_again_is_suspected_from_now_on(bench: Bench) -> None:
    releaser, first = bench.releaser(), bench.clock.unix()
    releaser.release(JOB, (N1, N2))
    bench.clock.sleep(600.0)
    releaser.release(JOB, (N1,))
    assert bench.journal.excluded(17) == {N1: first + 600.0, N2: first}


def test_a_dead_node_is_asked_in_the_second_before_the_release_and_not_again_in_it(bench: Bench) -> None:
    releaser = bench.releaser()
    releaser.observer.silent((N1,))
    bench.clock.sleep(NEXT_SECOND_S)
    releaser.release(JOB, (N1,))
    assert bench.prober.tried == ["n1"]
    assert bench.controller.told == [("ExcNodeList=n1", "StartTime=now")]
