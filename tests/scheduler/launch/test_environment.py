"""What ranks find in their environment."""

from __future__ import annotations

import pytest

from deeplink.scheduler.launch.environment import (
    LAUNCH_VARIABLE,
    Launch,
    NodeFacts,
    NotLaunchedError,
    Task,
    rank_environment,
    slurm_task,
    step_environment,
)
from deeplink.types import Attempt, parse_members


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
    per_node=2,
    master_port=23456,
    passed_on={"DEEPLINK_CATALOG": "/shared/catalog"},
)


def test_packed_and_unpacked_is_the_same() -> None:
    assert Launch.unpacked(LAUNCH.packed()) == LAUNCH


def test_a_thousand_nodes_fit_into_one_variable() -> None:
    nodes = tuple(facts(f"node-{number:04}", number % 250) for number in range(1000))
    packed = Launch(
        attempt=Attempt(1, 0, 0), nodes=nodes, spares=(), per_node=8, master_port=1, passed_on={}
    ).packed()
    assert len(packed) < 128 << 10


@pytest.mark.parametrize("text", ["", "%", "aGVsbG8=", LAUNCH.packed()[:-8]])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(NotLaunchedError):
        Launch.unpacked(text)


def test_ranks_are_numbered_along_the_launch() -> None:
    env = rank_environment(LAUNCH, Task(2, 0, "n0"), {LAUNCH_VARIABLE: "x", "HOME": "/h", "SLURM_NODEID": "0"})
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
    assert [member.name for member in parse_members(env["DEEPLINK_MEMBERS"])] == ["n5", "n0", "n9"]
    assert env["HOME"] == "/h"
    assert LAUNCH_VARIABLE not in env


def test_the_interface_is_the_agents_unless_the_user_chose_one() -> None:
    env = rank_environment(LAUNCH, Task(0, 0, "n5"), {"GLOO_SOCKET_IFNAME": "ib0"})
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == (
        "ib0",
        "=eth1",
        "eth1",
    )


@pytest.mark.parametrize("task", [Task(2, 0, "n5"), Task(4, 0, "n9"), Task(0, 0, "n0")])
def test_a_rank_on_the_wrong_node_is_refused(task: Task) -> None:
    with pytest.raises(NotLaunchedError):
        rank_environment(LAUNCH, task, {})


def test_slurm_says_which_rank_it_is() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n0"}
    assert slurm_task(env) == Task(3, 1, "n0")
    with pytest.raises(NotLaunchedError):
        slurm_task({"SLURM_PROCID": "3"})


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
