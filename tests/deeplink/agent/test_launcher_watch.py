"""Agents of a job whose launcher's host died: who takes its role, who has Slurm requeue the job."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deeplink.agent.launcher_watch import GONE_S, JOURNAL, START_S, TURN_S, LauncherWatch
from deeplink.core.clock import ManualClock
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.launch.launcher_role import FILE, SILENT_S, LauncherPlace, RoleClaims, run_of
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError
from tests.scheduler.slurm.answers import answer
from tests.waiting import LIMIT_S, until

RUN = "of-the-run"
ATTEMPT = Attempt(7, 1, 2)


@dataclass
class Controller:
    """What Slurm says of job 7, and what it was told."""

    state: str = "RUNNING"
    restarts: int = 1
    requeue: int = 1
    batch_host: str = "n/a"
    answers: bool = True
    told: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if not self.answers:
            raise CommandError(argv, 1, "Unable to contact slurm controller")
        if argv[0] == "squeue":
            words = [7, 7, self.state, "None", self.restarts, self.requeue, "ada", "n[1-2]", self.batch_host, "x"]
            return answer(argv, *words)
        self.told.append(" ".join(argv))
        return ""


@dataclass
class Network:
    """Which addresses answer to a connection."""

    alive: tuple[str, ...] = ()
    refused: tuple[tuple[str, int], ...] = ()

    def probe(self, targets: Mapping[NodeName, tuple[str, int]], deadline_s: float) -> dict[NodeName, ProbeResult]:
        assert deadline_s <= 1.0
        return {
            name: ProbeResult.REFUSES
            if place in self.refused
            else ProbeResult.ANSWERS
            if place[0] in self.alive
            else ProbeResult.SILENT
            for name, place in targets.items()
        }


@dataclass
class Agents:
    """The silence of this agent, and what is to become of the others."""

    silent_s: float = GONE_S
    attempt: Attempt | None = ATTEMPT

    def watch(self, folder: Path, slurm: Controller, network: Network | None = None) -> LauncherWatch:
        found = LauncherWatch(
            {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[0-2]"},
            lambda: self.silent_s,
            lambda job: self.attempt if job == 7 else None,
            node="n1",
            secret=RUN,
            token=lambda: "7.1.2:x",
            slurm=Slurm(slurm),
            clock=ManualClock(),
            state=folder,
            prober=network or Network(),
        )
        (folder / "jobs" / "7").mkdir(parents=True, exist_ok=True)
        return found


@pytest.mark.parametrize("host", ["n/a", "n0"])
def test_a_job_without_its_batch_host_is_started_again_and_that_is_an_incident(host: str, tmp_path: Path) -> None:
    slurm = Controller(batch_host=host)
    Agents().watch(tmp_path, slurm).look()
    assert slurm.told == ["scontrol requeue 7"]
    with Journal(tmp_path / "jobs" / "7" / JOURNAL, read_only=True) as journal:
        (incident,) = journal.incidents()
    assert (incident.kind, incident.action, incident.attempt) == ("launcher-lost", "requeue", ATTEMPT)


@pytest.mark.parametrize(
    "slurm",
    [
        Controller(batch_host="n1"),
        Controller(batch_host="login"),
        Controller(state="COMPLETING"),
        Controller(requeue=0),
        Controller(restarts=2),
        Controller(answers=False),
    ],
)
def test_it_is_left_alone(slurm: Controller, tmp_path: Path) -> None:
    Agents().watch(tmp_path, slurm).look()
    assert not slurm.told


def test_one_whose_launcher_asks_or_never_did_is_left_alone(tmp_path: Path) -> None:
    slurm = Controller()
    Agents(silent_s=GONE_S - 0.1).watch(tmp_path, slurm).look()
    Agents(attempt=None).watch(tmp_path, slurm).look()
    assert not slurm.told


def left(
    folder: Path,
    nodes: Mapping[str, str],
    term: int = 0,
    *,
    program: str = "",
    works_in: Path | None = None,
) -> RoleClaims:
    """Leave what a launcher on n0 does that would be followed by a program which writes down what it is told."""
    job = folder / "jobs" / "7"
    job.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    out.touch()
    place = LauncherPlace(
        host="n0",
        term=term,
        command=(sys.executable, "-c", program or TELL, str(folder / "told")),
        folder=str(works_in or folder),
        env={"SLURM_JOB_ID": "7"},
        output=(str(out), str(folder / "nowhere")),
        monotonic=0.0,
        unix=0.0,
    )
    run = run_of(RUN)
    (job / FILE).write_text(json.dumps({"run": run, "launcher": place.as_json(), "nodes": nodes}))
    return RoleClaims(job, run)


TELL = """
import os, sys
from pathlib import Path
from deeplink.scheduler.launch.launcher_process import ParentLink
link = ParentLink.of_this_process(os.environ).greeted()
node = os.environ["SLURMD_NODENAME"]
Path(sys.argv[1]).write_text(f"{link.term} {link.secret} {link.is_elsewhere} {link.died} {node}")
print("out", os.getcwd(), flush=True)
print("error", file=sys.stderr, flush=True)
"""


def test_of_two_nodes_the_one_that_is_left_takes_the_role_by_its_claim(tmp_path: Path) -> None:
    claims, agents = left(tmp_path, {"n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}), Agents(silent_s=SILENT_S)
    agents.watch(tmp_path, Controller()).look()
    told = tmp_path / "told"
    until(lambda: told.exists() and bool(told.read_text()), LIMIT_S)
    assert told.read_text() == "1 of-the-run True 9 n1"
    assert claims.claimant(1) == "n1"
    until(lambda: "out" in (tmp_path / "out").read_text(), LIMIT_S)
    kept = tmp_path / "jobs" / "7" / "launcher.n1.out"
    until(lambda: "error" in kept.read_text(), LIMIT_S, kept.read_text)
    assert not (tmp_path / "nowhere").exists()


def test_a_term_that_another_one_has_claimed_is_left_to_it_for_a_while(tmp_path: Path) -> None:
    claims = left(tmp_path, {"n1": "127.0.0.1:1", "n0": "10.0.0.9:1"})
    assert claims.claim(1, "n2")
    watch = Agents(silent_s=SILENT_S).watch(tmp_path, Controller())
    watch.look()
    watch.clock.sleep(START_S - 0.1)
    watch.look()
    assert claims.newest() == 1
    watch.clock.sleep(0.2)
    watch.look()
    assert claims.claimant(2) == "n1"


TWO = {"n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}
HANG = """
import os, sys
from pathlib import Path
with Path(sys.argv[1]).open("a") as told:
    told.write(f"{os.getppid()}\\n")
