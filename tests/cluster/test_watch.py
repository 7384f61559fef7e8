"""The watchdog beside a real Slurm: jobs of an ordinary user, cred_expire at its default, nodes that really die.

Seconds are measured and printed (`pytest -s`, or the report of a failure), never asserted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import SystemClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.liveness.probe import Address
from deeplink.scheduler.recovery.evidence import ProbeResult, Remedy, Verdict, WatchPolicy
from deeplink.scheduler.recovery.records import ActionRecord, Incident, IncidentKind, IncidentOutcome
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import NodeRow
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from deeplink.scheduler.watch.actor import Actor
from deeplink.scheduler.watch.observer import Observer
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

PORT = 7412
BEATING = Path(__file__).parent / "beating.py"
RUN = "exec deeplink run --nproc-per-node 1 -- {train} 5000"


@dataclass(frozen=True)
class Watch:
    """Where a cluster's watchdog keeps its things."""

    cluster: Sandbox
    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / "watch.sqlite"

    @property
    def address(self) -> str:
        return f"{self.cluster.shape.address(CTL)}:{PORT}"

    @property
    def exports(self) -> str:
        return f"export DEEPLINK_WATCH={self.address}\n"

    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""

    def incidents(self) -> tuple[Incident, ...]:
        with Journal(self.journal, read_only=True) as journal:
            return journal.incidents()

    def faults(self) -> tuple[Incident, ...]:
        """Return the incidents about nodes and jobs: on a busy machine the watchdog may doubt itself, too."""
        of_itself = {IncidentKind.WATCHDOG_AWAY, IncidentKind.WATCHDOG_PARTITIONED}
        return tuple(one for one in self.incidents() if one.kind not in of_itself)

    def absences(self) -> int:
        """Count the incidents about watchdogs that were killed."""
        return sum(one.kind == IncidentKind.WATCHDOG_AWAY for one in self.incidents())

    def actions(self) -> tuple[ActionRecord, ...]:
        with Journal(self.journal, read_only=True) as journal:
            return journal.actions()

    def submit(self, options: str, script: str) -> Job:
        return submit(self.cluster, options, self.exports + script, folder=folder_of(self.cluster))

    @contextmanager
    def running(self, *options: str, root: bool = True, first: Path | None = None) -> Iterator[Callable[[], None]]:
        """Run `deeplink watch` on the control host, with or without rights; gives what kills it without mercy.

        What the folder `first` has is run instead of Slurm's commands.
        """
        argv = [sys.executable, "-m", "deeplink", "-v", "watch", "--bind", self.address]
        secret = self.folder / ("secret" if root else "user.secret")
        argv += ["--journal", str(self.journal), "--token-file", str(secret), *options]
        before = self.said().count("watching: ")
        env = {"PATH": f"{first}:{self.cluster.record.path}"} if first else {}
        with (self.folder / "said").open("ab") as said:
            process = self.cluster.spawn(CTL, argv, root=root, env=env, stdout=said, stderr=said)
        try:
            until(lambda: self.said().count("watching: ") > before, LIMIT_S, self.said)
            yield lambda: kill_watchdog(self.journal)
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def kill_watchdog(journal: Path) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"watch" in words and str(journal).encode() in words and words[0].endswith(b"python"):
                os.kill(int(entry.name), signal.SIGKILL)


@pytest.fixture
def watch(fresh_sandbox: Callable[..., Sandbox]) -> Iterator[Watch]:
    cluster = fresh_sandbox(Shape(leaves=2, nodes_per_leaf=4))
    folder = cluster.home / "watch"
    folder.mkdir()
    shutil.chown(folder, cluster.user.uid, cluster.user.gid)
    watch = Watch(cluster, folder)
    yield watch
    sys.stdout.write(watch.said())


def node(cluster: Sandbox, name: str) -> NodeRow:
    (row,) = Slurm(cluster.runner()).nodes([name])
    return row


def in_second_run(job: Job) -> bool:
    row = job.row()
    return row.state is JobState.RUNNING and row.restarts == 1


def step_numbers(job: Job) -> set[int]:
    said = job.cluster.run(CTL, ["squeue", "--steps", f"--jobs={job.id}", "--noheader", "--format=%i"]).stdout
    return {int(number) for _, _, number in (line.partition(".") for line in said.split()) if number.isdigit()}


def await_recovered(watch: Watch, job: Job) -> Incident:
    until(lambda: any(one.outcome is IncidentOutcome.RECOVERED for one in watch.faults()), LIMIT_S, watch.said)
    (incident,) = watch.faults()
    assert incident.attempt is not None
    assert incident.attempt.job == job.id
    return incident


