"""The newest heartbeats of launchers and standing agents, with the time of receipt by the watchdog's clock.

Filled by the server, read by the loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Beat, HealthSeverity, Phase
from deeplink.scheduler.watch.watchdog_outages import WatchdogOutages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.watch.records import AttemptRecord, JobRecord, NodeRecord
    from deeplink.types import NodeName

MOST_JOBS = 10_000
MOST_NODES = 16_384
KEEP_S = 30.0
"""What a standing agent says again and again is written down no more often than this."""
ALARM_S = 0.6
"""An agent silent for so long is reason to look at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHeartbeat:
    """The newest beat of one job.

    Attributes:
        heard_at: when it came, monotonic; or when we came back, after an absence of ours.
        ourselves: it came since.
        missed_s: how long before we came back it came; 0 where it came since.
        step: the greatest step of its attempt so far; None before the first report.
        progressed_at: when that step came, monotonic.
        boots: the kernels of its nodes, as first told in this attempt.
        tellings: beats of this attempt that told of incidents.
    """

    beat: Beat
    heard_at: float
    ourselves: bool = True
    missed_s: float = 0.0
    step: int | None = None
    progressed_at: float = 0.0
    boots: Mapping[NodeName, str] = field(default_factory=dict)
    tellings: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeartbeat:
    """The newest word of one standing agent.

    Attributes:
        heard_at: when it came, monotonic; or when we came back, after an absence of ours.
        ourselves: it came since; else it is from the journal, and says nothing of how the node is now.
        kept_at: when its word was last written down, monotonic.
    """

    node: NodeRecord
    heard_at: float
    ourselves: bool = True
    kept_at: float = 0.0