while os.read(int(os.environ["DEEPLINK_PARENT"].split()[1]), 1 << 16):
    pass
"""


def test_while_its_own_launcher_comes_up_a_node_starts_no_other(tmp_path: Path) -> None:
    claims = left(tmp_path, TWO, program=HANG)
    watch = Agents(silent_s=SILENT_S).watch(tmp_path, Controller())
    watch.look()
    told = tmp_path / "told"
    parents: list[str] = []

    def started() -> int:
        parents[:] = told.read_text().splitlines() if told.exists() else []
        return len(parents)

    try:
        until(lambda: started() == 1, LIMIT_S)
        for _ in range(5):
            watch.clock.sleep(START_S + 1.0)
            watch.look()
        assert claims.newest() == 1
        left(tmp_path, TWO, 2, program=HANG)
        watch.look()
        assert claims.newest() == 3, "another one had the role since: what is here holds a place"
        until(lambda: started() == 2, LIMIT_S)
    finally:
        for parent in parents:
            os.kill(int(parent), signal.SIGKILL)


def test_where_the_scripts_folder_is_not_here_it_works_where_srun_would(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left(tmp_path, TWO, works_in=tmp_path / "elsewhere")
    Agents(silent_s=SILENT_S).watch(tmp_path, Controller()).look()
    until(lambda: "out /tmp" in (tmp_path / "out").read_text(), LIMIT_S)
    assert "elsewhere' is not here" in caplog.text


def test_what_cannot_be_started_claims_nothing(tmp_path: Path) -> None:
    claims = left(tmp_path, TWO)
    watch = Agents(silent_s=SILENT_S).watch(tmp_path, Controller())
    (tmp_path / "jobs" / "7" / "launcher.n1.out").mkdir()  # where the job's output is to go, and cannot
    watch.look()
    assert claims.newest() == 0


@pytest.mark.parametrize(("term", "newest"), [(0, 0), (1, 2)])
def test_a_launcher_elsewhere_ends_with_its_agent(term: int, newest: int, tmp_path: Path) -> None:
    claims = left(tmp_path, TWO, term)
    network = Network(alive=("10.0.0.9",), refused=(("10.0.0.9", 1),))
    Agents(silent_s=SILENT_S).watch(tmp_path, Controller(), network).look()
    assert claims.newest() == newest


@pytest.mark.parametrize(
    ("nodes", "network", "silent_s"),
    [
        ({"n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}, Network(alive=("10.0.0.9",)), SILENT_S),
        ({"n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}, Network(), SILENT_S - 0.1),
        ({"n2": "127.0.0.1:1", "n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}, Network(), SILENT_S + TURN_S - 0.1),
        ({"n2": "127.0.0.1:1", "n1": "127.0.0.1:1", "n0": "10.0.0.9:1"}, Network(), SILENT_S + TURN_S),
        ({"n2": "127.0.0.1:1", "n0": "10.0.0.9:1"}, Network(), SILENT_S + TURN_S),
        ({"n1": "127.0.0.1:1"}, Network(), SILENT_S),
    ],
    ids=["its host answers", "it asked", "another one's turn", "one of three", "not of the attempt", "on no node"],
)
def test_the_role_is_not_taken(nodes: dict[str, str], network: Network, silent_s: float, tmp_path: Path) -> None:
    claims = left(tmp_path, nodes)
    Agents(silent_s=silent_s).watch(tmp_path, Controller(), network).look()
    assert claims.newest() == 0
