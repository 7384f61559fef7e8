"""Asks Slurm for the nodes of the job that it has taken out of service, or from the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.latest_answer import LastAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.types import NodeName

NODES_S, PAUSE_S = 2.0, 0.02
"""For so long a relaunch waits for Slurm's word on the nodes, and how often it is looked for."""
OFTEN_S = 5.0
"""Between two questions of a job that is stranded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesStanding:
    """Slurm's word on the job's nodes.

    Attributes:
        out: nodes of the job that are drained or down, and why.
        taken: nodes that are no longer the job's, and why: others may run there.
    """

    out: Mapping[NodeName, str] = field(default_factory=dict)
    taken: Mapping[NodeName, str] = field(default_factory=dict)


def nodes_standing(nodes: Sequence[NodeName], rows: Iterable[NodeRow], job: JobRow, restart: int) -> NodesStanding:
    """Return how the nodes stand that the job began with.

    Slurm takes a node that it, or an administrator, calls down from a job with --no-kill. Where its slurmd
    answers, the node may be in service again within a second: only the job's own list tells.

    Args:
        nodes: those the job began with.
        rows: the same, as Slurm has them now.
        job: the job, asked for after the nodes.
        restart: which run of the job we are; the nodes of a later one say nothing of ours.
    """
    said = {row.name: (row.drained or row.down, _why(row)) for row in rows}
    kept = frozenset(job.nodes if job.restarts == restart else ()) or frozenset(nodes)
    return NodesStanding(
        out={node: why for node, (is_out, why) in said.items() if is_out and node in kept},
        taken={node: said[node][1] if node in said else "unknown" for node in nodes if node not in kept},
    )


def _why(row: NodeRow) -> str:
    state = "drained" if row.drained else row.state.value.lower()
    return f"{state}: {row.reason}" if row.reason else state


class Service:
    """Slurm's last word on the job's nodes. The supervising thread alone uses it.

    Args:
        backend: the allocation.
        clock: for every duration.

    Attributes:
        is_answered: whether Slurm answered when it was last waited for.
    """

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._clock = clock
        self._last = LastAnswer(backend.nodes_standing, clock, "deeplink-nodes")
        self.is_answered = True

    @property
    def word(self) -> NodesStanding:
        """The last answer."""
        return self._last.value or NodesStanding()

    def tick(self) -> NodesStanding:
        """Return the last answer, and ask again if it is time to; does not wait."""
        if self._clock.monotonic() - self._last.asked >= OFTEN_S:
            self._last.ask()
        return self.word

    def look(self, listen: Callable[[], None]) -> NodesStanding:
        """Return the answer to a question asked now; the last one where none comes in time.

        Args:
            listen: called while Slurm is waited for, for `NODES_S` at most.
        """
        began = self._clock.monotonic()
        while self._last.asked < began and self._clock.monotonic() < began + NODES_S:
            self._last.ask()
            listen()
            self._clock.sleep(PAUSE_S)
        self.is_answered = self._last.answered >= began
        return self.word

    def tell(self, chronicle: EventLog, usable: Collection[NodeName], chosen: Collection[NodeName]) -> None:
        """Say of each usable node that Slurm has withdrawn what becomes of it.

        Args:
            chronicle: who is told.
            usable: the nodes before Slurm was asked.
            chosen: those that the next attempt may use.
        """
        if not self.is_answered:
            said = f"Slurm does not say within {NODES_S:.0f} s how the nodes stand: its last answer counts"
            chronicle.event("nodes-unknown", said)
        for node in usable:
            if node in self.word.taken:
                because = f"{self.word.taken[node]}; Slurm has taken it from the job, it is not used any more"
                chronicle.event("taken", f"{node} is {because}", nodes=[node], because=because)
            elif node in self.word.out:
                becomes = "used all the same, no other node is left" if node in chosen else "left out"
                because = f"{self.word.out[node]}; {becomes}"
                chronicle.event("drained", f"{node} is {because}", nodes=[node], because=because)
