"""The end of a job whose launcher was on another node than its script: told truly, and by one of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from deeplink.scheduler.launch.launcher_role import ASKED_S, HEARD_WAIT_S, RoleClaims, end_job
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm import completion
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from tests.scheduler.slurm.answers import job_answer

NODES = "NodeName=n0 NodeHostName=n0 NodeAddr=n0 State=ALLOCATED Port=6818 Version=22.05.8 BootTime=None\n"
LINKED = "\tlibslurmfull.so => /usr/lib/slurm/libslurmfull.so (0x00)\n\tlibc.so.6 => /lib/libc.so.6 (0x00)\n"


@dataclass
class Controller:
    """What Slurm says of job 7, and what it was told."""

    state: str = "RUNNING"
    restarts: int = 0
    nodes: str = "n[0-1]"
    linked: str = LINKED
    away: int = 0  # questions that it does not answer
    told: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if self.away > 0:
            self.away -= 1
            raise CommandError(argv, 1, "Unable to contact slurm controller (connect failure)")
        if argv[0] == "squeue" and "-O" in argv:
            return job_answer(argv, 7, state=self.state, restarts=self.restarts, nodes=self.nodes)
        if argv[0] == "ldd":
            return self.linked
        if "node" in argv:
            return NODES
        if argv[0] == "scontrol" and "config" in argv:
            return "SlurmdPort = 6818\n"
        if argv[0] != "squeue":
            self.told.append(" ".join(argv))
        return ""


@dataclass
class Host:
    """The script's host; `then` is called each time that somebody looks whether it answers."""

    answers: bool = False
    then: Callable[[], object] = lambda: None

    def probe(self, targets: Mapping[NodeName, tuple[str, int]], deadline_s: float) -> dict[NodeName, ProbeResult]:
        self.then()
        assert deadline_s <= 1.0
        return dict.fromkeys(targets, ProbeResult.ANSWERS if self.answers else ProbeResult.SILENT)


class Recorded(ManualClock):
    """Knows how long was waited."""

    slept_s = 0.0

    @override
    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        super().sleep(seconds)


def ended(folder: Path, slurm: Controller, host: Host | None = None, code: int = 0) -> Recorded:
    clock = Recorded()
    end_job(7, 0, code, RoleClaims(folder, "r"), slurm=Slurm(slurm), clock=clock, prober=host or Host())
    return clock


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("nodes", ["n[0-1]", "n1"], ids=["its host is silent", "Slurm has taken it"])
def test_where_its_script_is_gone_the_job_gets_the_runs_exit_code_at_once(
    code: int, nodes: str, tmp_path: Path
) -> None:
    slurm = Controller(nodes=nodes)
    assert not ended(tmp_path, slurm, code=code).slept_s
    (told,) = slurm.told
    assert told.endswith(f"{completion.__file__} /usr/lib/slurm/libslurmfull.so 7 {code}")


def test_where_the_script_lives_it_hears_of_the_end_and_goes_on(tmp_path: Path) -> None:
    slurm, heard = Controller(), []
    host = Host(answers=True, then=lambda: heard.append(RoleClaims(tmp_path, "r").hear_end()))
    ended(tmp_path, slurm, host, code=7)
    assert heard == [7]
    assert not slurm.told


def test_where_its_host_lives_and_nobody_hears_the_job_does_not_stay(tmp_path: Path) -> None:
    slurm = Controller()
    assert HEARD_WAIT_S <= ended(tmp_path, slurm, Host(answers=True)).slept_s <= HEARD_WAIT_S + 1.0
    assert len(slurm.told) == 1


@pytest.mark.parametrize(
    "slurm", [Controller(restarts=1), Controller(state="COMPLETING"), Controller(state="PENDING")]
)
def test_one_that_ends_already_or_was_started_again_is_left_alone(slurm: Controller, tmp_path: Path) -> None:
    ended(tmp_path, slurm)
    assert not slurm.told


def test_where_slurms_library_is_not_found_the_job_is_cancelled_and_says_why(tmp_path: Path) -> None:
    slurm = Controller(linked="\tlibc.so.6 => /lib/libc.so.6 (0x00)\n")
    ended(tmp_path, slurm, code=3)
    comment, cancel = slurm.told
    assert "its batch host died; the run ended with exit code 3" in comment
    assert cancel == "scancel --quiet 7"


def test_slurm_is_asked_again_for_a_while(tmp_path: Path) -> None:
    slurm = Controller(away=5)
    ended(tmp_path, slurm)
    assert len(slurm.told) == 1
    slurm = Controller(away=10_000)
    assert ended(tmp_path, slurm).slept_s <= ASKED_S + 1.0
    assert not slurm.told