def told(what: str, began: float) -> None:
    sys.stdout.write(f"\n[watchdog] {what}: {time.monotonic() - began:.2f} s after the fault\n")


@pytest.mark.parametrize("which", ["last", "batch host"])
def test_a_node_that_dies_without_a_spare_is_drained_and_its_job_runs_elsewhere(watch: Watch, which: str) -> None:
    with watch.running("--act"):
        job = watch.submit("-N4 --exclusive --gres=gpu:2 --no-kill --requeue --exclude=n7", RUN)
        job.await_event("first-step")
        host = job.row().batch_host
        assert host is not None
        used = job.row().nodes
        victim = host if which == "batch host" else next(name for name in reversed(used) if name != host)
        began = time.monotonic()
        watch.cluster.crash(victim)
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        told(f"{which} lost: job runs again", began)
        assert victim not in job.row().nodes
        lost = node(watch.cluster, victim)
        assert lost.drained
        assert lost.down
        assert lost.reason.startswith("deeplink: ")
        job.await_event("first-step", LIMIT_S, count=2)
        told(f"{which} lost: job trains again", began)
        incident = await_recovered(watch, job)
        assert (incident.node, incident.action) == (victim, "drain-down")
        assert incident.began_unix <= incident.detected_unix <= incident.acted_unix <= incident.recovered_unix
        excluded = Slurm(watch.cluster.runner()).place(job.id).excluded
        assert "n7" in excluded, "the user's own exclusion stays"
        gpus = [row.gpus_used for row in Slurm(watch.cluster.runner()).nodes(details=True)]
        assert sum(bool(count) for count in gpus) == 4, f"the GPUs of one job of four nodes, no more: {gpus}"
        if which == "last":
            heals_and_stays_out(watch, victim)
    if which == "last":
        with watch.running("--act", "--resume"):
            until(lambda: not node(watch.cluster, victim).drained, LIMIT_S, watch.said)
            assert not node(watch.cluster, victim).down
        assert watch.cluster.run(CTL, ["scancel", str(job.id)]).code == 0
        whole = watch.submit(f"-N{len(watch.cluster.nodes)} --exclusive --gres=gpu:2", "sleep 60")
        until(lambda: whole.row().state is JobState.RUNNING, LIMIT_S, whole.told)


def test_without_rights_a_dead_node_is_taken_out_of_its_job_and_no_gpu_leaks(watch: Watch) -> None:
    slurm = Slurm(watch.cluster.runner())
    with watch.running("--act", root=False):
        job = watch.submit("-N4 --exclusive --gres=gpu:2 --no-kill --requeue", RUN)
        job.await_event("first-step")
        victim = next(name for name in reversed(job.row().nodes) if name != job.row().batch_host)
        before = step_numbers(job)
        began = time.monotonic()
        watch.cluster.crash(victim)
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        told("node lost, no rights: job runs again", began)
        assert victim not in job.row().nodes
        job.await_event("first-step", LIMIT_S, count=2)
        told("node lost, no rights: job trains again", began)
        incident = await_recovered(watch, job)
        assert (incident.node, incident.action) == (victim, "requeue-exclude")
        assert not node(watch.cluster, victim).drained
        # Slurm keeps signals for steps of the first run until that node is back, perhaps for minutes.
        assert len(before) == 2, "the agents' and the ranks'"
        assert min(step_numbers(job)) > max(before), "they mean none of the second run's"
        time.sleep(5.0)  # what is left of the first run's steps must not end those of the second either
        assert in_second_run(job), watch.said()
    assert watch.cluster.run(CTL, ["scancel", str(job.id)]).code == 0
    until(lambda: node(watch.cluster, victim).down, LIMIT_S)
    left = len(watch.cluster.nodes) - 1
    whole = submit(
        watch.cluster, f"-N{left} --exclusive --gres=gpu:2", "sleep 60", folder=folder_of(watch.cluster)
    )
    until(lambda: whole.row().state is JobState.RUNNING, LIMIT_S, lambda: str(slurm.jobs()))


def test_without_rights_a_job_whose_batch_host_died_restarts_under_its_id_once_slurm_knows(watch: Watch) -> None:
    with watch.running("--act", root=False):
        job = watch.submit("-N3 --exclusive --gres=gpu:2 --no-kill --requeue", RUN)
        job.await_event("first-step")
        host = job.row().batch_host
        assert host is not None
        began = time.monotonic()
        watch.cluster.crash(host)
        until(lambda: in_second_run(job), 2 * LIMIT_S, watch.said)
        told("batch host lost, no rights: job runs again", began)
        assert host not in job.row().nodes
        job.await_event("first-step", LIMIT_S, count=2)
        told("batch host lost, no rights: job trains again", began)
        incident = await_recovered(watch, job)
        assert incident.node == host


