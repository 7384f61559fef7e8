"""What each framework finds; that the frameworks themselves take it so: tests/examples."""

from __future__ import annotations

import json

import pytest

from deeplink.core.types import Attempt
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import (
    RECIPES,
    Launch,
    NodeFacts,
    RankTask,
    Start,
    host_file,
    mpi_task,
    rank_environment,
)


def launch(recipe: str, *hosts: str, per_node: int = 2, relaunch: int = 2) -> Launch:
    hosts = hosts or ("10.77.0.15", "10.77.0.10")
    nodes = tuple(NodeFacts(node=f"n{n}", address=f"{host}:4000") for n, host in enumerate(hosts))
    return Launch(
        attempt=Attempt(17, 1, relaunch),
        nodes=nodes,
        spares=(),
        ranks=(per_node,) * len(nodes),
        master_port=23456,
        passed_on={},
        recipe_name=recipe,
        host_file="/jobs/17/hostfile.17.1.2",
    )


def added(recipe: str, rank: int, env: dict[str, str] | None = None) -> dict[str, str]:
    """What a recipe adds to the environment of a rank of two nodes with two each."""
    started = launch(recipe)
    node, local_rank = started.place(rank)
    place = RankTask(rank, local_rank, f"n{node}")
    plain = rank_environment(launch("torch"), RankTask(0, 0, "n0"), {})
    found = rank_environment(started, place, env or {})
    return {name: value for name, value in found.items() if name not in plain}


def test_there_is_a_recipe_for_each_framework() -> None:
    frameworks = "torch torchrun lightning accelerate deepspeed jax tensorflow mpi horovod"
    assert list(RECIPES) == frameworks.split()


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("torch", {}),
        ("accelerate", {}),
        ("mpi", {}),
        ("lightning", {}),
        ("deepspeed", {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}),
        ("jax", {"JAX_COORDINATOR_ADDRESS": "10.77.0.15:23456", "JAX_LOCAL_DEVICE_IDS": "1"}),
        ("horovod", {"HOROVOD_CONTROLLER": "mpi"}),
    ],
)
def test_the_last_rank_finds_exactly_this(recipe: str, expected: dict[str, str]) -> None:
    assert added(recipe, 3) == expected


def test_one_torchrun_is_started_on_each_node_and_told_all_it_asks_for() -> None:
    assert RECIPES["torchrun"].start is Start.NODE
    env = rank_environment(launch("torchrun"), RankTask(1, 0, "n1"), {"PET_NNODES": "9"})
    assert {name: value for name, value in env.items() if name.startswith("PET_")} == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "10.77.0.15",
        "PET_MASTER_PORT": "23456",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ID": "17.1.2",
    }
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("1", "2", "1", "1")
    assert launch("torchrun").world_size == 4, "ranks are counted, not torchruns"


def test_tensorflows_workers_are_in_rank_order_and_have_a_port_each() -> None:
    # TFConfigClusterResolver: JSON with `cluster` (job -> addresses, by the task's index) and `task`.
    config = json.loads(added("tensorflow", 2)["TF_CONFIG"])
    workers = ["10.77.0.15:23456", "10.77.0.15:23457", "10.77.0.10:23456", "10.77.0.10:23457"]
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 2}}
    on_one_host = launch("tensorflow", "127.0.0.1", "127.0.0.1", per_node=1)
    env = rank_environment(on_one_host, RankTask(1, 0, "n1"), {})
    assert json.loads(env["TF_CONFIG"])["cluster"]["worker"] == ["127.0.0.1:23456", "127.0.0.1:23457"]


@pytest.mark.parametrize(("visible", "device"), [("3", "0"), ("0,1", "1"), (None, "1")])
def test_jax_calls_the_only_device_it_sees_the_first(visible: str | None, device: str) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert added("jax", 1, env)["JAX_LOCAL_DEVICE_IDS"] == device


@pytest.mark.parametrize(
    ("visible", "devices"), [("4,5,6", "0,1,2"), ("3", "0"), ("GPU-1,GPU-2", "0,1"), (None, None)]
)
def test_the_only_process_of_a_node_has_all_gpus_that_jax_sees(visible: str | None, devices: str | None) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert (
        rank_environment(launch("jax", per_node=1), RankTask(1, 0, "n1"), env).get("JAX_LOCAL_DEVICE_IDS")
        == devices
    )


def test_another_attempt_on_other_nodes_is_told_anew() -> None:
    old = rank_environment(launch("tensorflow", "10.0.0.1", "10.0.0.2"), RankTask(0, 0, "n0"), {})
    again = launch("tensorflow", "10.0.0.2", "10.0.0.3", relaunch=3)
    new = rank_environment(again, RankTask(0, 0, "n0"), old)
    workers = json.loads(new["TF_CONFIG"])["cluster"]["worker"]
    assert [worker.partition(":")[0] for worker in workers] == ["10.0.0.2"] * 2 + ["10.0.0.3"] * 2


def test_the_host_file_has_the_nodes_in_rank_order() -> None:
    assert host_file(launch("deepspeed")) == "n0 slots=2\nn1 slots=2\n"
    assert (
        rank_environment(launch("mpi"), RankTask(0, 0, "n0"), {})["DEEPLINK_HOSTFILE"]
        == "/jobs/17/hostfile.17.1.2"
    )


@pytest.mark.parametrize("variable", ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_an_mpiexec_says_which_rank_a_process_is(variable: str) -> None:
    assert mpi_task(launch("mpi"), {variable: "3"}) == RankTask(3, 1, "n1")


@pytest.mark.parametrize("env", [{}, {"PMI_RANK": "4"}, {"PMI_RANK": "-1"}])
def test_a_rank_that_nobody_meant_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(LaunchError):
        mpi_task(launch("mpi"), env)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_launch_travels_with_its_recipe(recipe: str) -> None:
    assert Launch.unpacked(launch(recipe).packed()) == launch(recipe)
