"""GPUs as a real Slurm tells them: on nodes whose gres.conf names the cores of their GPUs, and on others."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.parse import NodeRow
from deeplink.scheduler.slurm.states import JobState, NodeState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import steps_of, submit
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

WITH_CORES = {"gpu:(null):2(IDX:0-1)", "gpu:2(IDX:0-1)"}
"""Two GPUs in use of a node with Cores= in gres.conf, as 22.05 and 24.11 print them, and as 26.05 does."""


def in_words(cluster: Sandbox, node: str) -> str:
    """Return what Slurm itself says of a node's used GPUs."""
    said = cluster.run(CTL, ["scontrol", "--details", "show", "node", "--oneliner", node]).stdout
    return next(word for word in said.split() if word.startswith("GresUsed=")).removeprefix("GresUsed=")


def rows(cluster: Sandbox) -> dict[str, NodeRow]:
    return {row.name: row for row in Slurm(cluster.runner()).nodes(details=True)}


def test_a_node_whose_gpus_are_all_used_is_not_called_free_by_a_dry_run(sandbox: Sandbox) -> None:
    sandbox.await_idle(LIMIT_S)
    job = submit(sandbox, "-N1 -n1 -w n1 --gres=gpu:2", "sleep 600")
    try:
        until(lambda: job.row().state is JobState.RUNNING, LIMIT_S, job.told)
        assert in_words(sandbox, "n1") in WITH_CORES
        assert in_words(sandbox, "n0") == "gpu:0"
        assert {name: row.gpus_used for name, row in rows(sandbox).items() if row.gpus_used} == {"n1": 2}

        def tried(count: int) -> dict[str, object]:
            argv = ["deeplink", "sbatch", f"-N{count}", "--gres=gpu:2", "--deeplink-json", "--deeplink-dry-run"]
            done = sandbox.run(CTL, [*argv, "--wrap", "true"])
            assert done.code == 0, done.stderr
            decision = json.loads(done.stdout)["decision"]
            assert isinstance(decision, dict)
            return decision

        assert tried(8)["why"] == "busy", "there are seven"
        offered = tried(4)["candidates"]
        assert isinstance(offered, list)
        assert offered
        assert not [one for one in offered if "n1" in one["nodes"]], "a full node is among the free ones"
    finally:
        sandbox.run(CTL, ["scancel", str(job.id)])


def test_gpus_that_slurm_leaks_are_found_by_the_doctor(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(6))
    job = submit(cluster, "-N2 --exclude=n[0,2] --requeue --gres=gpu:2", "srun sleep 600")
    until(lambda: bool(steps_of(Slurm(cluster.runner()), job.id)), LIMIT_S, job.told)
    row = job.row()
    (victim,) = (node for node in row.nodes if node != row.batch_host)
    cluster.crash(victim)
    # While a node of the job is dead: Slurm 22.05 then starts it again without its GPUs, and keeps them counted.
    cluster.run(CTL, ["scontrol", "requeue", str(job.id)])

    def leaked() -> set[str]:
        known = rows(cluster).items()
        return {name for name, row in known if row.state is NodeState.IDLE and not row.flags and row.gpus_used}

    def has_its_gpus() -> bool:
        return job.row().restarts == 1 and bool(steps_of(Slurm(cluster.runner()), job.id))

    until(
        lambda: has_its_gpus() or (job.row().state.final and leaked()),
        3 * LIMIT_S,
        lambda: f"{job.row()} {rows(cluster)}",
    )
    names = leaked()
    done = cluster.run(CTL, ["deeplink", "doctor", "--json", "--quick"])
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "leaked-gpus"]
    if has_its_gpus():  # later versions leak nothing, and nothing is found
        assert (names, [one["severity"] for one in found]) == (set(), ["ok"])
        return
    assert [name for name in names if in_words(cluster, name) in WITH_CORES], "one whose GPUs have cores"
    assert [(one["severity"], set(unfold(one["where"]))) for one in found] == [("error", names)]
    assert found[0]["said"].startswith(f"{2 * len(names)} GPUs ")
