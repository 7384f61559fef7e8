"""Slots on a real Slurm: what a rank finds in one, what is gone when the next begins, who is needed for that."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.lab.laboratory import Laboratory
from deeplink.scheduler.testbed.shape import Shape
from tests.cluster.jobs import Job, folder_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

RUN = "exec deeplink run --nproc-per-node 1"
# Each step's own, each process's own, and what no plain srun sets.
OWN = {
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "_", "SHLVL"),
    *("SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_HOST", "SLURM_LAUNCH_NODE_IPADDR"),
    *("SLURM_STEPMGR", "SLURM_OVERCOMMIT"),
}


def found(job: Job, attempt: str, rank: int) -> dict[str, Any]:
    path = job.folder / f"{attempt}.rank{rank}"
    until(path.exists, LIMIT_S, job.told)
    said: dict[str, Any] = json.loads(path.read_text())
    return said


def slurms(said: dict[str, Any]) -> dict[str, str]:
    names = ("SLURM", "CUDA", "GPU", "ROCR", "ZE_")
    return {name: one for name, one in said["env"].items() if name.startswith(names) and name not in OWN}


def with_slot_rank(cluster: Sandbox) -> tuple[Path, str]:
    folder = folder_of(cluster)
    script = folder / "slot_rank.py"
    shutil.copy(Path(__file__).with_name("slot_rank.py"), script)
    return folder, f"{sys.executable} {script} {folder}"


@pytest.mark.parametrize("spares", [0, 1])
def test_a_rank_finds_what_srun_itself_gives_one_in_the_first_attempt_and_in_the_next(
    sandbox: Sandbox, spares: int
) -> None:
    folder, rank = with_slot_rank(sandbox)
    options = f"-N{2 + spares} --ntasks-per-node=2 --cpus-per-task=2 --gres=gpu:2 --no-kill"
    job = submit(
        sandbox,
        options,
        f"export TAG=first\nexec deeplink run --nproc-per-node 2 --spares {spares} -- {rank}",
        folder=folder,
    )
    first = [found(job, f"{job.id}.0.0", number) for number in range(4)]
    left = [folder / f"left.{job.id}.0.0.{number}" for number in range(4)]
    until(lambda: all(one.exists() for one in left), LIMIT_S, job.told)
    (folder / "fail").touch()
    second = [found(job, f"{job.id}.0.1", number) for number in range(4)]
    last = [one.stat().st_mtime for one in left]
    assert max(last) <= second[0]["started"], "gone before the next began"
    time.sleep(0.3)
    assert last == [one.stat().st_mtime for one in left]
    relaunched = job.events("relaunch")[0]
    assert relaunched["because"].startswith("rank 0 on ")
    assert job.let_end().state is JobState.COMPLETED, job.told()
    steps = {one["env"]["SLURM_STEP_ID"] for one in (*first, *second)}
    assert (len(steps) == 1) is (spares == 0), "else the suspect's node is left out, and may boot"
    assert "srun:" not in job.output() or spares, "nobody is bothered with the end of slots"
    # The same with srun alone, on the same nodes in the same order.
    order = [one["env"]["SLURMD_NODENAME"] for one in first]
    (folder / "hosts").write_text("".join(f"{node}\n" for node in order))
    (folder / "end").touch()
    script = f"""unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NNODES
export TAG=first DEEPLINK_ATTEMPT=srun SLURM_HOSTFILE={folder}/hosts
srun --ntasks=4 --distribution=arbitrary --overlap --cpus-per-task=2 bash -c 'RANK=$SLURM_PROCID exec {rank}'"""
    nodes = ",".join(sorted({one["env"]["SLURM_JOB_NODELIST"] for one in first}))
    plain = submit(sandbox, f"{options} --nodelist={nodes}", script, folder=folder)
    assert plain.await_end().state is JobState.COMPLETED, plain.told()
    own = [found(plain, "srun", number) for number in range(4)]
    differ = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES"}
    differ |= {"SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"}  # from Slurm 23.02 on
    where = {
        "SLURM_STEP_NODELIST",
        "SLURM_TOPOLOGY_ADDR",
        "SLURMD_NODENAME",
    }  # the spare's own, in the second attempt
    for number, one in enumerate(own):
        for attempt, left_out in (
            (first[number], differ),
            (second[number], differ | (where if spares else set())),
        ):
            mine, theirs = (
                {name: value for name, value in slurms(of).items() if name not in left_out}
                for of in (attempt, one)
            )
            assert mine == theirs
            assert (attempt["cpus"], attempt["limits"]) == (one["cpus"], one["limits"])


def test_a_node_is_lost_while_slurmctld_is_away_and_a_spare_takes_its_ranks(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = submit(cluster, "-N4 --no-kill", f"{RUN} --spares 1 -- {{train}} 5000")
    job.await_event("first-step")
    until((job.folder / "state").exists, LIMIT_S, job.told)
    begun = job.events("attempt-started")[0]
    laboratory = Laboratory(cluster)
    laboratory.inject("controller-down")
    cluster.crash(begun["nodes"][-1])
    again = job.await_event("attempt-started", count=2)
    assert set(again["nodes"]) == {*begun["nodes"][:-1], *begun["spares"]}
    assert job.await_event("first-step", count=2)["step"] > 5, "it went on where it was saved"
    laboratory.undo("controller-down")
    assert job.let_end().state is JobState.COMPLETED, job.told()
    assert job.row().restarts == 0


@pytest.mark.parametrize("rests", [True, False])
def test_a_node_that_boots_again_before_it_was_called_down_ends_no_ranks_on_others(
    fresh_sandbox: Callable[..., Sandbox], *, rests: bool
) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    job = submit(cluster, "-N4 --no-kill", f"{RUN} --spares 1 -- {{train}} 5000")
    job.await_event("first-step")
    until((job.folder / "state").exists, LIMIT_S, job.told)
    begun = job.events("attempt-started")[0]
    host = job.row().batch_host
    if rests and begun["spares"][0] == host:
        pytest.skip("the batch host rests: its end is another story")
    victim = begun["spares"][0] if rests else next(node for node in reversed(begun["nodes"]) if node != host)
    cluster.crash(victim)
    if not rests:
        job.await_event("first-step", count=2)
    cluster.boot(victim)
    attempts = 1 if rests else 2
    before = int((job.folder / "state").read_text())
    until(lambda: int((job.folder / "state").read_text()) > before + 200, LIMIT_S, job.told)
    assert len(job.events("attempt-started")) == attempts, job.told()
    assert job.let_end().state is JobState.COMPLETED, job.told()
