"""The batch host dies, its link first, or is cut off for a while: an agent takes the launcher's role."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import Job, folder_of, submit
from tests.cluster.test_parent import RUN, begun, incidents
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

# The batch host is alone on its leaf, so it rests where one node is to.
RESTS = "-N3 --nodelist=n0,n2,n3 --no-kill --requeue --gres=gpu:2"


RUNS = "-N3 --nodelist=n0,n1,n3 --no-kill --requeue --gres=gpu:2"  # here n3 is the one alone


def started(
    cluster: Sandbox, options: str, run: str = "", *, then: str = "", code: int = 0, folder: Path | None = None
) -> Job:
    """Return a job whose ranks train; rank 1 fails with `code` after 30 s."""
    folder = folder or folder_of(cluster)
    if code:
        (folder / "fail").write_text(f"1 300 {code}")
    job = submit(cluster, options, f"{RUN} {run} -- {{train}} 5000; code=$?; {then} exit $code", folder=folder)
    job.await_event("first-step")
    until((folder / "state").exists, LIMIT_S, job.told)
    assert job.row().batch_host == "n0"
    return job


def kill_batch_host(job: Job) -> float:
    job.cluster.cut("n0")
    job.cluster.crash("n0")
    return time.time()


def taken_s(job: Job, died: float) -> float:
    """Wait until the role is taken; return how long after the host's death the agent took it."""
    event = job.await_event("launcher-restarted")
    assert event["node"] != "n0"
    folder = job.cluster.home / f".local/state/deeplink/jobs/{job.id}"
    claimed = min(path.stat().st_mtime for path in folder.glob("launcher.*.1"))
    print(f"claimed {claimed - died:.1f} s, and supervised {event['unix'] - died:.1f} s after the death")  # noqa: T201
    return claimed - died


def idle_s(job: Job, nodes: set[str], since: float) -> float:
    until(lambda: all(job.cluster.states()[node].startswith("idle") for node in nodes), LIMIT_S, job.told)
    return time.time() - since


def ranks_on(job: Job, node: str) -> list[str]:
    said = job.cluster.run(node, ["pgrep", "-f", f"^{sys.executable} {job.folder}/train.py"], root=True).stdout
    return said.split()


def lives_on(job: Job, steps: int = 50) -> None:
    before = int((job.folder / "state").read_text())
    until(lambda: int((job.folder / "state").read_text()) > before + steps, LIMIT_S, job.told)


