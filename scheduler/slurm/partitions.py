"""What `scontrol show partition --oneliner` says of the queues; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deeplink.scheduler.slurm.parse import SlurmTextError

_COMMAND = "scontrol show partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """One partition.

    Attributes:
        state: UP, DOWN, DRAIN or INACTIVE.
        most_nodes: of one job; None for no bound.
        oversubscribe: NO, YES:4, FORCE:4 or EXCLUSIVE.
        preempt_mode: OFF, REQUEUE, CANCEL, SUSPEND, GANG,SUSPEND.
        node_count: nodes in it.
    """

    name: str
    default: bool
    state: str
    most_nodes: int | None
    oversubscribe: str
    preempt_mode: str
    node_count: int


def parse_partitions(text: str) -> list[PartitionRow]:
    """Read `scontrol show partition --oneliner`; empty where there is none.

    Raises:
        SlurmTextError: a line is no partition.
    """
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
        default=fields.get("Default") == "YES",
        state=fields["State"],
        most_nodes=int(most) if re.fullmatch(r"[0-9]{1,9}", most) else None,
        oversubscribe=fields.get("OverSubscribe", ""),
        preempt_mode=fields.get("PreemptMode", ""),
        node_count=int(count),
    )