class HeartbeatTable:
    """The newest beat of each job, and the newest word of each standing agent. Thread-safe, bounded.

    Beyond 10,000 jobs, or 16,384 agents, the one heard longest ago goes.

    Attributes:
        alarm: set when a beat gives reason to look at once; whoever looks clears it.
    """

    def __init__(self, alarm: threading.Event | None = None) -> None:
        self.alarm = alarm or threading.Event()
        self._lock = threading.Lock()
        self._heard: dict[int, LauncherHeartbeat] = {}
        self._attended: dict[NodeName, AgentHeartbeat] = {}
        self._deaf = WatchdogOutages()

    def deafen(self, now: float) -> None:
        """Take note that at this moment it may be we who hear nobody."""
        with self._lock:
            self._deaf.note(now)

    def trust(self, now: float) -> None:
        """Take note that we hear again, from this moment on."""
        with self._lock:
            self._deaf.end(now)

    def deaf_s(self, since: float, now: float) -> float:
        """Return for how many seconds between two moments it may have been we who heard nobody."""
        with self._lock:
            return self._deaf.within(since, now)

    def hear(self, beat: Beat, now: float, *, kept: bool = True) -> bool:
        """Take note of a beat; False if it says nothing: a newer attempt of its job, or a newer beat, was heard.

        Args:
            beat: what the launcher says.
            now: when it came, monotonic.
            kept: it was written down; else its launcher is not stranded yet: whom it blames is not on record.
        """
        job = beat.attempt.job
        if not kept:
            beat = replace(beat, phase=_unkept(beat.phase))
        with self._lock:
            before = self._heard.get(job)
            if before and before.beat.attempt > beat.attempt:
                return False
            same = before if before and before.beat.attempt == beat.attempt else None
            if same and same.ourselves and same.heard_at > now:
                self._heard[job] = replace(same, tellings=same.tellings + bool(beat.incidents))
                return False
            step, progressed_at = (same.step, same.progressed_at) if same else (None, 0.0)
            boots = dict(same.boots) if same else {}
            for node in beat.node_beats:
                if node.boot_id:
                    boots.setdefault(node.name, node.boot_id)
            steps = [point.step for point in beat.progress if point.attempt == beat.attempt]
            if steps and (step is None or max(steps) > step):
                step, progressed_at = max(steps), now
            # Newest last, so that the first is the one to forget.
            self._heard.pop(job, None)
            self._heard[job] = LauncherHeartbeat(
                beat=beat,
                heard_at=now,
                step=step,
                progressed_at=progressed_at,
                boots=boots,
                tellings=(same.tellings if same else 0) + bool(beat.incidents),
            )
            if len(self._heard) > MOST_JOBS:
                del self._heard[next(iter(self._heard))]
        news = before is None or before.beat.phase is not beat.phase
        if news or any(node.silent_s >= ALARM_S for node in beat.node_beats):
            self.alarm.set()
        return True

    def is_news(self, node: NodeRecord, now: float) -> bool:
        """Return whether a standing agent says something that is to be written down."""
        with self._lock:
            before = self._attended.get(node.name)
        return before is None or now - before.kept_at >= KEEP_S or _essence(before.node) != _essence(node)

    def attend(self, node: NodeRecord, now: float, *, kept: bool, failed: bool = False) -> None:
        """Take note of what a standing agent said of its node.

        Args:
            node: what it said.
            now: monotonic.
            kept: it was written down.
            failed: it could not be: said again, it is news.
        """
        with self._lock:
            before = self._attended.pop(node.name, None)
            kept_at = now if kept or before is None else before.kept_at
            kept_at = float("-inf") if failed else kept_at
            self._attended[node.name] = AgentHeartbeat(node=node, heard_at=now, kept_at=kept_at)
            if len(self._attended) > MOST_NODES:
                del self._attended[next(iter(self._attended))]
        news = before is None or before.node.boot_id != node.boot_id or before.node.health != node.health
        if news and any(finding.severity is HealthSeverity.DRAIN for finding in node.health):
            self.alarm.set()
        if before is not None and before.node.boot_id != node.boot_id:
            self.alarm.set()

    def restore(
        self, jobs: Iterable[JobRecord], now: float, unix: float, nodes: Iterable[NodeRecord] = ()
    ) -> None:
        """Begin with the journal's jobs and nodes as if each was just heard: silence counts from our return.

        Args:
            jobs: the journal's.
            now: monotonic.
            unix: the same moment in seconds since 1970.
            nodes: the journal's.
        """
        with self._lock:
            for node in nodes:
                if not node.job and node.name not in self._attended:
                    self._attended[node.name] = AgentHeartbeat(
                        node=node, heard_at=now, ourselves=False, kept_at=now
                    )
            for job in jobs:
                if not job.newest.phase.ended and job.job not in self._heard:
                    self._heard[job.job] = _restored(job, job.newest, now, unix)

    def forgive(self, now: float) -> None:
        """Let every silence begin anew: it was we who were away."""
        with self._lock:
            self._heard = {
                job: replace(
                    heard,
                    heard_at=now,
                    ourselves=False,
                    missed_s=heard.missed_s + now - heard.heard_at,
                    progressed_at=now,
                )
                for job, heard in self._heard.items()
            }
            self._attended = {
                name: replace(one, heard_at=now, ourselves=False) for name, one in self._attended.items()
            }

    def forget(self, job: int) -> None:
        """Drop a job that Slurm has forgotten."""
        with self._lock:
            self._heard.pop(job, None)

    def of(self, job: int) -> LauncherHeartbeat | None:
        """Return the newest beat of a job; None where it never beat."""
        with self._lock:
            return self._heard.get(job)

    def all(self) -> tuple[LauncherHeartbeat, ...]:
        """Return the newest beat of every job."""
        with self._lock:
            return tuple(self._heard.values())

    def attended(self) -> tuple[AgentHeartbeat, ...]:
        """Return the newest word of every standing agent."""
        with self._lock:
            return tuple(self._attended.values())


def _unkept(phase: Phase) -> Phase:
    return Phase.RECOVERING if phase is Phase.STRANDED else phase


def _essence(node: NodeRecord) -> tuple[object, ...]:
    return node.topology_address, node.health, node.boot_id, node.shards, node.verified_bytes


def _restored(job: JobRecord, attempt: AttemptRecord, now: float, unix: float) -> LauncherHeartbeat:
    beat = Beat(
        attempt=attempt.attempt,
        phase=attempt.phase,
        user=job.user,
        job_name=job.name,
        job_label=job.label,
        nodes=attempt.nodes,
        spares=attempt.spares,
        world_size=attempt.world_size,
        step_timeout_s=attempt.step_timeout_s,
    )
    return LauncherHeartbeat(
        beat=beat,
        heard_at=now,
        ourselves=False,
        missed_s=max(0.0, unix - attempt.beat_unix),
        step=attempt.last_step,
        progressed_at=now,
    )
