"""The batch host dies, its link first, or is cut off for a while: an agent takes the launcher's role."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import Job, submit
from tests.cluster.test_parent import RUN, begun, incidents
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

# The batch host is alone on its leaf, so it rests where one node is to.
RESTS = "-N3 --nodelist=n0,n2,n3 --no-kill --requeue --gres=gpu:2"


def started(cluster: Sandbox, options: str, run: str = "", then: str = "", train: str = "5000") -> Job:
    job = submit(cluster, options, f"{RUN} {run} -- {{train}} {train}; code=$?; {then} exit $code")
    job.await_event("first-step")
    until((job.folder / "state").exists, LIMIT_S, job.told)
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


@pytest.mark.parametrize("code", [0, 7])
def test_a_batch_host_that_rested_dies_and_no_rank_is_started_again(
    fresh_sandbox: Callable[..., Sandbox], code: int
) -> None:
    job = started(fresh_sandbox(Shape.of(4)), RESTS, "--spares 1 --no-retry")
    assert job.events("attempt-started")[0]["spares"] == ["n0"]
    died = kill_batch_host(job)
    assert taken_s(job, died) < 15.0
    before = int((job.folder / "state").read_text())
    until(lambda: int((job.folder / "state").read_text()) > before + 50, LIMIT_S, job.told)
    job.await_event("spare-lost")
    assert len(begun(job)) == 2, "no rank was started again"
    assert len(job.events("attempt-started")) == 1
    ended = time.time()
    if code:
        step = int((job.folder / "state").read_text()) + 30
        (job.folder / "fail").write_text(f"1 {step} {code}")
        (job.folder / "end").touch()
    else:
        (job.folder / "end").touch()
    job.await_event("ended")
    print(f"nodes idle {idle_s(job, {'n2', 'n3'}, ended):.1f} s after the end")  # noqa: T201
    row = job.await_end()
    assert row.state is JobState.COMPLETED, job.told()
    assert row.restarts == 0
    said = job.cluster.run(CTL, ["scontrol", "show", "job", str(job.id)]).stdout
    assert re.search(r"ExitCode=0:0", said)
    assert {one.outcome for one in incidents(job)} == {IncidentOutcome.RECOVERED}
