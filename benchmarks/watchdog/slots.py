"""The jobs of the storm: what each is started as, and what is looked at once it has ended."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.watchdog.aftermath import drained_used, fed_wrongly, fenced_saves
from benchmarks.watchdog.dataset import DATASET, EPOCHS
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Collection

    from benchmarks.watchdog.stand import Stand
    from benchmarks.watchdog.strikes import Struck
    from deeplink.data.digest import DeliveryDigest
    from deeplink.scheduler.slurm.parse import JobRow

NEIGHBOUR_S = 7200


@dataclass(frozen=True, slots=True)
class Slot:
    """What runs, one job after another.

    Attributes:
        job_name: as sbatch takes it: whoever tells of the job meets it.
        nodes: of the job, its spares among them.
        array: whether it is a task of an array, whose other task sleeps on as many nodes.
    """

    name: str
    job_name: str
    nodes: int
    spares: int
    array: bool = False


SLOTS = (
    Slot("a", "storm-a \x1b[2J\x1b]0;gone\x07", 4, 2),
    Slot("b", "storm-b\nJobId=1 JobState=COMPLETED", 2, 0),
    Slot("c", "storm-c caf\udce9|%j\u202e", 2, 0, array=True),
)


@dataclass(slots=True)
class Run:
    """One job of a slot, and how it ended.

    Attributes:
        allocated: its nodes, by Slurm's count of restarts.
    """

    slot: Slot
    stand: Stand
    began: float
    allocated: dict[int, frozenset[str]] = field(default_factory=dict)
    ended: str = ""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def started(cls, slot: Slot, stand: Stand) -> Run:
        """Submit a job of a slot, and return it.

        Raises:
            DeepLinkError: Slurm refuses it.
        """
        options = f"-N{slot.nodes} --exclusive --no-kill --requeue --job-name={shlex.quote(slot.job_name)}"
        train = stand.train("--dataset", DATASET, "--epochs", str(EPOCHS), "--batch", "8")
        command = f"exec deeplink run --nproc-per-node 1 --spares {slot.spares} -- {train}"
        if slot.array:
            # The task that starts last has the array's own id as its raw id: the one that trains.
            options += " --array=0-1"
            command = f'test "$SLURM_ARRAY_TASK_ID" = 1 || exec sleep {NEIGHBOUR_S}\n{command}'
        stand.submit(options, command, watched=True)
        return cls(slot, stand, time.time())

    def row(self) -> JobRow | None:
        """Return the job as Slurm tells it; None when it does not answer, or has forgotten."""
        row = self.stand.row()
        if row is not None and row.nodes:
            self.allocated[row.restarts] = frozenset(map(str, row.nodes))
        return row

    def end(self, how: str, expected: DeliveryDigest, hit: Collection[Struck]) -> None:
        """Take notice that it has ended: look at what it leaves, and end what was started with it.

        Args:
            how: in a word.
            expected: what it was to be fed.
            hit: all faults so far.
        """
        self.ended = how
        told_to = any(one.strike.fault == "rank-exit" and one.job == self.stand.job for one in hit)
        if how == "COMPLETED":
            self.problems += fed_wrongly(self.stand.folder, expected)
        elif not (told_to and "held" in how):
            self.problems.append(f"ended as {how}, neither finished nor held for a reason of its own")
        self.problems += [f"a fenced attempt saved {name}" for name in fenced_saves(self.stand)]
        came = [one for one in hit if not one.missed]
        self.problems += drained_used(self.stand.lines(), came, self.allocated)
        if "\x1b" in self.stand.output():
            self.problems.append("its output has an escape of its name")
        if self.slot.array:
            self._end_neighbour()

    def _end_neighbour(self) -> None:
        address = JobAddress.of_label(f"{self.stand.job}_0")
        try:
            row = self.stand.slurm.job(address)
        except DeepLinkError as problem:
            self.problems.append(f"of its neighbour {address} nothing is known: {problem}")
            return
        if row.state is not JobState.RUNNING or row.restarts:
            self.problems.append(
                f"its neighbour {address} is {row.state.value} ({row.reason}), restarted {row.restarts} times"
            )
        with suppress(DeepLinkError):
            self.stand.slurm.cancel(address)

    @property
    def told(self) -> str:
        """What it is, for people."""
        return f"job {self.stand.job} (slot {self.slot.name})"
