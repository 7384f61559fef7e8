"""The text of Slurm's commands to frozen rows; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.gres import GresTextError, gpus_in
from deeplink.scheduler.slurm.job_address import JobAddress
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.slurm.states import HELD, JobState, NodeFlag, NodeState, parse_node_state
from deeplink.text import printable
from deeplink.types import JobId, NodeName

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class SlurmTextError(DeepLinkError):
    """A Slurm command wrote something that this version cannot read."""

    def __init__(self, command: str, text: str) -> None:
        super().__init__(
            f"cannot read what `{command}` wrote: {text[:200]!r}",
            remedy="Please report it together with `sinfo --version`.",
        )
        self.command, self.text = command, text


_SET_ASIDE = frozenset({JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as squeue tells it.

    Attributes:
        id: the raw id, different for every array task that has started. That of the array, for the task that
            started last: a command that changes a job takes `address`.
        label: what people call it, `4_1` for a task of an array.
        restarts: how often Slurm started it again; SLURM_RESTART_COUNT of its newest run.
        nodes: empty while it waits.
        batch_host: where its batch script runs; None while it waits.
        requeueable: whether Slurm may start it again.
    """

    id: JobId
    label: str
    state: JobState
    reason: str
    restarts: int
    requeueable: bool
    user: str
    nodes: tuple[NodeName, ...]
    batch_host: NodeName | None
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
    """One node as scontrol tells it.

    Attributes:
        address: where its slurmd listens (NodeAddr).
        port: slurmd's own port where it is not the cluster's default; else None.
        reason: why it is down or drained, empty if it is neither.
        reason_by: who gave the reason (Slurm itself is root or SlurmUser).
        boot_time: as Slurm prints it; changes when the node booted; empty if it never registered.
        gpus: how many the node is configured with, of all types; None where that is not understood.
        gpus_used: how many Slurm counts as allocated; None unless details were asked for, or where it is not
            understood.
        version: of its slurmd; empty if it never registered.
        slurmd_started: when its slurmd was, as Slurm prints it; empty if it never registered.
        comment: what an administrator, or we, wrote about it; changes nothing.
    """

    name: NodeName
    address: str
    host: str
    port: int | None
    state: NodeState
    flags: frozenset[NodeFlag]
    reason: str
    reason_by: str
    boot_time: str
    gpus: int | None
    gpus_used: int | None = None
    version: str = ""
    slurmd_started: str = ""
    comment: str = ""

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
    """One switch of topology/tree.

    Attributes:
        level: 0 is a leaf.
        nodes: as scontrol tells it all below the switch; in topology.conf those of a leaf.
        switches: the switches below it.
        link_speed: a number without a unit; Slurm prints 1 where none was given, and does not use it.
    """

    name: str
    level: int
    nodes: tuple[NodeName, ...]
    switches: tuple[str, ...]
    link_speed: int = 1


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


def parse_jobs(text: str, separator: str) -> list[JobRow]:
    """Read `squeue -h -O` with `separator` behind every field of JOB_FIELDS.

    Job names are free text and may hold anything, newlines too, so the separator must be one nobody can guess.

    Raises:
        SlurmTextError: the text has another number of fields.
        UnknownStateError: a job is in a state without a name here.
    """
    return [_job(fields) for fields in rows_of(text, separator, len(JOB_FIELDS))]


def rows_of(text: str, separator: str, width: int) -> list[list[str]]:
    """Part what squeue wrote with `separator` behind every field into rows of so many fields, each of one line.

    Raises:
        SlurmTextError: the text has another number of fields.
    """
    fields = text.split(separator)
    if fields.pop().strip() or len(fields) % width:
        raise SlurmTextError("squeue", text)
    shown = [
        printable(field.removeprefix("\n") if number % width == 0 else field)
        for number, field in enumerate(fields)
    ]
    return [shown[start : start + width] for start in range(0, len(shown), width)]


