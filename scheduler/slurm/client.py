"""What we ask of Slurm, one method per verb: bounded in time, text with explicit separators, never JSON."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.slurm import command, completion
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.slurm.parse import (
    JOB_FIELDS,
    PLACE_FORMAT,
    JobAddress,
    JobPlace,
    JobRow,
    NodeRow,
    SwitchRow,
    duration_s,
    fresh_separator,
    names_of,
    parse_jobs,
    parse_nodes,
    parse_place,
    parse_topology,
    rows_of,
)
from deeplink.scheduler.slurm.settings import parse_settings
from deeplink.scheduler.slurm.states import JobState, SlurmTextError, SlurmValueError, gpus_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.scheduler.slurm.parse import JobRow

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
SLURMD_PORT = 6818
"""Where slurmd listens unless slurm.conf says otherwise."""
FIELDS = ("JobID", "TimeLeft", "PreemptTime", "StartTime")
"""Columns of `squeue -O` in the order that `parse_standing` wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The resources of a job."""

    address: JobAddress  # how commands that change the job name it
    restarts: int = 0  # how often Slurm started it again
    nodes: int = 0  # how many it has
    tasks: int = 0  # that it asked for; as many as it has nodes, or 0, where it asked for none
    tasks_per_node: int = 0  # that it asked for on each node; 0 where it did not
    tasks_per_gpu: int = 0  # that it asked to share a GPU; 0 where it did not
    cpus_per_task: int = 0  # of each task; 0 where Slurm does not tell
    gpus: Mapping[NodeName, int] = field(default_factory=dict)  # on each of its nodes
    # by what it asked for GPUs (`Job`, `Node`, `Socket`, `Task`), and for how many
    gpus_asked: Mapping[str, int] = field(default_factory=dict)


def parse_allocation(text: str, job: int) -> Allocation:
    """Read what the command says of a job; for the id of an array it tells of all its tasks."""
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
    except SlurmValueError as problem:
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


class JobVanishedError(DeepLinkError):
    """Slurm does not know the job: it never was, or it ended more than MinJobAge ago."""

    def __init__(self, job: int | JobAddress) -> None:
        super().__init__(
            f"Slurm knows no job {job}",
            remedy="It forgets a job some minutes after its end (MinJobAge); `sacct -j` may still have it.",
        )
        self.job = job


class NodeOrder(Enum):
    """What an operator can tell Slurm to do with a node."""

    DRAIN = "drain"
    DOWN = "down"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm's commands as verbs. Thread-safe: it holds nothing but the way to run a command.

    Questions name a job by its raw id; whatever changes one, or ends something of it, takes a `JobAddress`.

    Every method raises `CommandError` where Slurm refused, `CommandTimeoutError` where it did not answer and
    `CommandMissingError` where it is not installed, besides what is named.
    """

    run: command.Runner = command.run

    def jobs(self, *, user: str = "") -> list[JobRow]:
        """Return every job Slurm remembers, ended ones too, of all users or of one."""
        return self._squeue(["-u", user] if user else [])

    def job(self, job: int | JobAddress) -> JobRow:
        """Return one job; a task of an array that has not started has no raw id of its own."""
        try:
            rows = self._squeue(["-j", str(job)])
        except command.CommandError as refused:
            if "Invalid job id" in refused.stderr:
                raise JobVanishedError(job) from refused
            raise
        # The id of an array selects all its tasks; those that have not started yet carry it too.
        exact = [row for row in rows if (row.id if isinstance(job, int) else row.address) == job]
        if not exact:
            raise JobVanishedError(job)
        return exact[0]

    def columns(self, job: int, fields: Sequence[str]) -> list[str] | None:
        """Return columns of squeue, in the letters of `-o`, of one job; None where Slurm does not know it."""
        separator = fresh_separator()
        layout = "".join(f"{field}{separator}" for field in ("%A", *fields))
        said = self.run(["squeue", "-h", "-a", "--states=all", "-o", layout, "-j", str(job)])
        # The id of an array selects all its tasks.
        rows = [row for row in rows_of(said, separator, 1 + len(fields)) if row[0].strip() == str(job)]
        return rows[0][1:] if rows else None

    def _squeue(self, selection: Sequence[str]) -> list[JobRow]:
        separator = fresh_separator()
        layout = ",".join([f"{field}:{separator}" for field in JOB_FIELDS])
        return parse_jobs(
            self.run(["squeue", "-h", "-a", "-r", "--states=all", "-O", layout, *selection]), separator
        )

    def place(self, job: int) -> JobPlace:
        """Return where a job may run."""
        found = self.columns(job, PLACE_FORMAT)
        if found is None:
            raise JobVanishedError(job)
        return parse_place(found)

    def partition_nodes(self, partitions: Iterable[str]) -> frozenset[NodeName]:
        """Return the nodes of partitions."""
        said = self.run(["sinfo", "-h", "-N", "-o", "%N", "-p", ",".join(partitions)])
        return frozenset(map(NodeName, said.split()))

    def nodes(self, names: Iterable[str] = (), *, details: bool = False) -> list[NodeRow]:
        """Return every node of the cluster, or the named ones; with details also what of their GPUs is used."""
        wanted = list(names)
        more = ["--details"] if details else []
        return parse_nodes(
            self.run(["scontrol", *more, "show", "node", "--oneliner", *([fold(wanted)] if wanted else [])])
        )

    def topology(self) -> list[SwitchRow]:
        """Return the switches Slurm knows, leaves first; empty where it knows none."""
        return parse_topology(self.run(["scontrol", "show", "topology"]))

    def cluster_name(self) -> str:
        """Return the cluster's name (ClusterName of slurm.conf)."""
        said = self.run(["scontrol", "show", "config"])
        name = parse_settings(said).text("ClusterName")
        if not name:
            raise SlurmTextError("scontrol show config", said)
        return name

    def submit(self, arguments: Sequence[str]) -> JobId:
        """Submit a batch job with sbatch's own arguments and return its id."""
        said = self.run(["sbatch", "--parsable", *arguments])
        number = said.strip().partition(";")[0]
        if not number.isdigit():
            raise SlurmTextError("sbatch --parsable", said)
        return JobId(int(number))

    def requeue(self, job: JobAddress) -> bool:
        """Put a running job back into the queue; False if it waits there already (which is what was wanted)."""
        try:
            self.run(["scontrol", "requeue", str(job.alone("requeue"))])
        except command.CommandError as refused:
            if "pending execution" in refused.stderr:
                return False
            raise
        return True

    def hold(self, job: JobAddress) -> None:
        """Put a running job back into the queue, and hold it there until somebody releases it."""
        self.run(["scontrol", "requeuehold", str(job.alone("requeuehold"))])

    def keep_only(self, job: JobAddress, nodes: Iterable[str]) -> None:
        """Take every other node out of a running job's allocation, answering or not; its owner may.

        What runs of the job there is killed without grace and without Epilog. Slurm refuses where the batch host
        would go (measured with 22.05).
        """
        self.update_job(job, NodeList=fold(nodes))

    def comment(self, job: int) -> str:
        """Return the job's comment; empty where it has none."""
        said = (self.columns(job, ["%k"]) or [""])[0].strip()
        return "" if said == "(null)" else said

    def release(self, job: JobAddress) -> None:
        """Let a held job start; its owner may, where an administrator did not hold it."""
        self.run(["scontrol", "release", str(job)])

    def comment_job(self, job: JobAddress, text: str) -> None:
        """Write a job's comment; its owner may."""
        self.update_job(job, Comment=text)

    def comment_node(self, name: str, text: str) -> None:
        """Write a node's comment, which changes nothing else; needs the rights of an operator."""
        self.run(["scontrol", "update", f"nodename={name}", f"comment={text}"])

    def update_job(self, job: JobAddress, **fields: str) -> None:
        """Change a job: `update_job(address, ExcNodeList="n1", StartTime="now")` (names as in scontrol(1))."""
        self.run(["scontrol", "update", f"jobid={job}", *(f"{name}={value}" for name, value in fields.items())])

    def update_node(self, name: str, order: NodeOrder, reason: str = "") -> None:
        """Drain, down or resume a node; needs the rights of an operator."""
        because = [f"reason={reason}"] if reason else []
        self.run(["scontrol", "update", f"nodename={name}", f"state={order.value}", *because])

    def cancel(self, job: JobAddress) -> None:
        """Cancel a job; one that has ended already is no error."""
        self.run(["scancel", "--quiet", str(job)])

    def complete(self, job: int, code: int) -> None:
        """End a running job as the end of its script would, with that exit code; its owner may."""
        program = shutil.which("scontrol") or "scontrol"
        linked = self.run(["ldd", program])
        library = re.search(r"^\s*libslurm\S* => (\S+)", linked, re.MULTILINE)
        if library is None:
            raise SlurmTextError(f"ldd {program}", linked)
        self.run([sys.executable, "-I", "-S", completion.__file__, library[1], str(job), str(code)])

    def allocation(self, job: int) -> Allocation:
        """Return what Slurm gave a running job."""
        return parse_allocation(self.run(["scontrol", "--details", "show", "job", str(job)]), job)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRow:
    """How a job stands."""

    job: JobRow
    left_s: float | None  # until its time limit, seconds; 0 once it is over, None where there is none
    preempting: bool  # it has been told to make room, and may still run for its partition's GraceTime


