"""The whole queue as one squeue tells it, in the order in which Slurm looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from deeplink.scheduler.slurm.job_address import JobAddress
from deeplink.scheduler.slurm.parse import SlurmTextError, names_of, rows_of
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.wish.binding import is_wish
from deeplink.types import JobId, NodeName

_FORMAT = ("%A", "%i", "%T", "%r", "%u", "%P", "%D", "%Q", "%n", "%x", "%Y", "%v", "%N", "%k")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job, or all tasks of an array that wait together.

    Attributes:
        id: its raw id.
        label: what people call it: `7`, `7_[2-9]` for tasks of an array, `7+1` for a component.
        partitions: those it may start in.
        nodes: how many it asks for; 0 where that cannot be told.
        priority: higher is looked at first.
        required, excluded: nodes it must have (in part or whole), and must not have.
        planned: those that the backfill scheduler keeps for it; empty where it has made no plan.
        reservation: whose nodes it is to run on; empty for none.
        on: where it runs; empty while it waits.
        comment: what its user wrote about it, and we.
    """

    id: JobId
    label: str
    state: JobState
    reason: str
    user: str
    partitions: tuple[str, ...]
    nodes: int
    priority: int
    required: frozenset[NodeName]
    excluded: frozenset[NodeName]
    planned: frozenset[NodeName]
    reservation: str
    on: frozenset[NodeName]
    comment: str = ""

    @property
    def address(self) -> JobAddress:
        """How commands that change it name it.

        Raises:
            JobAddressError: it is several tasks of an array.
        """
        return JobAddress.of_label(self.label)

    @property
    def waits(self) -> bool:
        """Whether it has not been given nodes."""
        return self.state is JobState.PENDING

    @property
    def record_id(self) -> str:
        """Which job's folder holds its record: of a task or component that of the whole."""
        return self.label.partition("_")[0].partition("+")[0]

    @property
    def single(self) -> bool:
        """Whether it is one job, and no part of an array or of several components."""
        return self.label.isdigit()

    @property
    def wished(self) -> bool:
        """Whether the nodes that it requires were wished for it: nobody else named them."""
        return is_wish(self.comment, self.required)


def arguments(separator: str, *options: str) -> list[str]:
    """Return the command whose text `parse_queue` reads: all jobs that have not ended, of all users."""
    return ["squeue", "-h", "-a", *options, "-o", "".join(f"{field}{separator}" for field in _FORMAT)]


def parse_queue(text: str, separator: str) -> list[Row]:
    """Read what the command of `arguments` wrote.

    Raises:
        SlurmTextError: the text is something else.
        UnknownStateError: a job is in a state without a name here.
    """
    return [_row([part.strip() for part in fields]) for fields in rows_of(text, separator, len(_FORMAT))]


def _row(fields: list[str]) -> Row:
    (
        number,
        label,
        state,
        reason,
        user,
        partitions,
        nodes,
        priority,
        required,
        excluded,
        planned,
        kept,
        on,
        comment,
    ) = fields
    if not (number.isascii() and number.isdigit() and priority.isascii() and priority.isdigit()):
        raise SlurmTextError("squeue", "|".join(fields))
    return Row(
        id=JobId(int(number)),
        label=label,
        state=JobState.parse(state),
        reason="" if reason == "None" else reason,
        user=user,
        partitions=tuple(partitions.split(",")),
        nodes=int(nodes) if nodes.isascii() and nodes.isdigit() else 0,
        priority=int(priority),
        required=_names(required),
        excluded=_names(excluded),
        planned=_names(planned),
        reservation="" if kept in _NOTHING else kept,
        on=_names(on),
        comment="" if comment in _NOTHING else comment,
    )


def _names(text: str) -> frozenset[NodeName]:
    return frozenset() if text in _NOTHING else frozenset(names_of(text, "squeue"))


def in_order(rows: list[Row]) -> list[Row]:
    """Return those that wait as Slurm looks at them: higher priority first, of equal ones the older job.

    The tier of a partition counts before it, which squeue does not tell: see `round.before`.
    """
    return sorted((row for row in rows if row.waits), key=lambda row: (-row.priority, row.id))
