"""What ranks find in their environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.core.config import Config
from deeplink.core.publish import read_members
from deeplink.core.types import Attempt
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import (
    LAUNCH_VARIABLE,
    Launch,
    NodeFacts,
    RankTask,
    leave_launch,
    left_launch,
    members_variable,
    mpi_task,
    rank_environment,
)
from deeplink.scheduler.launch.job import passed_on
from deeplink.scheduler.launch.srun import step_environment
from tests.waiting import LIMIT_S


def facts(node: str, number: int) -> NodeFacts:
    return NodeFacts(
        node=node,
        address=f"10.77.0.{number}:4000",
        token_file=f"/tmp/{node}/token",
        store=f"/local/{node}",
        interface="eth1",
        pid=number,
    )


LAUNCH = Launch(
    attempt=Attempt(17, 1, 2),
    nodes=(facts("n5", 15), facts("n0", 10)),
    spares=(facts("n9", 19),),
    ranks=(2, 2),
    master_port=23456,
    passed_on={"DEEPLINK_CATALOG": "/shared/catalog"},
)


def test_packed_and_unpacked_is_the_same() -> None:
    assert Launch.unpacked(LAUNCH.packed()) == LAUNCH


def test_the_environment_of_a_rank_among_ten_thousand_nodes_is_short(tmp_path: Path) -> None:
    nodes = tuple(facts(f"node-{number:05}", number % 250) for number in range(10_000))
    launch = replace(LAUNCH, nodes=nodes, spares=(), ranks=(8,) * len(nodes))
    env = {LAUNCH_VARIABLE: leave_launch(launch, tmp_path)}
    found = rank_environment(left_launch(env), RankTask(8, 0, "node-00001"), env)
    found["DEEPLINK_MEMBERS"] = members_variable(env)
    assert max(map(len, found.values())) < 1024
    assert read_members(found["DEEPLINK_MEMBERS"]) == launch.members
    assert launch.members[:2] == (facts("node-00000", 0).member, facts("node-00001", 1).member)


def test_what_an_attempts_ranks_are_to_know_lies_in_files_of_its_own(tmp_path: Path) -> None:
    first = leave_launch(LAUNCH, tmp_path)
    assert leave_launch(LAUNCH, tmp_path) == first
    other = leave_launch(replace(LAUNCH, attempt=Attempt(17, 1, 3), nodes=LAUNCH.nodes[:1], ranks=(2,)), tmp_path)
    assert other != first
    assert left_launch({LAUNCH_VARIABLE: first}) == LAUNCH, "a rank that starts late finds its own attempt"
    found = read_members(members_variable({LAUNCH_VARIABLE: first}))
    assert [member.name for member in found] == ["n5", "n0", "n9"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_launch_that_a_node_does_not_see_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read") as refused:
        left_launch({LAUNCH_VARIABLE: str(tmp_path / "launch.0")})
    assert "DEEPLINK_STATE" in refused.value.remedy


@pytest.mark.parametrize("content", [b"", b"%", zlib.compress(b"{}"), LAUNCH.packed()[:-8]])
def test_another_content_is_refused(content: bytes) -> None:
    with pytest.raises(LaunchError):
        Launch.unpacked(content)


def test_ranks_are_numbered_along_the_launch() -> None:
    env = rank_environment(LAUNCH, RankTask(2, 0, "n0"), {LAUNCH_VARIABLE: "x", "HOME": "/h", "SLURM_NODEID": "0"})
    assert {
        name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    } == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.77.0.15", "23456")
    assert env["DEEPLINK_ATTEMPT"] == "17.1.2"
    assert (env["DEEPLINK_NODE"], env["DEEPLINK_AGENT"]) == ("n0", "10.77.0.10:4000")
    assert (env["DEEPLINK_TOKEN_FILE"], env["DEEPLINK_STORE"]) == ("/tmp/n0/token", "/local/n0")
    assert env["DEEPLINK_CATALOG"] == "/shared/catalog"
    assert env["HOME"] == "/h"
    assert LAUNCH_VARIABLE not in env


def test_the_interface_is_the_agents_unless_the_user_chose_one() -> None:
    env = rank_environment(LAUNCH, RankTask(0, 0, "n5"), {"GLOO_SOCKET_IFNAME": "ib0"})
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == (
        "ib0",
        "=eth1",
        "eth1",
    )


@pytest.mark.parametrize("task", [RankTask(2, 0, "n5"), RankTask(4, 0, "n9"), RankTask(0, 0, "n0")])
def test_a_rank_on_the_wrong_node_is_refused(task: RankTask) -> None:
    with pytest.raises(LaunchError):
        rank_environment(LAUNCH, task, {})


def test_what_bends_a_step_is_left_out() -> None:
    env = {
        "SLURM_HOSTFILE": "f",
        "SLURM_NTASKS": "8",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "7",
        "PATH": "p",
    }
    assert step_environment(env, resources=True) == {"SLURM_GPUS_PER_TASK": "1", "SLURM_JOB_ID": "7", "PATH": "p"}
    assert step_environment(env, resources=False) == {"SLURM_JOB_ID": "7", "PATH": "p"}


UNEVEN = replace(LAUNCH, ranks=(3, 1))


def test_ranks_of_nodes_that_differ_are_numbered_one_node_after_the_other() -> None:
    assert (UNEVEN.world_size, UNEVEN.processes, UNEVEN.started) == (4, 4, (3, 1))
    assert [UNEVEN.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    env = rank_environment(UNEVEN, RankTask(3, 0, "n0"), {})
    found = [env[name] for name in ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")]
    assert found == ["3", "1", "1", "3", "4"]
    for rank, node in ((2, "n0"), (4, "n0"), (-1, "n5")):
        with pytest.raises(LaunchError):
            rank_environment(UNEVEN, RankTask(rank, 0, node), {})
    assert mpi_task(UNEVEN, {"PMI_RANK": "3"}) == RankTask(3, 0, "n0")
    starters = replace(UNEVEN, recipe_name="torchrun")
    assert (starters.world_size, starters.processes) == (4, 2)
    told = [rank_environment(starters, RankTask(n, 0, node), {}) for n, node in enumerate(("n5", "n0"))]
    assert [env["PET_NPROC_PER_NODE"] for env in told] == ["3", "1"]


def test_threads_are_the_tasks_cpus_and_one_where_ranks_share_a_node() -> None:
    def threads(task: RankTask, **env: str) -> str | None:
        return rank_environment(UNEVEN, task, env).get("OMP_NUM_THREADS")

    shared, alone = RankTask(0, 0, "n5"), RankTask(3, 0, "n0")
    assert (threads(shared), threads(alone)) == ("1", None)
    assert threads(shared, SLURM_CPUS_PER_TASK="6") == "6"
    assert threads(shared, SLURM_CPUS_PER_TASK="6", OMP_NUM_THREADS="3") == "3"
    assert threads(alone, OMP_NUM_THREADS="3") == "3"


def test_restarts_are_counted_for_whoever_reads_them_as_torchrun_has_them() -> None:
    env = rank_environment(replace(LAUNCH, restarts=2, max_restarts=4), RankTask(0, 0, "n5"), {})
    found = [
        env[f"TORCHELASTIC_{name}"] for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")
    ]
    assert found == ["17", "2", "4", "False"]
    torchrun = rank_environment(replace(LAUNCH, recipe_name="torchrun"), RankTask(0, 0, "n5"), {})
    assert not [name for name in torchrun if name.startswith(("TORCHELASTIC", "ROLE_", "OMP_"))], "it sets its own"


@pytest.mark.slow
def test_a_rank_finds_all_that_a_worker_of_torchrun_finds(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import json, os; print(json.dumps(dict(os.environ)))\n")
    before = {
        name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", LAUNCH_VARIABLE}
    }
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += ["--local-ranks-filter=1", str(tmp_path / "worker.py")]
    done = subprocess.run(argv, env=before, capture_output=True, text=True, timeout=3 * LIMIT_S, check=True)
    worker = json.loads(done.stdout.splitlines()[-1])
    ours = rank_environment(LAUNCH, RankTask(1, 1, "n5"), before)
    missing = {name for name in worker if name not in ours and name not in before}
    # Where torchrun finds a worker's traceback, ours being in the job's output; and what its own agent handles.
    assert missing <= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    same = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert {name: ours[name] for name in same} == {name: worker[name] for name in same}


def test_the_standing_caches_members_reach_the_ranks_beside_the_jobs_own() -> None:
    config = Config(members="n0=10.0.0.1:7411", token_file=Path("/etc/deeplink/users.token"))
    standing = {"DEEPLINK_SITE_MEMBERS": "n0=10.0.0.1:7411", "DEEPLINK_SITE_TOKEN_FILE": str(config.token_file)}
    assert passed_on(config, {}).items() >= standing.items()


def test_a_run_within_a_rank_takes_the_outer_runs_agents_for_no_standing_cache() -> None:
    outer = {"DEEPLINK_ATTEMPT": "7.0.0"}
    assert "DEEPLINK_SITE_MEMBERS" not in passed_on(Config(members="n0=10.0.0.1:4000"), outer)
    within = Config(members="n0=10.0.0.1:4000", site_members="s0=10.0.0.9:7411", site_token_file=Path("/t"))
    assert passed_on(within, outer)["DEEPLINK_SITE_MEMBERS"] == "s0=10.0.0.9:7411"
