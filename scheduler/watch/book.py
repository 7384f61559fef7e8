"""What launchers said last, with when we heard it by our own clock. Filled by the server, read by the loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.records import Beat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.watch.records import AttemptRecord, JobRecord

MOST_JOBS = 10_000
ALARM_S = 0.6
"""An agent silent for so long is reason to look at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The newest beat of one job.

    Attributes:
        heard_at: when it came, monotonic; or when we came back, after an absence of ours.
        ourselves: it came since.
        step: the greatest step of its attempt so far; None before the first report.
        progressed_at: when that step came, monotonic.
    """

    beat: Beat
    heard_at: float
    ourselves: bool = True
    step: int | None = None
    progressed_at: float = 0.0


class BeatBook:
    """The newest beat of each job. Thread-safe, bounded: beyond 10,000 jobs the one heard longest ago goes.

    Attributes:
        alarm: set when a beat gives reason to look at once; whoever looks clears it.
    """

    def __init__(self, alarm: threading.Event | None = None) -> None:
        self.alarm = alarm or threading.Event()
        self._lock = threading.Lock()
        self._heard: dict[int, Heard] = {}

    def hear(self, beat: Beat, now: float) -> bool:
        """Take note of a beat; False if a newer attempt of its job has beaten before, so that it says nothing."""
        job = beat.attempt.job
        with self._lock:
            before = self._heard.get(job)
            if before and before.beat.attempt > beat.attempt:
                return False
            same = before if before and before.beat.attempt == beat.attempt else None
            step, progressed_at = (same.step, same.progressed_at) if same else (None, 0.0)
            steps = [point.step for point in beat.progress if point.attempt == beat.attempt]
            if steps and (step is None or max(steps) > step):
                step, progressed_at = max(steps), now
            # Newest last, so that the first is the one to forget.
            self._heard.pop(job, None)
            self._heard[job] = Heard(beat=beat, heard_at=now, step=step, progressed_at=progressed_at)
            if len(self._heard) > MOST_JOBS:
                del self._heard[next(iter(self._heard))]
        news = before is None or before.beat.phase is not beat.phase
        if news or any(node.silent_s >= ALARM_S for node in beat.node_beats):
            self.alarm.set()
        return True

    def restore(self, jobs: Iterable[JobRecord], now: float) -> None:
        """Begin with the jobs of the journal, as if each had just been heard: silence counts from our return."""
        with self._lock:
            for job in jobs:
                if not job.newest.phase.ended and job.job not in self._heard:
                    self._heard[job.job] = _restored(job, job.newest, now)

    def forgive(self, now: float) -> None:
        """Let every silence begin anew: it was we who were away."""
        with self._lock:
            self._heard = {
                job: replace(heard, heard_at=now, ourselves=False, progressed_at=now)
                for job, heard in self._heard.items()
            }

    def forget(self, job: int) -> None:
        """Drop a job that Slurm has forgotten."""
        with self._lock:
            self._heard.pop(job, None)

    def all(self) -> tuple[Heard, ...]:
        """Return the newest beat of every job."""
        with self._lock:
            return tuple(self._heard.values())


def _restored(job: JobRecord, attempt: AttemptRecord, now: float) -> Heard:
    beat = Beat(
        attempt=attempt.attempt,
        phase=attempt.phase,
        user=job.user,
        job_name=job.name,
        nodes=attempt.nodes,
        spares=attempt.spares,
        world_size=attempt.world_size,
        step_timeout_s=attempt.step_timeout_s,
    )
    return Heard(beat=beat, heard_at=now, ourselves=False, step=attempt.last_step, progressed_at=now)
