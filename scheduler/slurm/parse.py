"""The text of Slurm's commands to frozen rows; pure."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import printable
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.slurm.states import (
    HELD,
    JobState,
    NodeFlag,
    NodeState,
    SlurmTextError,
    SlurmValueError,
    gpus_in,
    parse_node_state,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_ONE = re.compile(r"(?P<job>[1-9][0-9]*)(?:_[0-9]+|(?P<component>\+[0-9]+))?", re.ASCII)
OF_A_WHOLE = "it is a component of a heterogeneous job, and Slurm requeues only all of them at once"
MOST_KEPT = 16_384
"""Rows that are kept as they were read: most of what Slurm says it said before, a few seconds ago."""
_CHANGING = re.compile(
    r" (?:CPUAlloc|CPULoad|AllocMem|FreeMem|LastBusyTime|CurrentWatts|AveWatts|AllocTRES|ExtSensors\w+)=\S*"
)
_FREE_TEXT = re.compile(r" (?:Reason|Comment|Extra)=")
_SET_ASIDE = frozenset({JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT})
JOB_FIELDS = (
    "JobID",
    "JobArrayID",
    "State",
    "Reason",
    "RestartCnt",
    "Requeue",
    "UserName",
    "NodeList",
    "BatchHost",
    "Name",
)
"""Columns of `squeue -O` in the order that `parse_jobs` wants."""
_FIELD_END = "\0"  # `text_of` leaves none in what a command wrote
PLACE_FORMAT = ("%P", "%D", "%x", "%n")
"""Columns of `squeue -o` in the order that `parse_place` wants."""
_DURATION = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+)")
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_FACT = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_NODE_REASON = re.compile(
    # Later versions put more fields behind who gave the reason.
    r" Reason=(?P<reason>.*?)(?: \[(?P<by>[^\s@\]]+)@[^\s\]]+\](?: [A-Z]\w*=.*)?| Comment=.*)?\s*\Z",
    re.DOTALL,
)
_IN_SERVICE = frozenset({NodeState.ALLOCATED, NodeState.IDLE, NodeState.MIXED})
_EVERYDAY = frozenset(
    {
        NodeFlag.CLOUD,
        NodeFlag.COMPLETING,
        NodeFlag.DYNAMIC_NORM,
        NodeFlag.NOT_RESPONDING,
        NodeFlag.PLANNED,
        NodeFlag.RESERVED,
    }
)
"""Flags of nodes in service: no reason is given for these."""
_NODE_COMMENT = re.compile(r" Comment=(?P<comment>.*?)(?: (?:Extra|InstanceId|InstanceType)=.*)?\s*\Z", re.DOTALL)
_JOINED = "aggregatedblock="
_NO_TOPOLOGY = "No topology information available"
_COMMAND = "scontrol show partition"
PATTERN = re.compile("~[0-9a-f]{16}~")
"""Every text that `fresh_separator` may return."""


@dataclass(frozen=True, slots=True)
class JobAddress:
    """One job as a command that changes it must name it: `12`, `12_3` (task of an array), `12+1` (component).

    Made from what Slurm wrote of the job (`of_label`), never from a raw id. Nor from the environment: sbatch hands
    the variables of an array's task on to the jobs that it submits.
    """

    _text: str

    def __post_init__(self) -> None:
        """Refuse what names several jobs."""
        if not _ONE.fullmatch(self._text):
            remedy = "Name a job (12), a task of an array (12_3) or a component (12+1)."
            raise SlurmValueError(self._text, "does not name one job", remedy, exit_code=1)

    @classmethod
    def of_label(cls, label: str) -> Self:
        """Return the address of the job that Slurm calls so (squeue's `%i`, JobArrayID).

        >>> str(JobAddress.of_label("12_3"))
        '12_3'
        """
        return cls(label)

    @property
    def is_component(self) -> bool:
        """Whether it is a part of a heterogeneous job."""
        return "+" in self._text

    @property
    def whole(self) -> str:
        """The id of the array or of the heterogeneous job that it is a part of; else its own."""
        return re.split(r"[_+]", self._text, maxsplit=1)[0]

    def alone(self, verb: str) -> Self:
        """Return the address, for a command that Slurm has for no component (measured with 22.05)."""
        if self.is_component:
            raise DeepLinkError(
                f"job {self} is not requeued: {OF_A_WHOLE}",
                remedy=f"If all of them may end: `scontrol {verb} {self.whole}`.",
            )
        return self

    @override
    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as squeue tells it."""

    # the raw id, different for every array task that has started. That of the array, for the task that started
    # last: a command that changes a job takes `address`.
    id: JobId
    label: str  # what people call it, `4_1` for a task of an array
    state: JobState
    reason: str
    restarts: int  # how often Slurm started it again; SLURM_RESTART_COUNT of its newest run
    requeueable: bool  # whether Slurm may start it again
    user: str
    nodes: tuple[NodeName, ...]  # empty while it waits
    batch_host: NodeName | None  # where its batch script runs; None while it waits
    name: str

    @property
    def shares_id(self) -> bool:
        """Whether it is a task of an array that has not started: it has the array's raw id still."""
        return "_" in self.label and self.state is JobState.PENDING and not self.restarts

    @property
    def held(self) -> bool:
        """Whether it waits until somebody releases it."""
        return self.state in _SET_ASIDE or (self.state is JobState.PENDING and self.reason.startswith(HELD))

    @property
    def address(self) -> JobAddress:
        """How commands that change the job name it."""
        return JobAddress.of_label(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node as scontrol tells it."""

    name: NodeName
    address: str  # where its slurmd listens (NodeAddr)
    host: str
    port: int | None  # slurmd's own port where it is not the cluster's default; else None
    state: NodeState
    flags: frozenset[NodeFlag]
    reason: str  # why it is down or drained, empty if it is neither
    reason_by: str  # who gave the reason (Slurm itself is root or SlurmUser)
    boot_time: str  # as Slurm prints it; changes when the node booted; empty if it never registered
    gpus: int | None  # how many the node is configured with, of all types; None where that is not understood
    # how many Slurm counts as allocated; None unless details were asked for, or where it is not understood
    gpus_used: int | None = None
    version: str = ""  # of its slurmd; empty if it never registered
    slurmd_started: str = ""  # when its slurmd was, as Slurm prints it; empty if it never registered
    comment: str = ""  # what an administrator, or we, wrote about it; changes nothing

    @property
    def responding(self) -> bool:
        """Whether slurmctld hears from the node's slurmd."""
        return NodeFlag.NOT_RESPONDING not in self.flags

    @property
    def drained(self) -> bool:
        """Whether the node is to get no new work (draining counts)."""
        return NodeFlag.DRAIN in self.flags

    @property
    def down(self) -> bool:
        """Whether Slurm has given the node up."""
        return self.state is NodeState.DOWN


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """One switch of topology/tree."""

    name: str
    level: int  # 0 is a leaf
    nodes: tuple[NodeName, ...]  # as scontrol tells it all below the switch; in topology.conf those of a leaf
    switches: tuple[str, ...]  # the switches below it
    link_speed: int = 1  # a number without a unit; Slurm prints 1 where none was given, and does not use it


def parse_jobs(text: str, separator: str) -> list[JobRow]:
    """Read `squeue -h -O` with `separator` behind every field of JOB_FIELDS: names are free text."""
    return list(_jobs(text.replace(separator, _FIELD_END)))


@lru_cache(1)  # who asks again every few seconds mostly gets the same answer
def _jobs(text: str) -> tuple[JobRow, ...]:
    return tuple(_job(tuple(fields)) for fields in raw_rows(text, _FIELD_END, len(JOB_FIELDS)))


@lru_cache(MOST_KEPT)
def _job(fields: tuple[str, ...]) -> JobRow:
    return job_row(list(map(printable, fields)))


def rows_of(text: str, separator: str, width: int) -> list[list[str]]:
    """Part what squeue wrote with `separator` behind every field into rows of so many fields, each of one line."""
    return [list(map(printable, row)) for row in raw_rows(text, separator, width)]


def raw_rows(text: str, separator: str, width: int) -> list[list[str]]:
    """Return the same with the fields as they are."""
    fields = text.split(separator)
    if fields.pop().strip() or len(fields) % width:
        raise SlurmTextError("squeue", text)
    rows = [fields[start : start + width] for start in range(0, len(fields), width)]
    return [[row[0].removeprefix("\n"), *row[1:]] for row in rows]


def job_row(fields: list[str]) -> JobRow:
    """Read the columns of JOB_FIELDS."""
    raw, label, state, reason, restarts, requeue, user, nodes, batch_host, name = fields
    try:
        number, again = int(raw), int(restarts)
    except ValueError:
        raise SlurmTextError("squeue", "|".join(fields)) from None
    return JobRow(
        id=JobId(number),
        label=label,
        state=JobState.parse(state),
        reason="" if reason == "None" else reason,
        restarts=again,
        requeueable=requeue == "1",
        user=user,
        nodes=names_of(nodes, "squeue"),
        batch_host=NodeName(batch_host) if batch_host and batch_host != "n/a" else None,
        name=name,
    )


def duration_s(text: str) -> float | None:
    """Read a duration as squeue prints it; None where it is none.

    >>> duration_s("1-02:03:04"), duration_s("3:04"), duration_s("UNLIMITED"), duration_s("NOT_SET")
    (93784.0, 184.0, inf, None)
    """
    if text == "UNLIMITED":
        return inf
    found = _DURATION.fullmatch(text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job may run."""

    partitions: tuple[str, ...]  # those it may start in
    # how many it has, or asks for; 0 where that cannot be told. While one waits that lost nodes before, Slurm may
    # tell what was left then (measured with 22.05).
    nodes: int
    excluded: tuple[NodeName, ...]  # those it must not have
    required: tuple[NodeName, ...]  # those it must have, in part or whole


def parse_place(columns: Sequence[str]) -> JobPlace:
    """Read the columns of PLACE_FORMAT."""
    partitions, nodes, excluded, required = (field.strip() for field in columns)
    count = nodes.partition("-")[0]
    return JobPlace(
        partitions=tuple(filter(None, partitions.split(","))),
        nodes=int(count) if count.isascii() and count.isdigit() else 0,
        excluded=names_of(excluded, "squeue"),
        required=names_of(required, "squeue"),
    )


def names_of(text: str, command: str) -> tuple[NodeName, ...]:
    """Return the nodes that a command named."""
    try:
        return unfold(text)
    except (NodeSetError, ValueError):  # ValueError: a number of thousands of digits
        raise SlurmTextError(command, text) from None


def parse_nodes(text: str) -> list[NodeRow]:
    """Read `scontrol show node --oneliner`."""
    if text.startswith("No nodes in the system"):
        return []
    first, *others = text.split("\nNodeName=")
    records = (first, *(f"NodeName={rest}" for rest in others))
    return [_row(*_quiet_parts(record)) for record in records if record.strip()]


def _quiet_parts(record: str) -> tuple[str, str, str]:
    """Cut load and free memory out: of most nodes nothing else changes, and `_lasting` takes longer."""
    head, _, rest = record.partition(" CPULoad=")
    middle, found, tail = rest.partition(" FreeMem=")
    return (head, middle.partition(" ")[2], tail.partition(" ")[2]) if found else (record, "", "")


@lru_cache(MOST_KEPT)
def _row(*parts: str) -> NodeRow:
    return _node(_lasting(" ".join(parts)))


def _lasting(record: str) -> str:
    """Return a node's record without figures that change from one answer to the next, and that nobody reads."""
    free_text = _FREE_TEXT.search(record)
    end = free_text.start() if free_text else len(record)
    return _CHANGING.sub("", record[:end]) + record[end:]


@lru_cache(MOST_KEPT)
def _node(record: str) -> NodeRow:
    # A reason, and a comment behind it, are free text and come last: look for nothing in them.
    said = _NODE_REASON.search(record)
    noted = _NODE_COMMENT.search(record)
    if said and noted and noted.start() < said.start():
        said = None
    elif said and said["by"]:
        noted = _NODE_COMMENT.search(record, said.end("by"))
    facts = record[: min(found.start() for found in (said, noted) if found)] if said or noted else record
    field: dict[str, str] = dict(reversed(_FACT.findall(facts)))  # the first of a name counts
    if not field.keys() >= {"NodeName", "State"}:
        raise SlurmTextError("scontrol show node", record)
    name = field["NodeName"]
    state, flags = parse_node_state(field["State"])
    if state in _IN_SERVICE and flags <= _EVERYDAY:
        said = None  # 24.11 leaves the reason to a node that was resumed
    port = field.get("Port", "")
    used = field.get("GresUsed", "")
    return NodeRow(
        name=NodeName(name),
        address=field.get("NodeAddr", name),
        host=field.get("NodeHostName", name),
        port=int(port) if _PORT.fullmatch(port) else None,
        state=state,
        flags=flags,
        reason=printable(said["reason"]) if said else "",
        reason_by=(said["by"] or "") if said else "",
        boot_time=field.get("BootTime", "").replace("None", ""),
        gpus=_gpus(field.get("Gres", "")),
        gpus_used=_gpus(used) if used else None,
        version=field.get("Version", ""),
        slurmd_started=field.get("SlurmdStartTime", "").replace("None", ""),
        comment=printable(noted["comment"]) if noted else "",
    )


def _gpus(gres: str) -> int | None:
    try:
        return gpus_in(gres)
    except SlurmValueError:
        return None


def parse_topology(text: str) -> list[SwitchRow]:
    """Read `scontrol show topology`; empty where Slurm knows no topology.

    A block of topology/block (Slurm 23.11) is a switch of level 0, blocks that are joined to one are above it, and
    those that are joined to more above these.
    """
    lines = [line for line in text.splitlines() if line.strip() and _NO_TOPOLOGY not in line]
    rows = [parse_switch(line) for line in lines]
    joined = {row.name for row, line in zip(rows, lines, strict=True) if line.casefold().startswith(_JOINED)}
    return _nested(rows, joined) if joined else rows


def _nested(rows: list[SwitchRow], joined: Collection[str]) -> list[SwitchRow]:
    """Put joined blocks below those that hold them whole: Slurm names the blocks below each, of any size."""
    blocks = {row.name: frozenset(row.switches) for row in rows if row.name in joined}
    found: dict[str, SwitchRow] = {}
    for row in sorted((row for row in rows if row.name in joined), key=lambda row: len(row.switches)):
        left, below = set(row.switches), []
        for smaller in sorted(found, key=lambda name: -len(blocks[name])):
            if blocks[smaller] <= left:
                left -= blocks[smaller]
                below.append(smaller)
        level = 1 + max((found[name].level for name in below), default=0)
        alone = (name for name in row.switches if name in left)
        found[row.name] = replace(row, level=level, switches=(*sorted(below), *alone))
    return [found.get(row.name, row) for row in rows]


def parse_switch(line: str, *, level: int | None = None) -> SwitchRow:
    """Read one line of `scontrol show topology`, or with a level one of topology.conf, which names none."""
    command = "scontrol show topology" if level is None else "topology.conf"
    # Slurm reads the names of its settings without regard to case.
    fields = {key.casefold(): value for key, _, value in (part.partition("=") for part in line.split())}
    if level is None:
        fields = _as_switch(fields)
    try:
        return SwitchRow(
            fields["switchname"],
            int(fields["level"]) if level is None else level,
            names_of(fields.get("nodes", ""), command),
            tuple(names_of(fields.get("switches", ""), command)),
            int(fields.get("linkspeed", "1")),
        )
    except (KeyError, ValueError):
        raise SlurmTextError(command, line) from None


def _as_switch(fields: dict[str, str]) -> dict[str, str]:
    if "blockname" in fields:
        return {"switchname": fields["blockname"], "level": "0", "nodes": fields.get("nodes", "")}
    if "aggregatedblock" in fields:
        joined = fields["aggregatedblock"]
        return {"switchname": joined, "level": "1", "nodes": fields.get("nodes", ""), "switches": joined}
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """One partition."""

    name: str
    state: str  # UP, DOWN, DRAIN or INACTIVE
    most_nodes: int | None  # of one job; None for no bound
    oversubscribe: str  # NO, YES:4, FORCE:4 or EXCLUSIVE
    preempt_mode: str  # OFF, REQUEUE, CANCEL, SUSPEND, GANG,SUSPEND
    node_count: int  # nodes in it


def parse_partitions(text: str) -> list[PartitionRow]:
    """Read `scontrol show partition --oneliner`; empty where there is none."""
    if text.startswith("No partitions in the system"):
        return []
    return [_partition(line) for line in text.splitlines() if line.strip()]


def _partition(line: str) -> PartitionRow:
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
    most, count = fields.get("MaxNodes", ""), fields.get("TotalNodes", "")
    if not {"PartitionName", "State"} <= fields.keys() or not re.fullmatch(r"[0-9]{1,9}", count):
        raise SlurmTextError(_COMMAND, line)
    return PartitionRow(
        name=fields["PartitionName"],
        state=fields["State"],
        most_nodes=int(most) if re.fullmatch(r"[0-9]{1,9}", most) else None,
        oversubscribe=fields.get("OverSubscribe", ""),
        preempt_mode=fields.get("PreemptMode", ""),
        node_count=int(count),
    )


def fresh_separator() -> str:
    """Return a separator for one question: all that keeps a job's name from posing as another job's state."""
    return f"~{secrets.token_hex(8)}~"
