"""The watchdog's loop: look, judge, act, about once a second; quicker while there is suspicion or work."""

from __future__ import annotations

import fcntl
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.act import action_word
from deeplink.scheduler.watch.evidence import tense
from deeplink.scheduler.watch.judge import judge
from deeplink.scheduler.watch.records import Incident, Kind, Outcome, incident_id
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.watch.act import Actor
    from deeplink.scheduler.watch.evidence import Policy, Sight
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.verdict import Verdict

log = logging.getLogger(__name__)

TENSE_S = 0.5
"""Rounds of probes while there is suspicion."""
BUSY_S = 0.1
"""Looks at an action under way."""
STALL_S = 5.0
"""Away for longer (stopped, swapped out), we distrust every silence that we did not hear ourselves."""
DOUBT_S = 3.0
"""Doubt about ourselves that lasts so long is an incident."""


class LeaderError(DeepLinkError):
    """Another watchdog leads with this journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"another watchdog holds {path}", remedy="One leads; this one waits, or give it a journal of its own."
        )
        self.path = path


@contextmanager
def leading(journal: Path) -> Iterator[None]:
    """Be the only watchdog with this journal, until the end of the block; a killed leader's place is free at once.

    Raises:
        LeaderError: another process is.
        OSError: the lock file cannot be made.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    path = journal.with_name(journal.name + ".lock")
    with path.open("w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as taken:
            raise LeaderError(path) from taken
        yield


@dataclass(slots=True, kw_only=True)
class Daemon:
    """The loop. One thread only; `tick` is one round.

    Args:
        actor: the hands; None to observe only: then verdicts are told and recorded, and nothing is done.
        say: told one line for each decision.
    """

    observer: Observer
    actor: Actor | None
    journal: Journal
    policy: Policy
    clock: Clock
    metrics: WatchMetrics
    say: Callable[[str], None]
    interval_s: float = 1.0
    _told: dict[str, float] = field(default_factory=dict)
    _looked: float = field(default=float("-inf"))
    _ticked: float | None = None
    _busy: bool = False
    _tense: bool = False
    _doubt_since: float | None = None
    _doubt: str = ""

    def run(self, pause: Callable[[float], bool]) -> None:
        """Go round until `pause` (which waits for so many seconds) says to stop."""
        self.observer.book.restore(self.journal.jobs(), self.clock.monotonic())
        self._close_doubts()
        while not pause(self.tick()):
            pass

    @property
    def busy(self) -> bool:
        """Whether an action is under way, or something is suspicious."""
        return self._busy or self._tense

    def tick(self) -> float:
        """Go round once; return how long to wait before the next."""
        began = self.clock.monotonic()
        if self._ticked is not None and began - self._ticked > STALL_S:
            self.say(f"away for {began - self._ticked:.0f} s: every silence counts anew")
            self.observer.forgive()
        if self._busy and self.actor:
            self._busy = self.actor.work()  # first: a look may take half a second
        if not self._busy or began - self._looked >= self.interval_s:
            self._look(began)
            if self.actor:
                self._busy = self.actor.work()
        self._ticked = self.clock.monotonic()
        self.metrics.loop_time.set(self.clock.unix())
        self.metrics.loop_seconds.observe(self._ticked - began)
        if self._busy:
            return BUSY_S
        return max(0.02, (TENSE_S if self._tense else self.interval_s) - (self._ticked - began))

    def _look(self, now: float) -> None:
        self._looked = now
        if now - self.observer.cluster.at >= self.interval_s * (1 if self._tense or self._busy else 2):
            self.observer.ask()
        sight = self.observer.look()
        self._tense = bool(tense(sight.jobs, self.policy))
        verdicts = judge(sight, self.policy)
        self._hear_doubt(verdicts)
        for verdict in verdicts:
            if verdict.kind is not Kind.SELF_IN_DOUBT:
                self._handle(verdict)
        self._told = {key: at for key, at in self._told.items() if now - at < 60.0}  # noqa: PLR2004 - told again after a minute
        self._close_ended(sight)
        self._measure(sight, verdicts)

    def _handle(self, verdict: Verdict) -> None:
        if self.actor and self.actor.restarting(verdict):
            return
        incident = None if verdict.remedy is Remedy.RESUME else self._record(verdict)
        begun = (
            self.actor.begin(verdict, incident) if self.actor and verdict.remedy is not Remedy.NOTHING else False
        )
        self._busy = self._busy or begun
        if begun or verdict.key not in self._told:
            self.metrics.verdicts.labels(verdict.kind).inc()
            what = verdict.remedy if self.actor or verdict.remedy is Remedy.NOTHING else f"would {verdict.remedy}"
            about = verdict.node or verdict.leaf
            who = f"job {verdict.attempt.job}: " if verdict.attempt else ""
            self.say(f"{who}{verdict.kind} {about}: {what}: {'; '.join(verdict.reasons)}")
        self._told[verdict.key] = self.clock.monotonic()

    def _record(self, verdict: Verdict) -> Incident:
        known = self._known(verdict)
        if known and (
            verdict.key in self._told or known.outcome is Outcome.RECOVERED or verdict.kind is Kind.REQUEUE_HELD
        ):
            return known
        now = self.clock.unix()
        would = "" if self.actor else f"; observed only, would {verdict.remedy}"
        return self.journal.record_incident(
            Incident(
                id=verdict.incident,
                kind=Kind.NODE_DEAD if verdict.node else verdict.kind,
                node=verdict.node,
                attempt=verdict.attempt,
                action=action_word(Remedy.NOTHING),
                evidence="; ".join(verdict.reasons) + would,
                began_unix=now - verdict.since_s,
                detected_unix=now,
            )
        )

    def _known(self, verdict: Verdict) -> Incident | None:
        if verdict.kind is Kind.REQUEUE_HELD and verdict.attempt:
            # What made Slurm requeue it is on record; being held is a part of that.
            recent = self.journal.incidents(job=verdict.attempt.job, limit=16)
            return next((hit for hit in recent if hit.attempt == verdict.attempt), None)
        return self.journal.incident(verdict.incident)

    def _hear_doubt(self, verdicts: tuple[Verdict, ...]) -> None:
        doubt = next((verdict for verdict in verdicts if verdict.kind is Kind.SELF_IN_DOUBT), None)
        now = self.clock.monotonic()
        if doubt and self._doubt_since is None:
            self._doubt_since = now
            self.metrics.verdicts.labels(doubt.kind).inc()
            self.say(f"{doubt.kind}: touching nothing: {'; '.join(doubt.reasons)}")
        if doubt and not self._doubt and self._doubt_since is not None and now - self._doubt_since >= DOUBT_S:
            began = self.clock.unix() - (now - self._doubt_since)
            self._doubt = incident_id(None, Kind.SELF_IN_DOUBT, f"{began:.0f}")
            self.journal.record_incident(self._doubted(began, "; ".join(doubt.reasons)))
        if not doubt and self._doubt_since is not None:
            self.say(f"{Kind.SELF_IN_DOUBT}: over after {now - self._doubt_since:.1f} s")
            known = self.journal.incident(self._doubt) if self._doubt else None
            if known:
                over = self._doubted(known.began_unix, known.evidence, recovered_unix=self.clock.unix())
                self.journal.record_incident(over)
            self._doubt_since, self._doubt = None, ""

    def _doubted(self, began: float, evidence: str, recovered_unix: float = 0.0) -> Incident:
        return Incident(
            id=self._doubt,
            kind=Kind.SELF_IN_DOUBT,
            evidence=evidence,
            began_unix=began,
            detected_unix=began + DOUBT_S,
            recovered_unix=recovered_unix,
            outcome=Outcome.RECOVERED if recovered_unix else Outcome.OPEN,
        )

    def _close_doubts(self) -> None:
        # Whoever led before us was ended in doubt of himself: that is over; ours, if any, is another incident.
        for hit in self.journal.incidents(only_open=True):
            if hit.kind == Kind.SELF_IN_DOUBT:
                over = replace(hit, outcome=Outcome.RECOVERED, recovered_unix=self.clock.unix())
                self.journal.record_incident(over)

    def _close_ended(self, sight: Sight) -> None:
        for job in sight.jobs:
            if job.state is not None and job.state.final:
                ended_well = job.state.value == "COMPLETED"
                self._close(job.attempt.job, Outcome.RECOVERED if ended_well else Outcome.FAILED)
        for number in self.observer.vanished():
            self._close(number, Outcome.FAILED)

    def _close(self, job: int, outcome: Outcome) -> None:
        self.journal.close_incidents(job, outcome)
        self.observer.book.forget(job)

    def _measure(self, sight: Sight, verdicts: tuple[Verdict, ...]) -> None:
        self.metrics.in_doubt.set(any(verdict.kind is Kind.SELF_IN_DOUBT for verdict in verdicts))
        self.metrics.incidents_open.set(len(self.journal.incidents(only_open=True)))
        if not sight.controller:
            self.metrics.slurm_failures.inc()
        self.metrics.jobs.clear()
        for job in sight.jobs:
            self.metrics.jobs.labels(job.phase.value).inc()
        for answer, count in self.observer.probes.items():
            self.metrics.probes.labels(answer.value).inc(count)
        self.observer.probes.clear()
