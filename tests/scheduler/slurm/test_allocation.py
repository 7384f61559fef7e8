"""What a job has, in the words of `scontrol --details show job`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.slurm.client import parse_allocation
from deeplink.scheduler.slurm.states import SlurmTextError
from tests.hostile import TEXTS

# As 22.05.8 wrote it, less lines that nothing here reads.
RECORDED = """JobId=1 JobName=a b
   UserId=deeplink(64100) GroupId=deeplink(64100) MCS_label=N/A
   Requeue=1 Restarts=3 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=n[2-3]
   BatchHost=n2
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,node=2,billing=4
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   JOB_GRES=gpu:4
     Nodes=n2 CPU_IDs=4-6 Mem=0 GRES=gpu:3(IDX:0-2)
     Nodes=n3 CPU_IDs=4 Mem=0 GRES=gpu:1(IDX:0)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Power=
   TresPerTask=gres:gpu:1

"""
WITHOUT_GPUS = """JobId=2 JobName=x
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   JOB_GRES=(null)
     Nodes=n[2-3] CPU_IDs=0-1 Mem=0 GRES=
"""


def test_gpus_of_each_node_and_how_they_were_asked_for() -> None:
    found = parse_allocation(RECORDED, 1)
    assert (found.restarts, found.nodes) == (3, 2)
    assert (found.tasks, found.tasks_per_node, found.cpus_per_task) == (4, 0, 1)
    assert (found.gpus, found.gpus_asked) == ({"n2": 3, "n3": 1}, {"Task": 1})
    without = parse_allocation(WITHOUT_GPUS, 2)
    assert (without.restarts, without.cpus_per_task) == (0, 2)
    assert (without.tasks_per_node, without.gpus, without.gpus_asked) == (2, {"n2": 0, "n3": 0}, {})


def test_the_task_of_an_array_that_has_the_arrays_own_id_is_found_among_all() -> None:
    first = RECORDED.replace("JobId=1 ", "JobId=1 ArrayJobId=2 ArrayTaskId=0 ")
    last = WITHOUT_GPUS.replace("JobId=2 ", "JobId=2 ArrayJobId=2 ArrayTaskId=1 ")
    assert parse_allocation(f"{first}{last}", 2) == parse_allocation(last, 2)
    assert parse_allocation(f"{first}{last}", 1) == parse_allocation(first, 1)


@pytest.mark.parametrize(
    ("head", "address"),
    [
        ("JobId=1 JobName=a b", "1"),
        ("JobId=1 JobName=ArrayJobId=4 ArrayTaskId=3", "1"),
        ("JobId=1 JobName=a\nJobId=1 JobState=COMPLETED", "1"),
        ("JobId=1 ArrayJobId=4 ArrayTaskId=3 ArrayTaskThrottle=2 JobName=sweep", "4_3"),
        ("JobId=1 ArrayJobId=1 ArrayTaskId=0 JobName=sweep", "1_0"),
        ("JobId=1 HetJobId=1 HetJobOffset=0 JobName=x", "1+0"),
    ],
)
def test_how_commands_name_the_job(head: str, address: str) -> None:
    text = RECORDED.replace("JobId=1 JobName=a b", head)
    assert str(parse_allocation(text, 1).address) == address


@given(TEXTS)
def test_a_jobs_name_changes_nothing_of_what_it_has(name: str) -> None:
    assert parse_allocation(RECORDED.replace("a b", name), 1) == parse_allocation(RECORDED, 1)


@pytest.mark.parametrize(
    ("said", "gpus"),
    [("gpu:a100:4(IDX:0-3),gpu:a30:1(IDX:0)", 5), ("gpu:(null):3(IDX:0,2-3)", 3), ("(null)", 0)],
)
def test_forms_of_gpus(said: str, gpus: int) -> None:
    assert parse_allocation(RECORDED.replace("gpu:3(IDX:0-2)", said), 1).gpus[NodeName("n2")] == gpus


@pytest.mark.parametrize(
    "asked", ["TresPerTask=cpu=2,gres/gpu=1", "TresPerTask=gres/gpu:a100:1", "TresPerTask=cpu:2,gres/gpu:1"]
)
def test_words_of_newer_versions(asked: str) -> None:
    text = RECORDED.replace("TresPerTask=gres:gpu:1", asked)
    assert parse_allocation(text, 1).gpus_asked == {"Task": 1}
    assert not parse_allocation(RECORDED.replace("TresPerTask=gres:gpu:1", "TresPerTask=cpu=2"), 1).gpus_asked


def test_tasks_that_slurm_does_not_tell_are_none_that_were_asked_for() -> None:
    assert parse_allocation(RECORDED.replace("NumTasks=4", "NumTasks=N/A"), 1).tasks == 0
    assert parse_allocation(RECORDED.replace("CPUs/Task=1", "CPUs/Task=N/A"), 1).cpus_per_task == 0


def test_tasks_that_share_a_gpu() -> None:
    text = RECORDED.replace("   TresPerTask=gres:gpu:1", "   TresPerJob=gres:gpu:4\n   NtasksPerTRES=2")
    assert parse_allocation(text, 1).tasks_per_gpu == 2
    assert parse_allocation(RECORDED, 1).tasks_per_gpu == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        RECORDED.replace("JobId=1", "JobId=17"),
        RECORDED.replace("NumTasks=4", ""),
        RECORDED.replace("Restarts=3", ""),
        RECORDED.replace("gpu:3(IDX:0-2)", "gpu:3(IDX:0-"),
        RECORDED.replace("Nodes=n2", "Nodes=n[2"),
        RECORDED.replace("JobId=1 ", "JobId=1 ArrayJobId=1 ArrayTaskId=0 ") * 2,
        RECORDED.replace("JobId=1 ", "JobId=1 ArrayJobId=1 ArrayTaskId=3-6%2 "),
        RECORDED.replace("JobId=1 ", "JobId=1 ArrayJobId=4 "),
    ],
)
def test_another_text_is_an_error_and_never_no_gpus(text: str) -> None:
    with pytest.raises(SlurmTextError):
        parse_allocation(text, 1)


@given(st.text(max_size=60))
def test_any_text_behind_a_jobs_id_gives_a_value_or_the_error(text: str) -> None:
    try:
        found = parse_allocation(f"JobId=1 {text}", 1)
    except SlurmTextError:
        return
    assert all(count >= 0 for count in found.gpus.values())
