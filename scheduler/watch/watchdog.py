"""The watchdog's loop: look, judge, act, about once a second; quicker while there is suspicion or work."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.descriptors import LockHeldError, opened, try_lock
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.recovery.evidence import FORGOTTEN_S, PASSING, Remedy, Verdict
from deeplink.scheduler.recovery.judge import cut_off, is_over, judge
from deeplink.scheduler.recovery.records import Incident, IncidentKind, IncidentOutcome, incident_id
from deeplink.scheduler.watch.memory import REMEMBERED_S, Carried, ReturnedNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import NodeName
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.recovery.evidence import Snapshot, WatchPolicy
    from deeplink.scheduler.watch.actor import Actor, Bindings
    from deeplink.scheduler.watch.observer import Observer
    from deeplink.scheduler.watch.operator_actions import OperatorActor

TENSE_S = 0.5  # rounds of probes while there is suspicion
BUSY_S = 0.1  # looks at an action under way
TROUBLE_S = 60.0  # how often it is said that the journal cannot be written
THIN_S, MOST_THIN_S = 60.0, 600.0  # how often the journal forgets what is old: less often while there is work
STALL_S = 5.0  # away for longer (stopped, swapped out), we distrust every silence that we did not hear ourselves
CRASH_LOOP_S = 60.0  # a watchdog that is killed again so soon after its return is in the same incident
DOUBT_S = 3.0  # doubt about ourselves that lasts so long is an incident
PASSED_S = 5.0  # what is seen to be over for so long is
LONGEST_LINE = 1 << 16
REPEAT_S = 60.0  # a verdict that stays is said, and written, again after so long


@dataclass(slots=True, kw_only=True)
class Daemon:
    """The loop. One thread only; `tick` is one round."""

    observer: Observer
    actor: Actor | None
    journal: Journal
    policy: WatchPolicy
    clock: Clock
    metrics: WatchMetrics
    say: Callable[[str], None]
    bindings: Bindings | None = None
    operators: OperatorActor | None = None
    lock: LeaderLock | None = None
    patient: bool = True
    interval_s: float = 1.0
    _tracker: IncidentTracker = field(init=False)
    _returned_nodes: ReturnedNodes = field(init=False)
    _looked: float = field(default=float("-inf"))
    _ticked: float | None = None
    _troubled: float = field(default=float("-inf"))
    _busy: bool = False
    _asked: bool = False  # something that an operator wants is under way
    _thinned: float = field(default=float("-inf"))
    _returns: bool = False
    _absence: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._tracker = IncidentTracker(
            journal=self.journal,
            policy=self.policy,
            clock=self.clock,
            acting=self.actor is not None,
            say=self.say,
        )
        self._returned_nodes = ReturnedNodes(journal=self.journal, clock=self.clock, say=self.say)

    def run(self, pause: Callable[[float], bool]) -> None:
        """Go round until `pause` (which waits for so many seconds) says to stop: that is an end in order."""
        self._returns = True
        if self.lock and self.lock.last_unix is not None:
            self._absence = (self.lock.last_unix, self.clock.unix())
        while not pause(self.tick()):
            pass
        if self.lock and self._absence is None:
            with suppress(OSError):  # of a disk that takes no writes the journal tells
                self.lock.end()

    @property
    def busy(self) -> bool:
        """Whether an action is under way, or something is suspicious."""
        return self._busy or self.observer.tense

    @property
    def _paused(self) -> bool:
        """Whether an operator wants nothing of our own begun."""
        return self.operators is not None and bool(self.operators.paused)

    def tick(self) -> float:
        """Go round once; return how long to wait before the next."""
        # Where the journal cannot be written nothing is done: no action begins that is not on record. That is said
        # now and then, the dead man's switch stands still, and it is tried again.
        for news in self.journal.look_after(self.clock.unix()):
            self.say(news)
        try:
            self._return()
            self._sign()
            pause_s = self._round()
            self._sign()  # with what was seen in it
        except JournalError as problem:
            if problem.corrupt or not self.patient:
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
            carried = self._carried()
            self.observer.take_over(carried, nodes)
            if self.actor and carried:
                self.actor.take_over(carried.since_unix)
            self._tracker.begin()
            self._returned_nodes.begin()
            self._returns = False
        if self._absence is not None:
            self._tracker.miss(*self._absence)
            self._absence = None

    def _carried(self) -> Carried | None:
        """Return what the watchdog before us saw, where it was ended too short a time ago to miss anything."""
        # In a crash loop nobody would ever have listened for long enough to act.
        if self._absence is None or self.lock is None or self.lock.carried is None:
            return None
        last, now = self._absence
        return self.lock.carried if 0.0 <= now - last < STALL_S else None

    def _sign(self) -> None:
        """Leave word that we watch; until an absence is on record the one before us has the last word."""
        if self.lock and self._absence is None:
            with suppress(OSError):
                self.lock.watch(self.observer.carry())

    def _round(self) -> float:
        began = self.clock.monotonic()
        if self._ticked is not None and began - self._ticked > STALL_S:
            self.say(f"the watchdog was paused for {began - self._ticked:.0f} s: silence is measured from now on")
            self.observer.forgive()
            if self.actor:
                self.actor.forgive()
        if self.operators:
            self.operators.take_up()  # before the first look: it may have been paused before it was started again
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
        if self._busy or self._asked:
            return BUSY_S
        return max(0.02, (TENSE_S if self.observer.tense else self.interval_s) - (self._ticked - began))

    def _work(self) -> None:
        self._asked = self.operators is not None and self.operators.work()
        # While Slurm does not answer nothing is known of which nodes there are, and no command would work.
        if self.actor and not self.observer.cluster.problem:
            self._busy = self.actor.work()
        if self.bindings:
            (self.bindings.unable if self.observer.cluster.problem or self._paused else self.bindings.look)()

    def _look(self, now: float) -> None:
        self._looked = now
        if now - self.observer.cluster.at >= self.interval_s * (1 if self.observer.tense or self._busy else 2):
            self.observer.ask()
        snapshot = self.observer.look()
        verdicts = judge(snapshot, self.policy)
        if self.observer.doubted and not _doubt(verdicts):
            self.observer.trust()
            snapshot = self.observer.look()
            verdicts = judge(snapshot, self.policy)
        doubt = _doubt(verdicts)
        if doubt:
            self.observer.doubt(network=bool(cut_off(snapshot)))
        if self._tracker.hear_doubt(doubt):
            self.metrics.verdicts.labels(IncidentKind.WATCHDOG_PARTITIONED).inc()
        if not doubt:
            for verdict in verdicts:
                self._handle(verdict, snapshot)
            self._tracker.settle(snapshot, verdicts)
            self._returned_nodes.note(snapshot)
        self._close_ended(snapshot)
        self._measure(snapshot, doubted=doubt is not None)

    def _handle(self, verdict: Verdict, snapshot: Snapshot) -> None:
        if self.actor and self.actor.restarting(verdict):
            return
        incident = None
        if verdict.remedy is not Remedy.RESUME:
            below = [node.name for node in snapshot.nodes.values() if verdict.leaf and node.leaf == verdict.leaf]
            incident = self._tracker.record(verdict, below)
            node = snapshot.nodes.get(verdict.node) if verdict.node and not verdict.leaf else None
            if node:  # of several that were lost at once the incident names the first
                self._returned_nodes.lose(replace(incident, node=node.name), node.boot_id)
        acts = verdict.remedy is not Remedy.NOTHING
        paused = self._paused
        begun = self.actor is not None and acts and not paused and self.actor.begin(verdict, incident)
        self._busy = self._busy or begun
        if self._tracker.is_new(verdict) or begun:
            self.metrics.verdicts.labels(verdict.kind).inc()
            what = f"would {verdict.remedy}" if acts and (paused or not self.actor) else verdict.remedy
            about = " of ".join(filter(None, (verdict.node, verdict.leaf)))
            who = f"job {self.observer.called(verdict.attempt.job)}: " if verdict.attempt else ""
            self.say(f"{who}{verdict.kind} {about}: {what}: {'; '.join(verdict.reasons)}")

    def _close_ended(self, snapshot: Snapshot) -> None:
        for job in snapshot.jobs:
            if job.state is not None and job.state.final:
                ended_well = job.state.value == "COMPLETED"
                self._close(job.attempt.job, IncidentOutcome.RECOVERED if ended_well else IncidentOutcome.FAILED)
        for number in self.observer.vanished():
            self._close(number, IncidentOutcome.FAILED)

    def _close(self, job: int, outcome: IncidentOutcome) -> None:
        self._tracker.close(job, outcome)
        self.observer.heartbeats.forget(job)

    def _measure(self, snapshot: Snapshot, *, doubted: bool) -> None:
        self.metrics.in_doubt.set(doubted)
        self.metrics.incidents_open.set(self.observer.memory.open_incidents())
        if not snapshot.controller:
            self.metrics.slurm_failures.inc()
        self.metrics.jobs.clear()
        for phase, count in Counter(job.phase.value for job in snapshot.jobs).items():
            self.metrics.jobs.labels(phase).set(count)
        for answer, count in self.observer.probes.items():
            self.metrics.probes.labels(answer.value).inc(count)
        self.observer.probes.clear()


def _doubt(verdicts: Iterable[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.kind is IncidentKind.WATCHDOG_PARTITIONED), None)


# Verdicts as incidents on record, which end when their cause has passed.


@dataclass(slots=True)
class _Standing:
    """A verdict whose open incident may pass by itself."""

    incident: str  # its id: what comes again has another
    verdict: Verdict
    over_since: float | None = None


def _verdict_of(hit: Incident) -> Verdict | None:
    """Return the verdict whose incident this is, as far as it may pass; None where it is none of ours."""
    base = hit.id.partition("@")[0]
    try:
        kind = IncidentKind(hit.kind)
    except ValueError:  # of a newer launcher
        return None
    leaf = base.partition(f"-{IncidentKind.SWITCH_SUSPECT}-")[2]
    verdict = Verdict(kind=kind, remedy=Remedy.NOTHING, reasons=(), attempt=hit.attempt, node=hit.node, leaf=leaf)
    return verdict if verdict.incident == base and verdict.passes else None


@dataclass(slots=True, kw_only=True)
class IncidentTracker:
    """Keeps the incidents of the watchdog's own verdicts. One thread only."""

    journal: Journal
    policy: WatchPolicy
    clock: Clock
    acting: bool
    say: Callable[[str], None]
    _told: dict[str, float] = field(default_factory=dict)
    _standing: dict[str, _Standing] = field(default_factory=dict)
    _doubt_since: float | None = None
    _doubt: str = ""

    def begin(self) -> None:
        """Take over what is open: whoever led before us saw it begin."""
        for hit in self.journal.incidents(only_open=True):
            if verdict := _verdict_of(hit):
                self._standing[verdict.incident] = _Standing(hit.id, verdict)
            elif hit.id.startswith("cluster-") and hit.attempt is None:
                self._end(hit.id, 0.0)  # that one's doubt of itself, or what no one judges any more

    def miss(self, since_unix: float, until_unix: float) -> None:
        """Note that whoever led before us did not end in order, and no one watched until we began."""
        began = min(since_unix, until_unix)
        evidence = (
            "the watchdog that led before did not end in order (killed, out of memory, its host gone?): "
            f"nobody watched for {until_unix - began:.1f} s"
        )
        before = next(iter(self.journal.incidents(kind=IncidentKind.WATCHDOG_AWAY, limit=1)), None)
        if before and before.timeline and 0.0 <= began - before.timeline[-1].unix < CRASH_LOOP_S:
            self.journal.record_moment(before.id, until_unix, f"again: {evidence}")  # a crash loop is one incident
        else:
            self.journal.record_incident(
                Incident(
                    id=incident_id(None, IncidentKind.WATCHDOG_AWAY, f"{began:.0f}"),
                    kind=IncidentKind.WATCHDOG_AWAY,
                    evidence=evidence,
                    began_unix=began,
                    detected_unix=until_unix,
                    recovered_unix=until_unix,
                    outcome=IncidentOutcome.RECOVERED,
                )
            )
        self.say(f"{IncidentKind.WATCHDOG_AWAY}: {evidence}")

    def is_new(self, verdict: Verdict) -> bool:
        """Whether the verdict has not been told within the last minute; from now on it has."""
        fresh = verdict.key not in self._told
        self._told[verdict.key] = self.clock.monotonic()
        return fresh

    def record(self, verdict: Verdict, below: Collection[NodeName] = ()) -> Incident:
        """Return the incident a verdict belongs to, written down where that says something new."""
        standing = self._standing.get(verdict.incident)
        known = self.journal.newest_incident(standing.incident if standing else verdict.incident)
        if known is None and verdict.kind is IncidentKind.REQUEUE_HELD:
            known = self._cause_of_hold(verdict)
        is_over = known is not None and known.outcome is IncidentOutcome.RECOVERED
        begins = verdict.incident_kind in PASSING and standing is None
        # What ends an attempt that is still there is not what was over before.
        if known and not begins and (verdict.key in self._told or (is_over and not verdict.ends)):
            return known
        now = self.clock.unix()
        began = now - verdict.since_s
        if known and known.kind == IncidentKind.WATCHDOG_PARTITIONED:
            began = known.began_unix  # a part of that
        elif known and is_over:
            began = max(began, known.recovered_unix + 1e-3)  # also where the clock was set back
        idle = self.acting or verdict.remedy is Remedy.NOTHING
        would = "" if idle else f"; observed only, would {verdict.remedy}"
        kept = self.journal.record_incident(
            Incident(
                id=known.id if known else verdict.incident,
                kind=verdict.incident_kind,
                node=None if verdict.leaf else verdict.node,
                attempt=verdict.attempt,
                evidence="; ".join(verdict.reasons) + would,
                began_unix=began,
                detected_unix=now,
            ),
            below,
        )
        if verdict.passes:
            self._standing[verdict.incident] = _Standing(kept.id, verdict)
        return kept

    def _cause_of_hold(self, verdict: Verdict) -> Incident | None:
        """Return what made Slurm put a job back: on record for its attempt, or a controller that was cut off."""
        job = verdict.attempt.job if verdict.attempt else None
        theirs = [one for one in self.journal.incidents(job=job, limit=16) if one.attempt == verdict.attempt]
        since_unix = self.clock.unix() - FORGOTTEN_S
        doubts = self.journal.incidents(kind=IncidentKind.WATCHDOG_PARTITIONED, limit=1)
        return next(iter([*theirs, *(one for one in doubts if one.recovered_unix >= since_unix)]), None)

    def settle(self, snapshot: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Close what is over: of these verdicts, reached just now, nothing is."""
        now = self.clock.monotonic()
        self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_S}
        judged = {verdict.incident for verdict in verdicts}
        newest = {job.attempt for job in snapshot.jobs}
        for base, standing in list(self._standing.items()):
            if standing.verdict.ends and standing.verdict.attempt not in newest:
                del self._standing[base]  # it has ended
                continue
            over = base not in judged and is_over(standing.verdict, snapshot, self.policy)
            standing.over_since = (standing.over_since or now) if over else None
            if standing.over_since is not None and now - standing.over_since >= PASSED_S:
                del self._standing[base]
                self._end(standing.incident, now - standing.over_since)

    def _end(self, name: str, ago_s: float) -> None:
        known = self.journal.incident(name)
        if known and known.outcome is IncidentOutcome.OPEN:
            ended = max(self.clock.unix() - ago_s, known.detected_unix)
            self.journal.record_incident(replace(known, outcome=IncidentOutcome.RECOVERED, recovered_unix=ended))
            self.say(f"{name}: over after {ended - known.began_unix:.1f} s")

    def hear_doubt(self, doubt: Verdict | None) -> bool:
        """Note whether we doubt ourselves now; return whether that has just begun."""
        now = self.clock.monotonic()
        begun = doubt is not None and self._doubt_since is None
        if doubt and self._doubt_since is None:
            self._doubt_since = now
            self.say(f"{doubt.kind}: touching nothing: {'; '.join(doubt.reasons)}")
        if doubt and not self._doubt and self._doubt_since is not None and now - self._doubt_since >= DOUBT_S:
            unix = self.clock.unix()
            self._doubt = self.journal.record_incident(
                Incident(
                    id=doubt.incident,
                    kind=doubt.kind,
                    evidence="; ".join(doubt.reasons),
                    began_unix=unix - (now - self._doubt_since),
                    detected_unix=unix,
                )
            ).id
        if not doubt and self._doubt_since is not None:
            if self._doubt:
                self._end(self._doubt, 0.0)
            else:
                self.say(f"{IncidentKind.WATCHDOG_PARTITIONED}: over after {now - self._doubt_since:.1f} s")
            self._doubt_since, self._doubt = None, ""
        return begun

    def close(self, job: int, outcome: IncidentOutcome) -> None:
        """Give every open incident of a job its end: the job's own."""
        self.journal.close_incidents(job, outcome, self.clock.unix())


# A lock so that one watchdog leads per journal; it also tells whether the last leader ended or was killed.


@dataclass(slots=True, kw_only=True)
class LeaderLock:
    """The place of the one watchdog that leads."""

    last_unix: float | None = None  # the newest round of the leader before, where that did not end in order
    carried: Carried | None = None  # what that one saw; None where it left no word of it
    _file: int
    _lasts: bool = False

    def watch(self, seen: Carried) -> None:
        """Note a round, so that whoever leads next knows since when no one did, and what was seen until then."""
        # Two system calls; the first round waits for the disk.
        line = json.dumps(asdict(seen)).encode()
        os.pwrite(self._file, line, 0)
        os.ftruncate(self._file, len(line))
        if not self._lasts:
            os.fsync(self._file)
            self._lasts = True

    def end(self) -> None:
        """Say that this watchdog ends in order."""
        os.ftruncate(self._file, 0)
        os.fsync(self._file)


@contextmanager
def leading(journal: Path) -> Iterator[LeaderLock]:
    """Be the only watchdog with this journal, until the block ends; a killed leader's place is free at once."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    path = journal.with_name(journal.name + ".lock")
    with opened(path, os.O_RDWR | os.O_CREAT, 0o644) as descriptor:
        if not try_lock(descriptor):
            remedy = "One leads; this one waits, or give it a journal of its own."
            raise LockHeldError(f"another watchdog holds {path}", remedy=remedy)
        left = os.pread(descriptor, LONGEST_LINE, 0)
        carried, last_unix = None, os.fstat(descriptor).st_mtime if left else None
        with suppress(ValueError, TypeError):  # half of it was written, or somebody else did, or an older watchdog
            carried = Carried(**json.loads(left))
            last_unix = carried.unix
        yield LeaderLock(last_unix=last_unix, carried=carried, _file=descriptor)
