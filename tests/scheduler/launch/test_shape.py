"""Ranks of each node and their GPUs, by what Slurm gave a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.launch_spec import Granted, _dealt, check_spread, gpu_options, granted_by, ranks_of
from deeplink.scheduler.slurm.client import Allocation
from deeplink.scheduler.slurm.parse import JobAddress

A, B, C = map(NodeName, ("a1", "b1", "c1"))
NODES = (A, B, C)
ADDRESS = JobAddress.of_label("7")


def nodes(*counts: int) -> dict[NodeName, int]:
    return dict(zip(NODES, counts, strict=False))


def given_by(allocation: Allocation | None = None, **said: str) -> Granted:
    env = {"SLURM_JOB_NODELIST": "a1,b1,c1", **{f"SLURM_{name}": value for name, value in said.items()}}
    return granted_by(env, allocation or Allocation(address=ADDRESS))


# SLURM_NTASKS, SLURM_TASKS_PER_NODE, and how many tasks each node has; measured with srun 22.05.8.
@pytest.mark.parametrize(
    ("tasks", "told", "expected"),
    [
        ("7", "1,5,1", (1, 5, 1)),
        ("20", "7(x2),6", (7, 7, 6)),
        ("3", "1(x3)", (1, 1, 1)),
        ("6", "4(x3)", (2, 2, 2)),  # with --ntasks-per-node=4
        ("5", "2(x3)", (2, 2, 1)),
    ],
)
def test_tasks_as_slurm_spread_them(tasks: str, told: str, expected: tuple[int, ...]) -> None:
    found = given_by(NTASKS=tasks, TASKS_PER_NODE=told)
    assert found.tasks == nodes(*expected)
    assert ranks_of(NODES, found, None, starters=False) == nodes(*expected)
    assert ranks_of(NODES, found, 2, starters=False) == nodes(2, 2, 2), "the command line goes first"


@pytest.mark.parametrize(("tasks", "told"), [("7", "5,1"), ("9", "1,5,1"), ("7", ""), ("7", "x"), ("2", "1(x3)")])
def test_tasks_that_slurm_tells_otherwise_than_it_should_are_no_guess(tasks: str, told: str) -> None:
    found = given_by(NTASKS=tasks, TASKS_PER_NODE=told)
    with pytest.raises(LaunchError, match="tasks"):
        ranks_of(NODES, found, None, starters=False)
    assert ranks_of(NODES, found, 4, starters=False) == nodes(4, 4, 4)


def test_counts_follow_the_list_of_nodes_and_not_the_order_of_names() -> None:
    env = {"SLURM_JOB_NODELIST": "b1,a[1-2]", "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3,2,1"}
    found = granted_by({**env, "SLURM_JOB_CPUS_PER_NODE": "8,4(x2)"}, Allocation(address=ADDRESS))
    assert found.tasks == {"b1": 3, "a1": 2, "a2": 1}
    assert found.cpus == {"b1": 8, "a1": 4, "a2": 4}


def test_a_job_that_asks_for_no_tasks_has_a_rank_for_each_gpu_or_one() -> None:
    plain = given_by(TASKS_PER_NODE="8(x3)")  # as of --exclusive
    assert ranks_of(NODES, plain, None, starters=False) == nodes(1, 1, 1)
    gpus = given_by(Allocation(address=ADDRESS, gpus=nodes(4, 2, 1)), TASKS_PER_NODE="1(x3)")
    assert ranks_of(NODES, gpus, None, starters=False) == nodes(4, 2, 1)
    lost = given_by(Allocation(address=ADDRESS, gpus=nodes(4, 4)))
    assert ranks_of(NODES, lost, None, starters=False) == nodes(4, 4, 4), "Slurm has taken c1 from the job"
    with pytest.raises(LaunchError, match="c1 without one"):
        ranks_of(NODES, given_by(Allocation(address=ADDRESS, gpus=nodes(1, 1, 0))), None, starters=False)


def test_a_task_below_torchrun_is_a_torchrun() -> None:
    one = given_by(
        Allocation(address=ADDRESS, gpus=nodes(4, 4, 4)), NTASKS="3", NTASKS_PER_NODE="1", TASKS_PER_NODE="1(x3)"
    )
    assert ranks_of(NODES, one, None, starters=False) == nodes(1, 1, 1)
    assert ranks_of(NODES, one, None, starters=True) == nodes(4, 4, 4)
    without = given_by(NTASKS="6", TASKS_PER_NODE="2(x3)")
    assert ranks_of(NODES, without, None, starters=True) == nodes(2, 2, 2)


def test_within_a_step_the_environment_tells_of_the_step_and_slurm_of_the_job() -> None:
    step = {"STEP_ID": "0", "NTASKS": "1", "TASKS_PER_NODE": "1"}
    assert given_by(Allocation(address=ADDRESS, tasks=3), **step).tasks is None
    assert given_by(Allocation(address=ADDRESS, tasks=6, tasks_per_node=2), **step).tasks == nodes(2, 2, 2)
    with pytest.raises(LaunchError, match="inside a step"):
        ranks_of(NODES, given_by(Allocation(address=ADDRESS, tasks=7), **step), None, starters=False)
    alone = granted_by({"SLURM_JOB_NODELIST": "a1", "SLURM_STEP_ID": "0"}, Allocation(address=ADDRESS, tasks=4))
    assert alone.tasks == {"a1": 4}


def test_a_batch_script_of_26_05_is_no_step() -> None:
    assert given_by(STEP_ID="-5", NTASKS="6", TASKS_PER_NODE="2(x3)").tasks == nodes(2, 2, 2)


def test_a_job_of_several_components_is_refused() -> None:
    with pytest.raises(LaunchError, match="components"):
        given_by(Allocation(address=JobAddress.of_label("15+0")))


@pytest.mark.parametrize(
    ("granted", "started", "options"),
    [
        (Granted(), (2, 2), []),
        (Granted(gpus=nodes(4, 4), by_node=True), (4, 4), []),
        (Granted(gpus=nodes(3, 1), by_node=True), (3, 1), []),  # --gpus-per-socket
        (Granted(gpus=nodes(3, 1), gpus_per_task=1), (3, 1), []),
        (Granted(gpus=nodes(4, 4)), (4, 4), ["--gres=gpu:4"]),
        (Granted(gpus=nodes(4, 4), tasks_per_gpu=2), (8, 8), ["--gres=gpu:4", "--gpu-bind=single:2"]),
        (Granted(gpus=nodes(3, 1)), (3, 1), ["--gpus-per-task=1"]),
        (Granted(gpus=nodes(4, 2)), (2, 1), ["--gpus-per-task=2"]),
        (Granted(gpus=nodes(4)), (4, 4), ["--gres=gpu:4"]),
        (Granted(gpus=nodes(4, 4), asked=False), (1, 1), ["--gres=gpu:4"]),
        (Granted(gpus=nodes(4, 2), asked=False), (1, 1), []),
    ],
)
def test_what_srun_is_told_of_gpus(granted: Granted, started: tuple[int, ...], options: list[str]) -> None:
    assert gpu_options(granted, nodes(*started), starters=False) == options


def test_a_torchrun_has_all_gpus_of_its_node() -> None:
    each = Granted(gpus=nodes(4, 4), gpus_per_task=1, tasks_per_gpu=2)
    assert gpu_options(each, nodes(1, 1), starters=True) == ["--gres=gpu:4"]
    with pytest.raises(LaunchError, match="a1: 3, b1: 1"):
        gpu_options(Granted(gpus=nodes(3, 1), gpus_per_task=1), nodes(1, 1), starters=True)


@pytest.mark.parametrize(("gpus", "started"), [((4, 2), (3, 1)), ((3, 1), (4, 4)), ((4, 2), (1, 1))])
def test_gpus_that_slurm_has_no_words_for_are_refused(gpus: tuple[int, ...], started: tuple[int, ...]) -> None:
    with pytest.raises(LaunchError, match="differ in them"):
        gpu_options(Granted(gpus=nodes(*gpus)), nodes(*started), starters=False)


def test_more_ranks_than_their_gpus_allow_are_refused() -> None:
    with pytest.raises(LaunchError, match="are to run on b1, which has 2"):
        gpu_options(Granted(gpus=nodes(4, 2), gpus_per_task=1), nodes(4, 4), starters=False)


def test_nodes_that_differ_all_run_and_have_no_groups() -> None:
    check_spread(nodes(2, 2, 2), 2, [4])
    check_spread(nodes(5, 1, 1), 3, [])
    with pytest.raises(LaunchError, match="who rests") as refused:
        check_spread(nodes(5, 1, 1), 2, [])
    assert refused.value.exit_code == 2
    with pytest.raises(LaunchError, match="groups"):
        check_spread(nodes(5, 1, 1), 3, [7])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_all_tasks_are_dealt_and_no_node_gets_more_than_slurm_says(most: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(len(most), sum(most)))
    found = _dealt(total, most)
    assert sum(found) == total
    assert all(1 <= count <= limit for count, limit in zip(found, most, strict=True))