@pytest.mark.parametrize("code", [0, 7])
def test_a_batch_host_that_rested_dies_and_no_rank_is_started_again(
    fresh_sandbox: Callable[..., Sandbox], code: int
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    job = started(cluster, RESTS, "--spares 1 --no-retry", code=code, folder=folder)
    assert job.events("attempt-started")[0]["spares"] == ["n0"]
    assert taken_s(job, kill_batch_host(job)) < 15.0
    job.await_event("spare-lost")
    until(lambda: bool(incidents(job)), LIMIT_S, job.told)
    assert [(one.kind, one.node) for one in incidents(job)] == [("node-silent", "n0")]
    if not code:
        lives_on(job)
        (folder / "end").touch()
    job.await_event("ended")
    ended = time.time()
    assert len(begun(job)) == 2, "no rank was started again"
    assert len(job.events("attempt-started")) == 1
    print(f"nodes idle {idle_s(job, {'n2', 'n3'}, ended):.1f} s after the end")  # noqa: T201
    row = job.await_end()
    assert row.state is (JobState.FAILED if code else JobState.COMPLETED), job.told()
    assert row.restarts == 0
    if not code:
        ends = [line for line in job.output().splitlines() if "ends at step" in line]
        assert len(ends) == 2, "what ranks write finds its way without the srun that started them"
    said = cluster.run(CTL, ["scontrol", "show", "job", str(job.id)]).stdout
    assert f"ExitCode={code}:0" in said
    assert cluster.run(CTL, ["squeue", "-h"]).stdout == ""


def test_a_batch_host_with_a_rank_dies_and_a_spare_takes_it(fresh_sandbox: Callable[..., Sandbox]) -> None:
    job = started(fresh_sandbox(Shape.of(4)), RUNS, "--spares 1")
    assert job.events("attempt-started")[0]["spares"] == ["n3"]
    died = kill_batch_host(job)
    taken_s(job, died)
    again = job.await_event("first-step", count=2)
    print(f"first step {again['unix'] - died:.1f} s after the death")  # noqa: T201
    assert again["step"] > 5, "it went on where it was saved"
    assert again["attempt"] == f"{job.id}.0.1"
    assert {*job.events("attempt-started")[-1]["nodes"]} == {"n1", "n3"}
    lives_on(job)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert job.row().restarts == 0
    assert len(job.events("attempt-started")) == 2
    (incident,) = incidents(job)
    assert (incident.kind, incident.node, incident.outcome) == ("node-silent", "n0", IncidentOutcome.RECOVERED)
    assert "has taken the launcher's role" in incident.evidence


def test_where_no_node_is_left_for_its_rank_slurm_starts_the_job_again(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = started(cluster, "-N2 --nodelist=n0,n1 --no-kill --requeue --gres=gpu:2")
    died = kill_batch_host(job)
    taken_s(job, died)
    until(lambda: job.row().restarts == 1, LIMIT_S, job.told)
    print(f"requeued {time.time() - died:.1f} s after the death")  # noqa: T201
    until(lambda: job.row().state is JobState.PENDING, LIMIT_S, job.told)
    job.start_again("ReqNodeList=")
    first = job.await_event("first-step", count=2)
    assert first["step"] > 5, "it went on where it was saved"
    assert first["attempt"] == f"{job.id}.1.0"
    assert "n0" not in job.events("attempt-started")[-1]["nodes"]
    until(lambda: {one.outcome for one in incidents(job)} == {IncidentOutcome.RECOVERED}, LIMIT_S, job.told)
    print([(one.kind, one.action, one.evidence) for one in incidents(job)])  # noqa: T201
    cluster.run(CTL, ["scancel", str(job.id)])


MPI = """
import runpy, sys
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ranks_of_mpi_are_started_again_for_they_cannot_end_without_their_srun(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    folder = folder_of(cluster)
    (folder / "mpi.py").write_text(MPI)
    train = f"{sys.executable} {folder}/mpi.py {folder}/train.py {folder} 5000"
    job = submit(cluster, RESTS, f"{RUN} --spares 1 --recipe mpi -- {train}", folder=folder)
    job.await_event("first-step")
    until((folder / "state").exists, LIMIT_S, job.told)
    taken_s(job, kill_batch_host(job))
    again = job.await_event("first-step", count=2)
    assert again["step"] > 5, "it went on where it was saved"
    assert {*job.events("attempt-started")[-1]["nodes"]} == {"n2", "n3"}
    lives_on(job)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert job.row().restarts == 0
    assert len(job.events("attempt-started")) == 2
    assert [line for line in job.output().splitlines() if "ends at step" in line], job.told()


@pytest.mark.parametrize("rests", [True, False])
def test_a_batch_host_that_was_only_cut_off_holds_the_scripts_place_and_touches_nothing(
    fresh_sandbox: Callable[..., Sandbox], *, rests: bool
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = started(cluster, RESTS if rests else RUNS, "--spares 1", then="echo the script ends with $code;")
    cut = time.time()
    cluster.cut("n0")
    taken_s(job, cut)
    if not rests:
        assert job.await_event("first-step", count=2)["attempt"] == f"{job.id}.0.1"
    cluster.heal("n0")
    until(lambda: "this process holds its place" in job.output(), LIMIT_S, job.told)
    if not rests:
        until(lambda: not ranks_on(job, "n0"), LIMIT_S, job.told)
    lives_on(job)
    attempts = 1 if rests else 2
    assert len(job.events("attempt-started")) == attempts
    assert sum(len(ranks_on(job, node)) for node in job.row().nodes) == 2, "no rank twice"
    launchers = [
        cluster.run(node, ["pgrep", "-f", "launch/parent.py"], root=True).stdout.split()
        for node in job.row().nodes
    ]
    assert sorted(map(len, launchers)) == [0, 1, 1], "one that supervises, and one that holds the place"
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert len(job.events("ended")) == 1
    assert "the script ends with 0" in job.output()
    assert job.row().restarts == 0
    assert len(begun(job)) == 2 * attempts, job.told()
