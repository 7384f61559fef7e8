"""What a launcher asks of Slurm about its own job; with the real Slurm: tests/cluster/test_run.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.clock import ManualClock
from deeplink.scheduler.launch.slurm import SlurmBackend
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from deeplink.types import NodeName
from tests.scheduler.slurm.answers import answer, job_answer

LOST = NodeName("n1")


@dataclass
class Cluster:
    """Job 17 and node n1, as Slurm's commands tell of them."""

    node_state: str = "DOWN+NOT_RESPONDING"
    restarts: int = 0
    state: str = "RUNNING"
    requeued: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] == "squeue":
            if "TimeLeft" in argv[-1]:
                return answer(argv, "1:00:00", "N/A", "2026-11-20T17:01:31")
            return job_answer(argv, 17, state=self.state, restarts=self.restarts)
        if argv[1] == "show":
            return f"NodeName=n1 State={self.node_state}"
        self.requeued.append(argv[2])
        return ""


def backend(cluster: Cluster, restart: int = 0) -> SlurmBackend:
    nodes = (NodeName("n0"), LOST)
    return SlurmBackend(17, restart, "ada", "resnet", nodes, {}, Path("/state/17"), slurm=Slurm(cluster))


def test_a_job_whose_lost_node_is_down_is_requeued() -> None:
    cluster = Cluster(restarts=2)
    assert backend(cluster, restart=2).requeue_if_down([LOST])
    assert cluster.requeued == ["17"]


@pytest.mark.parametrize(
    ("state", "restarts", "ours", "runs"),
    [
        ("RUNNING", 2, True, True),
        ("PENDING", 2, True, True),  # so says a controller that has just come up
        ("PENDING", 3, False, False),
        ("CANCELLED", 2, True, False),
    ],
)
def test_whose_the_job_is_and_whether_it_runs(state: str, restarts: int, *, ours: bool, runs: bool) -> None:
    word = backend(Cluster(state=state, restarts=restarts), restart=2).standing()
    assert word is not None
    assert (word.ours, word.runs, word.left_s) == (ours, runs, 3600.0)


@pytest.mark.parametrize(
    "cluster", [Cluster(node_state="MIXED+NOT_RESPONDING"), Cluster(restarts=1), Cluster(state="PENDING")]
)
def test_never_while_a_node_is_only_unreachable_nor_by_an_older_run(cluster: Cluster) -> None:
    assert not backend(cluster).requeue_if_down([LOST])
    assert cluster.requeued == []


@dataclass
class Ending(Cluster):
    """Takes the job back, and ends the very command that asked for it before it can say so; `later` once more."""

    later: int = 0

    @override
    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.requeued and self.later:
            self.later -= 1
            raise CommandError(argv, -15, "")
        said = super().__call__(argv, timeout_s=timeout_s)
        if argv[1] == "requeue":
            self.restarts, self.state = self.restarts + 1, "COMPLETING"
            raise CommandError(argv, -15, "")
        return said


@pytest.mark.parametrize("later", [0, 1])
def test_an_order_that_ends_its_own_command_was_heard(later: int) -> None:
    cluster = Ending(later=later, node_state="IDLE")
    nodes = (NodeName("n0"), LOST)
    slurm = Slurm(cluster)
    ours = SlurmBackend(17, 0, "ada", "resnet", nodes, {}, Path("/state/17"), slurm=slurm, clock=ManualClock())
    assert ours.requeue([])
    assert cluster.requeued == ["17"], "once"
