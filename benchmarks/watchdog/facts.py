"""What is known of one run after it: read from the ranks' own logs, the journals and Slurm. Values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.core.types import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.scheduler.recovery.records import ActionRecord, IncidentOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a rank's own log."""

    attempt: Attempt
    rank: int
    what: str
    unix: float
    step: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One incident as somebody keeps it.

    Attributes:
        by: "watchdog" or "launcher": whose journal.
        stacks: ranks of which a stack is kept.
    """

    by: str
    id: str
    kind: str
    node: str
    attempt: str
    began_unix: float
    detected_unix: float
    action: str
    outcome: IncidentOutcome
    evidence: str
    stacks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is judged.

    Attributes:
        fault_unix: right before the fault was done.
        over_unix: right before it was undone; 0 where it was not.
        victims: nodes that the fault hit.
        lines: of all ranks of all attempts, by time.
        incidents: those that were detected after the fault.
        early: ids of those that were detected before it, when nothing was wrong.
        actions: what the watchdog did, each once for every time it was begun.
        attempt: that ran when the fault came.
        state: of the job in the end, in Slurm's words.
        reason: why it waits, in Slurm's words.
        restarts: by Slurm's count.
        drained: nodes drained or down in the end, with their reasons.
        saves: name and time of every checkpoint of the old attempt's that was published after the fence.
        late_lines: lines of the old attempt in the job's output that came after the fence.
        late_points: metrics of the old attempt's in a journal, of steps after the fence.
        output: what the job wrote since the fault.
        gpus_s: how long a job of all GPUs waited in the end; None: not tried, inf: it never began.
        job_ids: of this job and of those that carried it on.
    """

    fault_unix: float
    attempt: Attempt
    over_unix: float = 0.0
    victims: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    incidents: tuple[Told, ...] = ()
    early: tuple[str, ...] = ()
    actions: tuple[ActionRecord, ...] = ()
    state: str = ""
    reason: str = ""
    restarts: int = 0
    drained: dict[str, str] = field(default_factory=dict)
    saves: tuple[str, ...] = ()
    late_lines: int = 0
    late_points: int = 0
    output: str = ""
    gpus_s: float | None = None
    job_ids: tuple[int, ...] = ()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Attempts of which a rank wrote anything, oldest first."""
        return tuple(sorted({line.attempt for line in self.lines}))

    @property
    def newer(self) -> tuple[Line, ...]:
        """Lines of attempts after the one that the fault hit."""
        return tuple(line for line in self.lines if line.attempt > self.attempt)

    @property
    def first_step(self) -> Line | None:
        """The first training step of a newer attempt."""
        steps = [line for line in self.newer if line.what == "step"]
        return min(steps, key=lambda line: line.unix, default=None)


def read_log(path: Path) -> list[Line]:
    """Return a rank's log; a last line that is still being written is left out."""
    attempt, _, rank = path.name.removesuffix(".jsonl").rpartition(".rank")
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            raw = json.loads(text)
        except ValueError:
            continue
        found.append(
            Line(
                attempt=Attempt.parse(attempt),
                rank=int(rank),
                what=raw["what"],
                unix=raw["unix"],
                step=raw["step"],
                node=raw["node"],
            )
        )
    return found


def read_logs(folder: Path) -> tuple[Line, ...]:
    """Return all ranks' logs below a job's folder, by time."""
    lines = [line for path in (folder / "log").glob("*.jsonl") for line in read_log(path)]
    return tuple(sorted(lines, key=lambda line: line.unix))


def newest_step(lines: Iterable[Line], rank: int = 0) -> int:
    """Return the newest step that a rank made; 0 before its first."""
    return max((line.step for line in lines if line.what == "step" and line.rank == rank), default=0)
