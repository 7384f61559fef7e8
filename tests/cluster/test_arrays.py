"""Job arrays on a real Slurm: what happens to one task, and what is done about it, leaves the others alone.

The task that starts last has the array's own id as its raw id, by which Slurm's commands mean all tasks. So each
fault and each action is tried on that task, and on another one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from deeplink.scheduler.recovery.recovery_steps import NEXT_SECOND_S
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import JobAddress, JobRow
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import Job, folder_of, steps_of, submit
from tests.cluster.test_watch import BEATING, Watch, watch  # noqa: F401 - a fixture
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.cluster

LAST, OTHER = "2", "0"
NEITHER = "the other two are untouched"


@dataclass(frozen=True)
class Array:
    """Three tasks; `job.id` is the array's id."""

    job: Job

    def task(self, task: str) -> Job:
        return replace(self.job, id=int(self.row(task).id))

    def row(self, task: str) -> JobRow:
        return Slurm(self.job.cluster.runner()).job(JobAddress.of_label(f"{self.job.id}_{task}"))

    def rest(self, task: str) -> list[JobRow]:
        return [self.row(one) for one in ("0", "1", "2") if one != task]

    def comments(self, task: str) -> list[str]:
        return [Slurm(self.job.cluster.runner()).comment(row.id) for row in self.rest(task)]

    def run(self) -> None:
        until(
            lambda: all(self.row(one).state is JobState.RUNNING for one in ("0", "1", "2")), LIMIT_S, self.job.told
        )
        assert self.row(LAST).id == self.job.id, "the task that started last has the array's own id"

    def cancel(self) -> None:
        self.job.cluster.run(CTL, ["scancel", str(self.job.id)])


def array(cluster: Sandbox, options: str, script: str, *, exports: str = "", fails: str = "") -> Array:
    """Submit an array of three; `{train}` is the light rank's command, in a folder of each task's own.

    The rank of the task `fails` fails in step 12.
    """
    folder = folder_of(cluster)
    for task in ("0", "1", "2"):
        (folder / task).mkdir()
        if task == fails:
            (folder / task / "fail").write_text("0 12 5")
        shutil.chown(folder / task, cluster.user.uid, cluster.user.gid)
    train = shlex.join([sys.executable, str(folder / "train.py"), f"{folder}/"]) + "$SLURM_ARRAY_TASK_ID"
    whole = exports + script.replace("{train}", train)
    made = Array(submit(cluster, f"--array=0-2 --open-mode=append {options}", whole, folder=folder))
    made.run()
    return made


@pytest.mark.parametrize("task", [LAST, OTHER])
def test_a_task_that_fails_again_is_held_alone(sandbox: Sandbox, task: str) -> None:
    tasks = array(sandbox, "-N1 --requeue", "exec deeplink run --nproc-per-node 1 -- {train} 5000", fails=task)
    try:
        before = tasks.rest(task)
        job = tasks.task(task)
        ended = job.await_event("ended", LIMIT_S)
        label = f"{tasks.job.id}_{task}"
        assert f"`scontrol release {label}`" in ended["because"]
        until(lambda: "held" in tasks.row(task).reason, LIMIT_S, job.told)
        assert "exit code 5 again at step 12" in Slurm(sandbox.runner()).comment(job.id)
        assert tasks.rest(task) == before, NEITHER
        assert tasks.comments(task) == ["", ""]

        def status() -> str:
            return sandbox.run(CTL, ["deeplink", "status"]).stdout

        until(lambda: f"job {label}: held: `scontrol release {label}` lets it start" in status(), LIMIT_S, status)
        told = status()
        (line,) = [line for line in told.splitlines() if line.split()[:1] == [label]]
        assert "PENDING held" in line or "COMPLETING held" in line  # its run may still end
        assert "failed" not in line
    finally:
        tasks.cancel()


@pytest.mark.parametrize("task", [LAST, OTHER])
@pytest.mark.parametrize("fault", ["dead node", "dead batch host", "stranded"])
def test_what_the_watchdog_does_for_one_task_leaves_the_others_alone(
    watch: Watch,  # noqa: F811
    fault: str,
    task: str,
) -> None:
    run = "exec deeplink run --nproc-per-node 1 -- {train} 5000"
    if fault == "stranded":
        shutil.copy(BEATING, watch.folder / "beating.py")
        (watch.folder / "beating.py").chmod(0o644)
        beats = f"exec {sys.executable} {watch.folder}/beating.py {watch.address}"
        wait = f"while [ ! -e {watch.folder}/go ]; do sleep 0.1; done"
        run = f"[ $SLURM_ARRAY_TASK_ID = {task} ] || {run}\n{wait}\n{beats}"
    with watch.running("--act"):
        options = "-N2 --exclusive --gres=gpu:2 --no-kill --requeue"
        tasks = array(watch.cluster, options, run, exports=watch.exports)
        for one in ("0", "1", "2"):
            if fault != "stranded" or one != task:
                tasks.task(one).await_event("first-step")
        before = tasks.rest(task)
        row = tasks.row(task)
        assert row.batch_host
        if fault == "stranded":
            (watch.folder / "go").touch()
        elif fault == "dead batch host":
            watch.cluster.crash(row.batch_host)
        else:
            watch.cluster.crash(next(name for name in row.nodes if name != row.batch_host))
        until(lambda: tasks.row(task).restarts == 1, 3 * LIMIT_S, watch.said)
        until(lambda: tasks.row(task).state is JobState.RUNNING, LIMIT_S, watch.said)
        assert tasks.rest(task) == before, NEITHER
        assert f"requeue job {tasks.job.id}_{task}" in watch.said() or fault != "stranded"
        excluded = [Slurm(watch.cluster.runner()).place(one.id).excluded for one in before]
        assert excluded == [(), ()], NEITHER


