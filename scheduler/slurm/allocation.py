"""Reads the resources of a running job from `scontrol --details show job`; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.gres import GresTextError, gpus_in
from deeplink.scheduler.slurm.job_address import JobAddress, JobAddressError
from deeplink.scheduler.slurm.parse import SlurmTextError, names_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.types import NodeName

_COMMAND = "scontrol --details show job"
# Several are told of arrays and heterogeneous jobs alone; any other line that begins so may be of the job's name.
_RECORDS = re.compile(r"(?<=\n\n)(?=JobId=[0-9]+ (?:ArrayJobId|HetJobId)=)")
_GIVEN = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", re.MULTILINE)
_ASKED = re.compile(r"^ +TresPer(Job|Node|Socket|Task)=(\S+)", re.MULTILINE)
_TASKS = re.compile(
    r"^ +NumNodes=([0-9]{1,9})\S* NumCPUs=\S+ NumTasks=(N/A|[0-9]{1,9})(?!\S)(?: CPUs/Task=([0-9]{1,9})(?!\S))?",
    re.MULTILINE,
)
_PER_NODE = re.compile(r"\bNtasksPerN:B:S:C=([0-9]{1,9}):")
_PER_GPU = re.compile(r"^ +NtasksPerTRES=([0-9]{1,9})(?!\S)", re.MULTILINE)
_RESTARTS = re.compile(r"^ +Requeue=\S+ Restarts=([0-9]{1,9})(?!\S)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The resources of a job.

    Attributes:
        address: how commands that change the job name it.
        restarts: how often Slurm started it again.
        nodes: how many it has.
        tasks: that it asked for; as many as it has nodes, or 0, where it asked for none.
        tasks_per_node: that it asked for on each node; 0 where it did not.
        tasks_per_gpu: that it asked to share a GPU; 0 where it did not.
        cpus_per_task: of each task; 0 where Slurm does not tell.
        gpus: on each of its nodes.
        gpus_asked: by what it asked for GPUs (`Job`, `Node`, `Socket`, `Task`), and for how many.
    """

    address: JobAddress
    restarts: int = 0
    nodes: int = 0
    tasks: int = 0
    tasks_per_node: int = 0
    tasks_per_gpu: int = 0
    cpus_per_task: int = 0
    gpus: Mapping[NodeName, int] = field(default_factory=dict)
    gpus_asked: Mapping[str, int] = field(default_factory=dict)


def parse_allocation(text: str, job: int) -> Allocation:
    """Read what the command says of a job; for the id of an array it tells of all its tasks.

    Raises:
        SlurmTextError: the text is something else.
    """
    records = [one for one in _RECORDS.split(text) if one.startswith(f"JobId={job} ")]
    record = records[0] if len(records) == 1 else ""
    tasks, restarts = _TASKS.search(record), _RESTARTS.search(record)
    if tasks is None or restarts is None:
        raise SlurmTextError(_COMMAND, text)
    try:
        given = {
            node: gpus_in(gres) for names, gres in _GIVEN.findall(record) for node in names_of(names, _COMMAND)
        }
        asked = {what: gpus_in(gres) for what, gres in _ASKED.findall(record)}
        address = _address(record)
    except (GresTextError, JobAddressError) as problem:
        raise SlurmTextError(_COMMAND, problem.text) from problem
    return Allocation(
        address=address,
        restarts=int(restarts[1]),
        nodes=int(tasks[1]),
        tasks=0 if tasks[2] == "N/A" else int(tasks[2]),
        tasks_per_node=_number(_PER_NODE, record),
        tasks_per_gpu=_number(_PER_GPU, record),
        cpus_per_task=int(tasks[3] or 0),
        gpus=given,
        gpus_asked={what: count for what, count in asked.items() if count},
    )


def _number(pattern: re.Pattern[str], record: str) -> int:
    found = pattern.search(record)
    return int(found[1]) if found else 0


def _address(record: str) -> JobAddress:
    # What follows is free text of the user's.
    head = dict(part.split("=", 1) for part in record.partition(" JobName=")[0].split() if "=" in part)
    if "ArrayJobId" in head:
        return JobAddress.of_label(f"{head['ArrayJobId']}_{head.get('ArrayTaskId', '')}")
    if "HetJobId" in head:
        return JobAddress.of_label(f"{head['HetJobId']}+{head.get('HetJobOffset', '')}")
    return JobAddress.of_label(head["JobId"])