def standing(slurm: Slurm, job: int) -> StandingRow:
    """Return how a job stands."""
    row = slurm.job(job)
    separator = fresh_separator()
    layout = ",".join(f"{field}:{separator}" for field in FIELDS)
    said = slurm.run(["squeue", "-h", "-j", str(job), "--states=all", "-O", layout])
    return parse_standing(row, said, separator)


def parse_standing(job: JobRow, text: str, separator: str) -> StandingRow:
    """Read `squeue -h -O` of one job with `separator` behind every field of FIELDS."""
    # The id of an array selects all its tasks.
    rows = [row for row in rows_of(text, separator, len(FIELDS)) if row[0].strip() == str(job.id)]
    if not rows:
        raise SlurmTextError("squeue", text)
    left, preempted, started = (word.strip() for word in rows[0][1:])
    # The time of an earlier preemption stays in the record; both are written alike, so they compare as text.
    preempting = job.state is JobState.RUNNING and preempted[:1].isdigit() and preempted > started
    return StandingRow(job=job, left_s=_seconds(left, text), preempting=preempting)


def _seconds(left: str, text: str) -> float | None:
    if left == "INVALID":
        return 0.0  # the limit is over: squeue has no word for less than nothing
    if left in {"UNLIMITED", "NOT_SET"}:
        return None
    found = duration_s(left)
    if found is None:
        raise SlurmTextError("squeue", text)
    return found
