"""Jobs that wait, as one squeue tells them in Slurm's own order, and the mark of nodes that we named.

Nodes that are named bind a job, also when it is queued again, and Slurm lets no one change them while it runs.
The mark `deeplink-wish=NODES` in its comment says that they are a hint: so they can be taken off a job that waits,
whatever became of the process that named them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.slurm.nodeset import fold, unfold
from deeplink.scheduler.slurm.parse import JobAddress, fresh_separator, names_of, rows_of
from deeplink.scheduler.slurm.states import JobState, SlurmTextError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

WAIT_S = 5.0
"""How long a job may wait with nodes named. Slurm's main scheduler comes by within 2.6 s (measured)."""
_MARK = "deeplink-wish="
_JOINT = " | "
_OURS = re.compile(rf"^{_MARK}(\S+)(?: \| |\Z)")
# Slurm has not come to such jobs since they were last changed. Measured with 22.05; docs/decisions/0016.
_UNSEEN = frozenset({"", "None", "Priority", "BeginTime"})
# Slurm looks at these jobs whenever nodes become free. Measured with 22.05; docs/decisions/0016.
_WAITS = frozenset({"", "None", "Resources", "Priority"})
_NODES_BEGIN = ("ReqNodeNotAvail", "Nodes required for job are DOWN", "Nodes_required_for_job_are_DOWN")
_FORMAT = ("%A", "%i", "%T", "%r", "%u", "%P", "%D", "%Q", "%n", "%x", "%Y", "%v", "%N", "%k")
_NOTHING = frozenset({"", "(null)", "N/A", "n/a"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One job, or all tasks of an array that wait together."""

    id: JobId  # its raw id
    label: str  # what people call it: `7`, `7_[2-9]` for tasks of an array, `7+1` for a component
    state: JobState
    reason: str
    user: str
    partitions: tuple[str, ...]  # those it may start in
    nodes: int  # how many it asks for; 0 where that cannot be told
    priority: int  # higher is looked at first
    required: frozenset[NodeName]  # nodes it must have (in part or whole), and must not have
    excluded: frozenset[NodeName]
    planned: frozenset[NodeName]  # those that the backfill scheduler keeps for it; empty where it has made no plan
    reservation: str  # whose nodes it is to run on; empty for none
    on: frozenset[NodeName]  # where it runs; empty while it waits
    comment: str = ""  # what its user wrote about it, and we

    @property
    def address(self) -> JobAddress:
        """How commands that change it name it."""
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
        """Whether the nodes that it requires were named for it: no one else named them."""
        return is_wish(self.comment, self.required)


def arguments(separator: str, *options: str) -> list[str]:
    """Return the command whose text `parse_queue` reads: all jobs that have not ended, of all users."""
    return ["squeue", "-h", "-a", *options, "-o", "".join(f"{field}{separator}" for field in _FORMAT)]


def parse_queue(text: str, separator: str) -> list[Row]:
    """Read what the command of `arguments` wrote."""
    return [_row([part.strip() for part in fields]) for fields in rows_of(text, separator, len(_FORMAT))]


def _row(fields: list[str]) -> Row:
    number, label, state, reason, user, partitions, nodes, *fields = fields
    priority, required, excluded, planned, kept, on, comment = fields
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

    The tier of a partition counts before it, which squeue does not tell: see `reconcile.before`.
    """
    return sorted((row for row in rows if row.waits), key=lambda row: (-row.priority, row.id))


def read_queue(run: Callable[[list[str]], str], *options: str) -> list[Row]:
    """Return all jobs that have not ended, of all users, in one question; with options of squeue fewer."""
    separator = fresh_separator()
    return parse_queue(run(arguments(separator, *options)), separator)


def stopped(reason: str) -> str:
    """Return why no node that became free would start a job; empty where one could.

    Words that are not known here stop it too: dependencies, limits of accounts, licences, holds all do.
    """
    return "" if reason in _WAITS or reason.startswith(_NODES_BEGIN) else reason


def marked(comment: str, nodes: Iterable[NodeName]) -> str:
    """Return a job's comment with the mark of these nodes.

    >>> marked("mine", ("n0", "n1")), unmarked("deeplink-wish=n[0-1] | mine")
    ('deeplink-wish=n[0-1] | mine', 'mine')
    """
    return _JOINT.join(filter(None, (f"{_MARK}{fold(nodes)}", unmarked(comment))))


def unmarked(comment: str) -> str:
    """Return a job's comment without a mark."""
    return _OURS.sub("", comment)


def is_wish(comment: str, required: Collection[NodeName]) -> bool:
    """Whether the nodes that a job requires are those of its mark: no one else has named any since."""
    found = _OURS.search(comment)
    try:
        return found is not None and bool(required) and {*unfold(found[1])} == {*required}
    except DeepLinkError:
        return False


def is_due(reason: str, waited_s: float) -> bool:
    """Whether the nodes are to be taken off a waiting job: Slurm looked and did not start it, or it waits long."""
    return reason not in _UNSEEN or waited_s >= WAIT_S


def taking_back(comment: str) -> dict[str, str]:
    """Return what to change about a job so that it may start anywhere, in scontrol's words."""
    return {"ReqNodeList": "", "Comment": unmarked(comment)}


def naming(comment: str, nodes: Iterable[NodeName]) -> dict[str, str]:
    """Return what to change about a job so that it is to start on these nodes, in scontrol's words."""
    listed = tuple(nodes)
    return {"ReqNodeList": fold(listed), "Comment": marked(comment, listed)}