def _job(fields: list[str]) -> JobRow:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job may run.

    Attributes:
        partitions: those it may start in.
        nodes: how many it has, or asks for; 0 where that cannot be told. While one waits that lost nodes before,
            Slurm may tell what was left then (measured with 22.05).
        excluded: those it must not have.
        required: those it must have, in part or whole.
    """

    partitions: tuple[str, ...]
    nodes: int
    excluded: tuple[NodeName, ...]
    required: tuple[NodeName, ...]


PLACE_FORMAT = ("%P", "%D", "%x", "%n")
"""Columns of `squeue -o` in the order that `parse_place` wants."""


def parse_place(columns: Sequence[str]) -> JobPlace:
    """Read the columns of PLACE_FORMAT.

    Raises:
        SlurmTextError: the text is something else.
    """
    partitions, nodes, excluded, required = (field.strip() for field in columns)
    count = nodes.partition("-")[0]
    return JobPlace(
        partitions=tuple(filter(None, partitions.split(","))),
        nodes=int(count) if count.isascii() and count.isdigit() else 0,
        excluded=names_of(excluded, "squeue"),
        required=names_of(required, "squeue"),
    )


_PORT = re.compile(r"\d{1,5}", re.ASCII)


def names_of(text: str, command: str) -> tuple[NodeName, ...]:
    """Return the nodes that a command named.

    Raises:
        SlurmTextError: the text is no list of nodes, or one of more than there can be.
    """
    try:
        return unfold(text)
    except (NodeSetError, ValueError):  # ValueError: a number of thousands of digits
        raise SlurmTextError(command, text) from None


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


def parse_nodes(text: str) -> list[NodeRow]:
    """Read `scontrol show node --oneliner`.

    Raises:
        SlurmTextError: a field is missing.
        UnknownStateError: a node is in a state without a name here.
    """
    if text.startswith("No nodes in the system"):
        return []
    return [_node(record) for record in re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE) if record.strip()]


def _node(record: str) -> NodeRow:
    # A reason, and a comment behind it, are free text and come last: look for nothing in them.
    said = _NODE_REASON.search(record)
    noted = _NODE_COMMENT.search(record)
    if said and noted and noted.start() < said.start():
        said = None
    elif said and said["by"]:
        noted = _NODE_COMMENT.search(record, said.end("by"))
    facts = record[: min(found.start() for found in (said, noted) if found)] if said or noted else record

    def field(name: str, fallback: str | None = None) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", facts)
        if found:
            return found[1]
        if fallback is None:
            raise SlurmTextError("scontrol show node", record)
        return fallback

    name = field("NodeName")
    state, flags = parse_node_state(field("State"))
    if state in _IN_SERVICE and flags <= _EVERYDAY:
        said = None  # 24.11 leaves the reason to a node that was resumed
    port = field("Port", "")
    used = field("GresUsed", "")
    return NodeRow(
        name=NodeName(name),
        address=field("NodeAddr", name),
        host=field("NodeHostName", name),
        port=int(port) if _PORT.fullmatch(port) else None,
        state=state,
        flags=flags,
        reason=printable(said["reason"]) if said else "",
        reason_by=(said["by"] or "") if said else "",
        boot_time=field("BootTime", "").replace("None", ""),
        gpus=_gpus(field("Gres", "")),
        gpus_used=_gpus(used) if used else None,
        version=field("Version", ""),
        slurmd_started=field("SlurmdStartTime", "").replace("None", ""),
        comment=printable(noted["comment"]) if noted else "",
    )


def _gpus(gres: str) -> int | None:
    try:
        return gpus_in(gres)
    except GresTextError:
        return None


_JOINED = "aggregatedblock="
_NO_TOPOLOGY = "No topology information available"


def parse_topology(text: str) -> list[SwitchRow]:
    """Read `scontrol show topology`; empty where Slurm knows no topology.

    A block of topology/block (Slurm 23.11) is a switch of level 0, blocks that are joined to one are above it, and
    those that are joined to more above these.

    >>> [row.switches for row in parse_topology("AggregatedBlock=b[0-1] BlockIndex=2 Nodes=n[0-3] BlockSize=4")]
    [('b0', 'b1')]

    Raises:
        SlurmTextError: a line is not a switch.
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
    """Read one line of `scontrol show topology`, or with a level one of topology.conf, which names none.

    Raises:
        SlurmTextError: the line is not a switch.
    """
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