def heals_and_stays_out(watch: Watch, victim: str) -> None:
    watch.cluster.boot(victim)
    until(lambda: node(watch.cluster, victim).responding, LIMIT_S, watch.said)
    seen = watch.said().count("\n")
    time.sleep(3.0)  # longer than ReturnToService=2 took to give back a node that was only down (measured)
    lost = node(watch.cluster, victim)
    assert lost.drained, f"{lost} {watch.said().splitlines()[seen:]}"


def submit_beating(watch: Watch) -> Job:
    shutil.copy(BEATING, watch.folder / "beating.py")
    (watch.folder / "beating.py").chmod(0o644)
    script = f"exec {sys.executable} {watch.folder}/beating.py {watch.address}"
    job = watch.submit("-N3 --exclusive --requeue", script)
    until(lambda: job.row().state is JobState.RUNNING, LIMIT_S, watch.said)
    return job


def test_a_stranded_job_is_requeued_without_the_suspect_when_every_node_answers(watch: Watch) -> None:
    with watch.running("--act"):
        job = submit_beating(watch)
        first = job.row().nodes
        until(lambda: bool(watch.faults()), LIMIT_S, lambda: watch.said() + job.output())
        began = time.monotonic()
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        told("stranded job, from the verdict: runs again", began)
        assert first[-1] not in job.row().nodes
        incident = await_recovered(watch, job)
        assert (incident.kind, incident.action, incident.node) == ("job-stranded", "requeue-exclude", None)
        assert incident.steps_repeated == 5
        assert not any(row.drained or row.down for row in Slurm(watch.cluster.runner()).nodes())


FORGE = """
import sys
from deeplink.core.config import Config
from deeplink.scheduler.launch.event_log import to_watchdog
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.core.types import Attempt, NodeName

address, job, user, *nodes = sys.argv[1:]
beat = Beat(attempt=Attempt(int(job), 0, 0), phase=Phase.STRANDED, user=user, nodes=tuple(map(NodeName, nodes)))
to_watchdog(Config(watch=address))(beat)
"""


def test_a_beat_forged_by_another_user_restarts_no_job(watch: Watch) -> None:
    with watch.running("--act"):
        job = submit(watch.cluster, "-N2 --requeue", "sleep 600\n", folder=folder_of(watch.cluster))
        until(lambda: job.row().state is JobState.RUNNING, LIMIT_S, job.told)
        row = job.row()
        argv = [sys.executable, "-c", FORGE, watch.address, str(job.id), row.user, *row.nodes]
        forged = watch.cluster.run(CTL, argv, root=True)
        assert "PERMISSION_DENIED" in forged.stderr, forged
        assert watch.faults() == ()
        with Journal(watch.journal, read_only=True) as journal:
            assert journal.jobs() == ()
        believed = watch.cluster.run(CTL, argv)
        assert believed.code == 0, believed
        until(lambda: job.row().restarts == 1, LIMIT_S, watch.said)


# Comes to excluding nodes, and no further while who called it lives.
HESITATES = r"""#!/bin/sh
case "$*" in *ExcNodeList=*) while kill -0 "$PPID"; do sleep 0.05; done; exit 1;; esac
exec "$(PATH=${PATH#*:} command -v scontrol)" "$@"
"""


def test_killed_between_requeue_and_exclude_it_finishes_on_return_and_does_nothing_twice(watch: Watch) -> None:
    programs = watch.folder / "programs"
    programs.mkdir()
    (programs / "scontrol").write_text(HESITATES)
    (programs / "scontrol").chmod(0o755)
    with watch.running("--act", first=programs) as kill:
        job = submit_beating(watch)
        first = job.row().nodes
        until(lambda: ": requeue job" in watch.said(), LIMIT_S, lambda: watch.said() + job.output())
        kill()
    assert ": release job" not in watch.said(), "it was to die before that"
    time.sleep(2.0)
    assert job.row().state is JobState.PENDING, "Slurm holds it for two minutes"
    with watch.running("--act"):
        until(lambda: in_second_run(job), LIMIT_S, watch.said)
        assert first[-1] not in job.row().nodes
        until(lambda: all(action.done_unix for action in watch.actions()), LIMIT_S, watch.said)
    assert [action.remedy for action in watch.actions()] == ["restart"]
    assert watch.absences() == 1
    assert watch.said().count(": requeue job") == 1
    assert job.row().restarts == 1


