"""`deeplink run` on a real Slurm while its processes are killed: the launcher, again and again, and its parent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Incident, IncidentOutcome
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

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
    kill_launcher(job)
    again = job.await_event("launcher-restarted")
    assert again["attempt"] == f"{job.id}.0.0"
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert "code=0" in job.output()
    assert begun(job) == ["rank 0 of 2 begins at step 0", "rank 1 of 2 begins at step 0"], job.told()
    assert len(job.events("attempt-started")) == len(job.events("ended")) == 1
    (incident,) = incidents(job)
    assert (incident.kind, incident.outcome) == ("launcher-restarted", IncidentOutcome.RECOVERED)


def test_a_launcher_that_dies_five_times_ends_the_run_in_order(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?")
    job.await_event("first-step")
    killed: set[int] = set()
    for times in range(1, 6):
        until(lambda: bool(launchers_of(job)) and not killed & {*launchers_of(job)}, LIMIT_S, job.told)
        killed.add(kill_launcher(job))
        job.await_event("launcher-restarted", count=times)
    job.await_end()
    print("launchers were away for", [f"{one['away_s']:.2f} s" for one in job.events("launcher-restarted")])  # noqa: T201
    assert "code=137" in job.output(), job.told()
    assert "5 times in 10 minutes" in job.output()
    assert len(job.events("attempt-started")) == 1
    assert len(begun(job)) == 2, "no rank was started again"
    found = {one.kind: one.outcome for one in incidents(job)}
    assert found["launcher-lost"] is IncidentOutcome.FAILED
    assert found.keys() == {"launcher-restarted", "launcher-lost"}


@pytest.mark.parametrize("moment", ["job-started", "agents-ready", "attempt-started"])
def test_a_launcher_that_is_killed_at_the_start_is_followed_by_one_that_starts_the_ranks(
    sandbox: Sandbox, moment: str
) -> None:
    job = submit(sandbox, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?")
    job.await_event(moment)
    kill_launcher(job)
    job.await_event("first-step")
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert "code=0" in job.output()
    assert len(job.events("ended")) == 1
    last = job.events("attempt-started")[-1]["attempt"]
    assert job.output().count("ended by signal 9") == 1
    assert sorted(path.suffix for path in job.folder.glob(f"{last}.rank*")) == [".rank0", ".rank1"]


def test_of_two_attempts_the_newer_trains_where_the_launcher_is_killed_during_a_relaunch(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = submit(cluster, "-N4 --no-kill", f"{RUN} --spares 1 -- {{train}} 5000; echo code=$?")
    job.await_event("first-step")
    host, names = job.row().batch_host, job.events("attempt-started")[0]["nodes"]
    until((job.folder / "state").exists, LIMIT_S, job.told)
    victim = next(name for name in names if name != host)
    (launcher,) = launchers_of(job)
    cluster.crash(victim)
    job.await_event("relaunch")
    kill(job, launcher)
    job.await_event("launcher-restarted")
    job.await_event("first-step", count=2)
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert "code=0" in job.output(), job.told()
    assert victim not in job.events("attempt-started")[-1]["nodes"]
    found = {one.kind: one.outcome for one in incidents(job)}
    assert found == dict.fromkeys(("node-silent", "launcher-restarted"), IncidentOutcome.RECOVERED)


def test_ranks_that_fail_are_seen_by_the_next_launcher(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    (folder / "fail").write_text("1 100 7")
    job = submit(sandbox, "-N2", f"{RUN} --no-retry -- {{train}} 5000; echo code=$?", folder=folder)
    job.await_event("first-step")
    kill_launcher(job)
    job.await_event("launcher-restarted")
    job.await_end()
    assert "code=7" in job.output(), job.told()
    assert "rank 1" in job.events("ended")[0]["because"]


def test_a_second_launcher_passes_signals_on_and_takes_over_no_other_run_of_the_script(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2", f"{RUN} -- {{train}} 3 && exec {RUN} -- {{train}} 5000")
    job.await_event("attempt-started", count=2)
    until(lambda: len([*job.folder.glob(f"{job.id}.0.1.rank*")]) == 2, LIMIT_S, job.told)
    kill_launcher(job)
    assert job.await_event("launcher-restarted")["attempt"] == f"{job.id}.0.1"
    sandbox.run(CTL, ["scancel", "--batch", "--signal=USR1", str(job.id)])
    noted = job.folder / "signals"
    until(lambda: noted.exists() and len(noted.read_text().split("\n")) > 2, LIMIT_S, job.told)
    assert sorted(noted.read_text().split()) == ["0", "1", "SIGUSR1", "SIGUSR1"]
    sandbox.run(CTL, ["scancel", "--batch", "--signal=TERM", str(job.id)])
    assert job.await_end().state is JobState.FAILED
    assert job.events("ended")[-1]["code"] == 9, job.told()


def test_agents_that_were_started_once_more_outlive_the_launcher_too(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?")
    job.await_event("first-step")
    victim = next(node for node in job.row().nodes if node != job.row().batch_host)
    sandbox.run(victim, ["pkill", "-KILL", "-f", "deeplink node --job"])
    job.await_event("agents-again")
    state = sandbox.home / f".local/state/deeplink/jobs/{job.id}/run.json"
    until(lambda: '"restarted": []' not in state.read_text(), LIMIT_S, job.told)
    kill_launcher(job)
    job.await_event("launcher-restarted")
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert len(job.events("attempt-started")) == len(job.events("agents-again")) == 1, job.told()


def test_a_launcher_that_is_killed_while_slurmctld_is_away_is_followed_when_that_is_back(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    job = submit(cluster, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?")
    job.await_event("first-step")
    host, (launcher,) = job.row().batch_host, launchers_of(job)
    assert host is not None
    # Slurm writes down every few seconds what runs; a controller that dies before takes the job for a waiting one.
    kept, begun_unix = cluster.layout.state / "job_state", job.events("job-started")[0]["unix"]
    until(lambda: kept.exists() and kept.stat().st_mtime > begun_unix, LIMIT_S, job.told)
    cluster.crash(CTL)
    cluster.run(host, ["kill", "-KILL", str(launcher)], root=True)
    until(lambda: "trying again" in job.output(), LIMIT_S, job.output)
    cluster.boot(CTL)
    job.await_event("launcher-restarted")
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert "code=0" in job.output()
    assert len(begun(job)) == 2, job.told()


@pytest.mark.parametrize("then", ["true", "sleep 600"])
def test_where_the_parent_is_killed_slurm_starts_the_job_again(
    fresh_sandbox: Callable[..., Sandbox], then: str
) -> None:
    cluster = fresh_sandbox(Shape.of(3))
    job = submit(cluster, "-N2 --no-kill --requeue", f"{RUN} -- {{train}} 5000; {then}")
    job.await_event("first-step")
    until((job.folder / "state").exists, LIMIT_S, job.told)
    killed = time.time()
    kill(job, parent_of(job))
    until(lambda: job.row().restarts == 1 or job.row().state.final, LIMIT_S, job.told)
    print(f"requeued {time.time() - killed:.2f} s after the kill")  # noqa: T201
    assert job.row().restarts == 1, job.told()
    job.start_again()
    first = job.await_event("first-step", count=2)
    assert first["step"] > 5, "it went on where it was saved"
    assert first["attempt"] == f"{job.id}.1.0"
    (incident,) = incidents(job)
    assert (incident.kind, incident.action) == ("launcher-lost", "requeue")
    cluster.run(CTL, ["scancel", str(job.id)])


def test_where_the_parent_is_killed_a_job_that_slurm_may_not_start_again_goes_on_with_its_script(
    sandbox: Sandbox,
) -> None:
    job = submit(sandbox, "-N2 --no-kill --no-requeue", f"{RUN} -- {{train}} 5000; echo code=$?; sleep 600")
    job.await_event("first-step")
    kill(job, parent_of(job))
    job.await_event("parent-lost")
    (job.folder / "end").touch()
    assert job.await_event("ended")["code"] == 0, "the ranks were not ended"
    assert "code=137" in job.output()
    (incident,) = incidents(job)
    assert (incident.kind, incident.action) == ("launcher-lost", "none")
    assert not job.row().state.final, "what the user's script does behind the run is not cut"
    sandbox.run(CTL, ["scancel", str(job.id)])


def test_where_parent_and_launcher_are_killed_the_job_ends_with_its_script(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2 --no-kill", f"{RUN} -- {{train}} 5000; echo code=$?; exit 3")
    job.await_event("first-step")
    kill(job, parent_of(job), *launchers_of(job))
    assert job.await_end().state is JobState.FAILED, job.told()
    assert "code=137" in job.output()
