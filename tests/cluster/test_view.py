"""The everyday commands on a real Slurm: a job is looked at, followed, requeued and cancelled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deeplink.core.text import printable
from deeplink.scheduler.slurm.command import Finished
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]


def deeplink(cluster: Sandbox, *words: str, code: int = 0) -> Finished:
    done = cluster.run(CTL, ["deeplink", *words])
    assert done.code == code, f"{words}: {done}"
    return done


def status(cluster: Sandbox, job: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(deeplink(cluster, "status", str(job), "--json").stdout)
    return found


def test_a_job_from_its_first_step_to_its_end(sandbox: Sandbox) -> None:
    job = submit(
        sandbox,
        "-N3 --deeplink-spares 1 --job-name 'tr ü'",
        "deeplink run --srun-option=--label -- {train} 5000 0.1",
        program="deeplink sbatch",
    )
    job.await_event("first-step")
    until(lambda: (status(sandbox, job.id)["step"] or 0) > 3, LIMIT_S, job.told)
    seen = status(sandbox, job.id)
    assert (seen["name"], seen["state"], seen["phase"], seen["attempt"]) == (
        "tr ü",
        "RUNNING",
        "running",
        f"{job.id}.0.0",
    )
    assert [seat["ranks"] for seat in seen["seats"]] == [[0, 0], [1, 1], None]
    assert all(seat["switches"][0] == "core" for seat in seen["seats"])
    assert seen["steps_per_s"] > 0
    assert seen["output"] == f"{job.folder}/out"
    screen = deeplink(sandbox, "status", str(job.id)).stdout
    assert "its launcher: running" in screen
    assert "spare" in screen
    assert f" {job.id} " in deeplink(sandbox, "top", "--once").stdout

    first = seen["seats"][0]["node"]
    until(lambda: "1: rank 1 of 2" in job.output(), LIMIT_S, job.told)  # rank 0 may be some steps ahead of it
    assert deeplink(sandbox, "logs", str(job.id), "--rank", "1").stdout == "1: rank 1 of 2 begins at step 0\n"
    assert deeplink(sandbox, "logs", str(job.id), "--node", first).stdout == "0: rank 0 of 2 begins at step 0\n"
    assert "attempt" in deeplink(sandbox, "logs", str(job.id), "--events").stdout

    dry = deeplink(sandbox, "requeue", str(job.id), "--exclude", first, "--dry-run").stdout
    assert dry.splitlines()[0] == f"scontrol requeue {job.id}"
    again = json.loads(deeplink(sandbox, "requeue", str(job.id), "--exclude", first, "--json").stdout)
    assert first not in again["nodes"]  # none where Slurm, on a busy machine, keeps it in the queue for a moment
    job.await_event("first-step", count=2)
    until(lambda: status(sandbox, job.id)["attempt"] == f"{job.id}.1.0", LIMIT_S, job.told)
    until(lambda: first not in {seat["node"] for seat in status(sandbox, job.id)["seats"]}, LIMIT_S, job.told)
    part = deeplink(sandbox, "logs", str(job.id), "--attempt", "1.0").stdout
    assert part.startswith(f"deeplink: attempt {job.id}.1.0: ")

    assert deeplink(sandbox, "cancel", "--dry-run", str(job.id)).stdout.startswith(f"scancel {job.id}\n")
    deeplink(sandbox, "cancel", str(job.id))
    job.await_end()
    until(lambda: status(sandbox, job.id)["state"] == "CANCELLED", LIMIT_S, job.told)
    assert status(sandbox, job.id)["end"].startswith("cancelled by ")
    assert deeplink(sandbox, "logs", str(job.id), "-f", "-n", "1").stdout


def test_the_output_of_a_job_is_shown_whatever_bytes_its_files_name_has(sandbox: Sandbox) -> None:
    name = "caf\udce9 \x1b[2J ü"
    home = sandbox.home
    argv = ["sbatch", "--parsable", f"--job-name={name}", f"--output={home}/{name}-%x-%j", "--wrap=echo hallo"]
    job = int(sandbox.run(CTL, argv).stdout.strip())
    until((home / f"{name}-{name}-{job}").exists)
    assert deeplink(sandbox, "logs", "-f", str(job)).stdout == "hallo\n"
    assert status(sandbox, job)["output"] == printable(f"{home}/{name}-{name}-{job}")


def test_a_job_with_an_unreachable_node_is_not_requeued(sandbox: Sandbox) -> None:
    job = submit(sandbox, "-N2", "sleep 600", program="deeplink sbatch")
    until(lambda: len(job.row().nodes) == 2, LIMIT_S, job.told)
    lost = next(name for name in job.row().nodes if name != job.row().batch_host)
    sandbox.cut(lost)
    try:
        refused = deeplink(sandbox, "requeue", str(job.id), code=1)
        assert f"{lost} does not answer" in refused.stderr
        assert job.row().restarts == 0
        assert job.row().state.value == "RUNNING"
    finally:
        sandbox.heal(lost)
        deeplink(sandbox, "cancel", str(job.id))
        job.await_end()
    until(lambda: set(sandbox.states().values()) == {"idle"}, 3 * LIMIT_S, lambda: str(sandbox.states()))


def test_interactive_ranks_stand_along_the_fabric(sandbox: Sandbox) -> None:
    say = ["bash", "-c", 'echo "$SLURM_PROCID $SLURM_TOPOLOGY_ADDR $1"; exit 7', "bash", "a b$x"]
    done = deeplink(sandbox, "srun", "-N8", "--ntasks-per-node=1", *say, code=7)
    ranks = sorted(line.split(" ", 2) for line in done.stdout.splitlines())
    leaves = [address.split(".")[-2] for _, address, _ in ranks]
    assert sum(leaves[place] != leaves[place - 1] for place in range(8)) == 2
    assert {said for *_, said in ranks} == {"a b$x"}
    assert deeplink(sandbox, "srun", "-N2", "--pty", "--dry-run", "bash").stdout == "srun -N2 --pty bash\n"
