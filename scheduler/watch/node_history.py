"""State kept between polls: node boots, leaked GPUs, time since recovery."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import UNSETTLED_FLAGS, NodeState
from deeplink.scheduler.watch.rules.resume import bars_return

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from deeplink.scheduler.slurm.parse import NodeRow
    from deeplink.scheduler.watch.agent_reports import AgentReport
    from deeplink.scheduler.watch.evidence import WatchPolicy
    from deeplink.types import NodeName

LATER_S = 10.0
"""A boot time is counted back from the node's clock: a smaller step of it is no boot."""
LEAKS_EVERY_S = 60.0
LEAKS_AGAIN_S = 15.0
"""How often GPUs are counted: in calm, and while some seem to have leaked."""


@dataclass(slots=True)
class BootHistory:
    """Slurm's boot times of the nodes and of their slurmds, and when each moved on."""

    _shown: dict[NodeName, str] = field(default_factory=dict)
    _moved_at: dict[NodeName, float] = field(default_factory=dict)
    _started: dict[NodeName, str] = field(default_factory=dict)
    _started_unix: dict[NodeName, float] = field(default_factory=dict)
    _anew_at: dict[NodeName, float] = field(default_factory=dict)

    def note(self, rows: Iterable[NodeRow], now: float) -> None:
        """Take note of what Slurm shows at `now`, monotonic."""
        for row in rows:
            if row.slurmd_started and row.slurmd_started != self._started.get(row.name):
                if row.name in self._started:
                    self._anew_at[row.name] = now
                self._started[row.name] = row.slurmd_started
                self._started_unix[row.name] = boot_unix(row.slurmd_started)
            before = self._shown.get(row.name)
            if not row.boot_time or before == row.boot_time:
                continue  # Slurm 22.05 shows none for a while after a node was resumed (measured)
            self._shown[row.name] = row.boot_time
            if before is not None and 0 < boot_unix(before) < boot_unix(row.boot_time) - LATER_S:
                self._moved_at[row.name] = now

    def age_s(self, name: NodeName, now: float) -> float | None:
        """Return how long ago Slurm's boot time of the node moved on; None when it never did."""
        moved = self._moved_at.get(name)
        return None if moved is None else now - moved

    def anew_s(self, name: NodeName, now: float) -> float | None:
        """Return how long ago the node's slurmd was seen to have been started anew; None when it never was."""
        anew = self._anew_at.get(name)
        return None if anew is None else now - anew

    def slurmd_age_s(self, name: NodeName, unix: float) -> float | None:
        """Return how long ago the node's slurmd was started, by the node's own clock.

        None where Slurm has not shown it, or showed a time that is still to come at `unix`, by ours.
        """
        started = self._started_unix.get(name, 0.0)
        return unix - started if 0 < started <= unix else None


def boot_unix(shown: str) -> float:
    """Return a boot time as Slurm prints it in Unix time; 0 where it is none.

    >>> boot_unix("2026-11-22T11:30:01") - boot_unix("2026-11-22T11:29:01"), boot_unix("Unknown")
    (60.0, 0.0)
    """
    try:
        return datetime.fromisoformat(shown).astimezone().timestamp()
    except ValueError:
        return 0.0


@dataclass(slots=True)
class LeakHistory:
    """GPUs that Slurm counts as used on nodes without a job, and since when that is seen."""

    _since: dict[NodeName, tuple[float, float, int]] = field(default_factory=dict)
    _looked: float = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is time to count again."""
        return now - self._looked >= (LEAKS_AGAIN_S if self._since else LEAKS_EVERY_S)

    def hasten(self, now: float) -> None:
        """Count again soon: something was done to a node or a job."""
        self._looked = min(self._looked, now - LEAKS_EVERY_S + LEAKS_AGAIN_S)

    def note(self, rows: Iterable[NodeRow], taken: Collection[NodeName], now: float) -> None:
        """Take note of a count.

        Args:
            rows: the nodes, with their used GPUs.
            taken: nodes that a job has, a suspended one too.
            now: monotonic.
        """
        self._looked = now
        self._since = {
            row.name: (self._since[row.name][0] if row.name in self._since else now, now, row.gpus_used)
            for row in rows
            if row.gpus_used
            and row.state is NodeState.IDLE
            and not row.flags & UNSETTLED_FLAGS
            and row.name not in taken
        }

    def of(self, name: NodeName) -> tuple[int, float]:
        """Return a node's leaked GPUs, and for how long, between two counts at least, they have been seen."""
        since, until, gpus = self._since.get(name, (0.0, 0.0, 0))
        return gpus, until - since


@dataclass(slots=True)
class HealthHistory:
    """For how long standing agents have had nothing to say against nodes that are out of service."""

    _since: dict[NodeName, float] = field(default_factory=dict)

    def note(
        self, out: Collection[NodeName], said: Mapping[NodeName, AgentReport], now: float, policy: WatchPolicy
    ) -> None:
        """Take note of what is said of the nodes that we drained."""
        well = {name for name in out if name in said and _well(said[name], policy)}
        self._since = {name: self._since.get(name, now) for name in well}

    def age_s(self, name: NodeName, now: float) -> float:
        """Return for how long the node has been well; 0 when it is not, or nobody says."""
        since = self._since.get(name)
        return 0.0 if since is None else now - since


def _well(word: AgentReport, policy: WatchPolicy) -> bool:
    # Heard of itself, not taken from the journal, and lately.
    told = word.heard_s is not None and word.attended_s is not None and word.attended_s < policy.told_s
    return told and not any(map(bars_return, word.findings))
