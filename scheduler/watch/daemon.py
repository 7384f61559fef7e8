"""The watchdog's loop: look, judge, act, about once a second; quicker while there is suspicion or work."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.incident_tracker import IncidentTracker
from deeplink.scheduler.watch.journal import JournalCorruptError, JournalError
from deeplink.scheduler.watch.judge import judge
from deeplink.scheduler.watch.records import IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.returned_nodes import REMEMBERED_S, ReturnedNodes
from deeplink.scheduler.watch.rules.doubts import cut_off, unheard
from deeplink.scheduler.watch.verdict import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.watch.actor import Actor
    from deeplink.scheduler.watch.bindings import Bindings
    from deeplink.scheduler.watch.evidence import Snapshot, WatchPolicy
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.leader_lock import LeaderLock
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.verdict import Verdict

log = logging.getLogger(__name__)

TENSE_S = 0.5
"""Rounds of probes while there is suspicion."""
BUSY_S = 0.1
"""Looks at an action under way."""
TROUBLE_S = 60.0
"""How often it is said that the journal cannot be written."""
THIN_S, MOST_THIN_S = 60.0, 600.0
"""How often the journal forgets some of what is old: thousands of jobs a day. Less often while there is work."""
STALL_S = 5.0
"""Away for longer (stopped, swapped out), we distrust every silence that we did not hear ourselves."""


@dataclass(slots=True, kw_only=True)
class Daemon:
    """The loop. One thread only; `tick` is one round.

    Args:
        actor: the hands; None to observe only: then verdicts are told and recorded, and nothing is done.
        bindings: takes nodes wished by name off waiting jobs; None to observe only.
        lead: our place among those with this journal; None where nobody would miss us.
        patient: a journal that cannot be written is waited for; else it is an error.
        say: told one line for each decision.
    """

    observer: Observer
    actor: Actor | None
    journal: Journal
    policy: WatchPolicy
    clock: Clock
    metrics: WatchMetrics
    say: Callable[[str], None]
    bindings: Bindings | None = None
    lead: LeaderLock | None = None
    patient: bool = True
    interval_s: float = 1.0
    _ledger: IncidentTracker = field(init=False)
    _comebacks: ReturnedNodes = field(init=False)
    _looked: float = field(default=float("-inf"))
    _ticked: float | None = None
    _troubled: float = field(default=float("-inf"))
    _busy: bool = False
    _thinned: float = field(default=float("-inf"))
    _returns: bool = False
    _absence: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Keep the incidents of our verdicts."""
        self._ledger = IncidentTracker(
            journal=self.journal,
            recall=self.observer.recall,
            policy=self.policy,
            clock=self.clock,
            acting=self.actor is not None,
            say=self.say,
        )
        self._comebacks = ReturnedNodes(journal=self.journal, clock=self.clock, say=self.say)

    def run(self, pause: Callable[[float], bool]) -> None:
        """Go round until `pause` (which waits for so many seconds) says to stop: that is an end in order."""
        self._returns = True
        if self.lead and self.lead.last_unix is not None:
            self._absence = (self.lead.last_unix, self.clock.unix())
        while not pause(self.tick()):
            pass
        if self.lead and self._absence is None:
            with suppress(OSError):  # of a disk that takes no writes the journal tells
                self.lead.end()

    @property
    def busy(self) -> bool:
        """Whether an action is under way, or something is suspicious."""
        return self._busy or self.observer.tense

    def tick(self) -> float:
        """Go round once; return how long to wait before the next.

        Where the journal cannot be written nothing is done: no action begins that is not on record. That is said
        now and then, the dead man's switch stands still, and it is tried again.

        Raises:
            JournalCorruptError: the journal is damaged.
            JournalError: it cannot be written, and we are not `patient`.
        """
        try:
            self._return()
            self._sign()
            pause_s = self._round()
        except JournalCorruptError:
            raise
        except JournalError as problem:
            if not self.patient:
                raise
            self._sign()
            self._ticked = now = self.clock.monotonic()
            if now - self._troubled >= TROUBLE_S:
                self._troubled = now
                self.say(f"touching nothing: {problem}")
            return max(self.interval_s, 1.0)
        self._troubled = float("-inf")
        return pause_s

    def _return(self) -> None:
        """Take over what is on record, before the first round; again, where the journal could not be written."""
        if self._returns:
            since = self.clock.unix() - REMEMBERED_S
            nodes = [node for node in self.journal.nodes() if node.seen_unix >= since]
            self.observer.book.restore(self.journal.jobs(), self.clock.monotonic(), self.clock.unix(), nodes)
            self._ledger.begin()
            self._comebacks.begin()
            self._returns = False
        if self._absence is not None:
            self._ledger.miss(*self._absence)
            self._absence = None

    def _sign(self) -> None:
        """Leave word that we watch; until an absence is on record the one before us has the last word."""
        if self.lead and self._absence is None:
            with suppress(OSError):
                self.lead.watch(self.clock.unix())

    def _round(self) -> float:
        began = self.clock.monotonic()
        if self._ticked is not None and began - self._ticked > STALL_S:
            self.say(f"away for {began - self._ticked:.0f} s: every silence counts anew")
            self.observer.forgive()
            if self.actor:
                self.actor.forgive()
        if self._busy:
            self._work()  # first: a look may take half a second
        if not self._busy or began - self._looked >= self.interval_s:
            self._look(began)
            self._work()
        if began - self._thinned >= (MOST_THIN_S if self._busy else THIN_S):
            self._thinned = began
            self.journal.thin(self.clock.unix())
        self._ticked = self.clock.monotonic()
        self.metrics.loop_time.set(self.clock.unix())
        self.metrics.loop_seconds.observe(self._ticked - began)
        if self._busy:
            return BUSY_S
        return max(0.02, (TENSE_S if self.observer.tense else self.interval_s) - (self._ticked - began))

    def _work(self) -> None:
        # While Slurm does not answer nothing is known of which nodes there are, and no command would work.
        if self.actor and not self.observer.cluster.problem:
            before, self._busy = self._busy, self.actor.work()
            if before or self._busy:
                self.observer.acted()
        if self.bindings:
            (self.bindings.unable if self.observer.cluster.problem else self.bindings.look)()

    def _look(self, now: float) -> None:
        self._looked = now
        if now - self.observer.cluster.at >= self.interval_s * (1 if self.observer.tense or self._busy else 2):
            self.observer.ask()
        sight = self.observer.look()
        verdicts = judge(sight, self.policy)
        if self.observer.doubted and not _doubt(verdicts):
            self.observer.trust()
            sight = self.observer.look()
            verdicts = judge(sight, self.policy)
        doubt = _doubt(verdicts)
        if doubt:
            self.observer.doubt(now, network=bool(cut_off(sight)))
        elif unheard(sight, self.policy):
            self.observer.book.deafen(now)
        else:
            self.observer.book.trust(now)
        if self._ledger.hear_doubt(doubt):
            self.metrics.verdicts.labels(IncidentKind.WATCHDOG_PARTITIONED).inc()
        if not doubt:
            for verdict in verdicts:
                self._handle(self._ledger.named(verdict), sight)
            self._ledger.settle(sight, verdicts)
            self._comebacks.note(sight)
        self._close_ended(sight)
        self._measure(sight, doubted=doubt is not None)

    def _handle(self, verdict: Verdict, sight: Snapshot) -> None:
        if self.actor and self.actor.restarting(verdict):
            return
        incident = None
        if verdict.remedy is not Remedy.RESUME:
            below = [node.name for node in sight.nodes.values() if verdict.leaf and node.leaf == verdict.leaf]
            incident = self._ledger.record(verdict, below)
            if incident.node and incident.node in sight.nodes:
                self._comebacks.lose(incident, sight.nodes[incident.node].boot_id)
        begun = (
            self.actor.begin(verdict, incident) if self.actor and verdict.remedy is not Remedy.NOTHING else False
        )
        if begun:
            self._busy = True
            self.observer.acted()
        if self._ledger.is_new(verdict) or begun:
            self.metrics.verdicts.labels(verdict.kind).inc()
            what = verdict.remedy if self.actor or verdict.remedy is Remedy.NOTHING else f"would {verdict.remedy}"
            about = " of ".join(filter(None, (verdict.node, verdict.leaf)))
            who = f"job {self.observer.called(verdict.attempt.job)}: " if verdict.attempt else ""
            self.say(f"{who}{verdict.kind} {about}: {what}: {'; '.join(verdict.reasons)}")

    def _close_ended(self, sight: Snapshot) -> None:
        for job in sight.jobs:
            if job.state is not None and job.state.final:
                ended_well = job.state.value == "COMPLETED"
                self._close(job.attempt.job, IncidentOutcome.RECOVERED if ended_well else IncidentOutcome.FAILED)
        for number in self.observer.vanished():
            self._close(number, IncidentOutcome.FAILED)

    def _close(self, job: int, outcome: IncidentOutcome) -> None:
        self._ledger.close(job, outcome)
        self.observer.book.forget(job)

    def _measure(self, sight: Snapshot, *, doubted: bool) -> None:
        self.metrics.in_doubt.set(doubted)
        self.metrics.incidents_open.set(self.observer.recall.open_incidents())
        if not sight.controller:
            self.metrics.slurm_failures.inc()
        self.metrics.jobs.clear()
        for phase, count in Counter(job.phase.value for job in sight.jobs).items():
            self.metrics.jobs.labels(phase).set(count)
        for answer, count in self.observer.probes.items():
            self.metrics.probes.labels(answer.value).inc(count)
        self.observer.probes.clear()


def _doubt(verdicts: Iterable[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.kind is IncidentKind.WATCHDOG_PARTITIONED), None)