def test_a_comment_drains_no_node(sandbox: Sandbox, tmp_path: Path) -> None:
    root, user = Slurm(sandbox.runner(root=True)), Slurm(sandbox.runner())
    job = submit(sandbox, "-N1 --requeue --comment=mine", "sleep 300")
    until(lambda: job.row().state is JobState.RUNNING, LIMIT_S)
    victim = job.row().nodes[0]
    clock = SystemClock()
    with Journal(tmp_path / "j.sqlite") as journal:
        observer = Observer(
            slurm=root,
            prober=Reachable(),
            heartbeats=HeartbeatTable(),
            journal=journal,
            clock=clock,
            policy=WatchPolicy(),
        )
        metrics = WatchMetrics(CollectorRegistry())
        actor = Actor(slurm=root, journal=journal, observer=observer, clock=clock, metrics=metrics, say=print)
        attempt = Attempt(job.id, 0, 0)
        sick = Verdict(
            kind=IncidentKind.NODE_SICK,
            remedy=Remedy.COMMENT,
            reasons=("disk slow",),
            attempt=attempt,
            node=victim,
        )
        assert actor.begin(sick, None)
        until(lambda: not actor.work(), LIMIT_S)
    try:
        told = node(sandbox, victim)
        assert (told.comment, told.drained, told.reason) == (f"deeplink: {victim}: disk slow", False, "")
        assert job.row().state is JobState.RUNNING
    finally:
        user.cancel(job.row().address)
        root.comment_node(victim, "")


class Reachable:
    """Every node answers, as far as this test goes."""

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        return dict.fromkeys(targets, ProbeResult.ANSWERS)


def test_a_frozen_controller_and_a_cut_node_at_once_are_left_alone(watch: Watch) -> None:
    with watch.running("--act"):
        job = watch.submit("-N3 --exclusive --no-kill --requeue", RUN)
        job.await_event("first-step")
        victim = next(name for name in job.row().nodes if name != job.row().batch_host)
        controller = next(machine.daemon for machine in watch.cluster.status() if machine.name == CTL)
        assert controller is not None
        os.kill(controller, signal.SIGSTOP)
        try:
            watch.cluster.cut(victim)
            job.await_event("stranded", LIMIT_S)
            until(lambda: any(one.kind == "self-in-doubt" for one in watch.incidents()), LIMIT_S, watch.said)
            watch.cluster.heal(victim)
            job.await_event("back", LIMIT_S)
        finally:
            os.kill(controller, signal.SIGCONT)
        until(lambda: "self-in-doubt: over" in watch.said(), LIMIT_S, watch.said)
        job.await_event("first-step", LIMIT_S, count=2)
        assert watch.actions() == (), watch.said()
        row = job.row()
        assert (row.state, row.restarts) == (JobState.RUNNING, 0)
        assert not any(row.drained or row.down for row in Slurm(watch.cluster.runner()).nodes())


def test_an_observer_only_says_it_and_one_killed_between_two_commands_finishes_on_return(watch: Watch) -> None:
    slurm = Slurm(watch.cluster.runner())
    with watch.running("--observe") as kill:
        job = watch.submit("-N3 --exclusive --no-kill --requeue", RUN)
        job.await_event("first-step")
        victim = next(name for name in job.row().nodes if name != job.row().batch_host)
        watch.cluster.crash(victim)
        until(lambda: f"{victim}: would drain-down" in watch.said(), LIMIT_S, watch.said)
        assert not node(watch.cluster, victim).drained
        assert watch.actions() == ()
        kill()
    with watch.running("--act") as kill:
        until(lambda: f": drain node {victim}" in watch.said(), LIMIT_S, watch.said)
        kill()
    with watch.running("--act"):
        until(lambda: in_second_run(job), LIMIT_S, lambda: watch.said() + job.told())
        job.await_event("first-step", LIMIT_S, count=2)
        incident = await_recovered(watch, job)
        assert incident.node == victim
        until(lambda: all(action.done_unix for action in watch.actions()), LIMIT_S, watch.said)
        remedies = sorted(action.remedy for action in watch.actions() if not action.result.startswith("gave up"))
        assert remedies == ["drain-down", "restart"], watch.said()
        assert watch.absences() == 1, "the second was killed within a minute of its return"
        assert job.row().restarts == 1
        assert node(watch.cluster, victim).drained
        assert [row.name for row in slurm.nodes() if row.drained] == [victim]