def _requeue(slurm: Slurm, row: JobRow) -> None:
    slurm.requeue(row.address)


def _hold(slurm: Slurm, row: JobRow) -> None:
    slurm.hold(row.address)


def _exclude(slurm: Slurm, row: JobRow) -> None:
    slurm.requeue(row.address)
    until(lambda: slurm.job(row.id).state is JobState.PENDING, LIMIT_S)
    slurm.update_job(row.address, ExcNodeList="n7")


def _release(slurm: Slurm, row: JobRow) -> None:
    slurm.hold(row.address)
    until(lambda: slurm.job(row.id).state is JobState.PENDING, LIMIT_S)
    slurm.release(row.address)
    time.sleep(NEXT_SECOND_S)
    slurm.update_job(row.address, StartTime="now")
    until(lambda: slurm.job(row.id).state is JobState.RUNNING, LIMIT_S)


ACTIONS: dict[str, tuple[Callable[[Slurm, JobRow], None], Callable[[Slurm, JobRow], bool]]] = {
    "comment": (
        lambda slurm, row: slurm.comment_job(row.address, "ours"),
        lambda slurm, row: slurm.comment(row.id) == "ours",
    ),
    "update": (_exclude, lambda slurm, row: slurm.place(row.id).excluded == ("n7",)),
    "keep_only": (
        lambda slurm, row: slurm.keep_only(row.address, [row.batch_host or ""]),
        lambda slurm, row: len(slurm.job(row.id).nodes) == 1,
    ),
    "requeue": (_requeue, lambda slurm, row: slurm.job(row.id).restarts == 1),
    "hold": (_hold, lambda slurm, row: "held" in slurm.job(row.id).reason),
    "release": (_release, lambda slurm, row: slurm.job(row.id).restarts == 1),
    "cancel": (
        lambda slurm, row: slurm.cancel(row.address),
        lambda slurm, row: slurm.job(row.id).state is JobState.CANCELLED,
    ),
}


@pytest.mark.parametrize("task", [LAST, OTHER])
@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_changes_one_task(sandbox: Sandbox, action: str, task: str) -> None:
    script = "srun --overlap -N2 -J own-$SLURM_ARRAY_TASK_ID sleep 600 & sleep 600"
    tasks = array(sandbox, "-N2 --no-kill --requeue", script)
    slurm = Slurm(sandbox.runner())
    try:
        until(lambda: all(f"own-{one}" in steps_of(slurm, tasks.row(one).id) for one in ("0", "1", "2")), LIMIT_S)
        before = tasks.rest(task)
        act, done = ACTIONS[action]
        act(slurm, tasks.row(task))
        until(lambda: done(slurm, tasks.row(task)), LIMIT_S, tasks.job.told)
        assert tasks.rest(task) == before, NEITHER
        assert tasks.comments(task) == ["", ""]
        assert [slurm.place(row.id).excluded for row in before] == [(), ()]
        assert all(f"own-{row.label.partition('_')[2]}" in steps_of(slurm, row.id) for row in before)
    finally:
        tasks.cancel()


@pytest.mark.parametrize("task", [LAST, OTHER])
def test_deeplink_requeue_starts_one_task_again(sandbox: Sandbox, task: str) -> None:
    tasks = array(sandbox, "-N1 --requeue", "sleep 600")
    try:
        before = tasks.rest(task)
        time.sleep(NEXT_SECOND_S)
        label = f"{tasks.job.id}_{task}"
        done = sandbox.run(CTL, ["deeplink", "requeue", label])
        assert f"scontrol requeue {label}\n" in done.stdout, done.stderr
        assert tasks.row(task).restarts == 1
        assert tasks.rest(task) == before, NEITHER
    finally:
        tasks.cancel()


def test_a_component_of_several_is_not_requeued_and_the_words_say_why(sandbox: Sandbox) -> None:
    """Slurm requeues a heterogeneous job only as a whole."""
    done = sandbox.run(CTL, ["sbatch", "--parsable", "--requeue", "-N1", ":", "-N1", "--wrap", "sleep 600"])
    whole = done.stdout.strip()
    slurm = Slurm(sandbox.runner())
    try:
        until(lambda: slurm.job(int(whole)).state is JobState.RUNNING, LIMIT_S)
        refused = sandbox.run(CTL, ["deeplink", "requeue", f"{whole}+1"])
        assert refused.code
        assert f"job {whole}+1 is not requeued: it is a component of a heterogeneous job" in refused.stderr
        assert f"`scontrol requeue {whole}`" in refused.stderr
        slurm.comment_job(slurm.job(int(whole)).address, "of the first one")
        second = slurm.job(JobAddress.of_label(f"{whole}+1"))
        assert (second.state, slurm.comment(second.id)) == (JobState.RUNNING, "")
    finally:
        sandbox.run(CTL, ["scancel", whole])
