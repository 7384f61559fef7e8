"""`deeplink run` on a real Slurm while its processes are killed: the launcher, again and again, and its parent."""

from __future__ import annotations

import re
import time

import pytest

from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cluster.jobs import Job, submit

pytestmark = [pytest.mark.cluster]

RUN = "deeplink run --nproc-per-node 1"


def parent_of(job: Job) -> int:
    host = job.row().batch_host
    assert host is not None
    said = job.cluster.run(host, ["pgrep", "-f", "launch/parent.py"], root=True).stdout.split()
    return int(said[0])


def launchers_of(job: Job) -> list[int]:
    host = job.row().batch_host
    assert host is not None
    found = job.cluster.run(host, ["pgrep", "-P", str(parent_of(job)), "-f", "deeplink run"], root=True).stdout
    return [int(word) for word in found.split()]


def kill(job: Job, *pids: int, signal: str = "KILL") -> None:
    host = job.row().batch_host
    assert host is not None
    job.cluster.run(host, ["kill", f"-{signal}", *map(str, pids)], root=True)


def kill_launcher(job: Job) -> int:
    (launcher,) = launchers_of(job)
    kill(job, launcher)
    return launcher


def incidents(job: Job) -> tuple[Incident, ...]:
    path = job.cluster.home / ".local/state/deeplink/jobs" / str(job.id) / "journal.sqlite"
    with Journal(path, read_only=True) as journal:
        return journal.incidents()


def begun(job: Job) -> list[str]:
    return sorted(re.findall(r"rank \d+ of \d+ begins at step \d+", job.output()))


def test_a_launcher_that_is_killed_is_started_again_and_no_rank_is(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?")
    job.await_event("first-step")
    killed = time.time()
    kill_launcher(job)
    again = job.await_event("launcher-restarted")
    print(f"started again {again['unix'] - killed:.2f} s after the kill")  # noqa: T201
    assert again["attempt"] == f"{job.id}.0.0"
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert "code=0" in job.output()
    assert begun(job) == ["rank 0 of 2 begins at step 0", "rank 1 of 2 begins at step 0"], job.told()
    assert len(job.events("attempt-started")) == len(job.events("ended")) == 1
    (incident,) = incidents(job)
    assert (incident.kind, incident.outcome) == ("launcher-restarted", IncidentOutcome.RECOVERED)
