"""The watchdog's loop: look, judge, act, about once a second; quicker while there is suspicion or work."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.descriptors import LockHeldError, opened, try_lock
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.recovery.evidence import PASSING, Remedy
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
    from deeplink.scheduler.recovery.evidence import Snapshot, Verdict, WatchPolicy
    from deeplink.scheduler.watch.actor import Actor
    from deeplink.scheduler.watch.bindings import Bindings
    from deeplink.scheduler.watch.memory import JournalCache
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
            memory=self.observer.memory,
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
            before, self._busy = self._busy, self.actor.work()
            if before or self._busy:
                self.observer.acted()
        if self.bindings:
            (self.bindings.unable if self.observer.cluster.problem else self.bindings.look)()

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
                self._handle(self._tracker.named(verdict), snapshot)
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
        paused = self.operators is not None and bool(self.operators.paused)
        begun = self.actor is not None and acts and not paused and self.actor.begin(verdict, incident)
        if begun:
            self._busy = True
            self.observer.acted()
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
class _Passing:
    """An open incident that may pass by itself."""

    episode: str
    kind: IncidentKind
    node: NodeName | None
    leaf: str
    over_since: float | None = None


@dataclass(slots=True, kw_only=True)
class IncidentTracker:
    """Keeps the incidents of the watchdog's own verdicts. One thread only."""

    journal: Journal
    memory: JournalCache
    policy: WatchPolicy
    clock: Clock
    acting: bool
    say: Callable[[str], None]
    _told: dict[str, float] = field(default_factory=dict)
    _passing: dict[str, _Passing] = field(default_factory=dict)
    _doubt_since: float | None = None
    _doubt: str = ""

    def begin(self) -> None:
        """Take over what is open: whoever led before us saw it begin."""
        for hit in self.journal.incidents(only_open=True):
            if hit.kind == IncidentKind.WATCHDOG_PARTITIONED:
                # Its watchdog was ended in doubt of itself: that is over; ours, if any, is another incident.
                self._write(replace(hit, outcome=IncidentOutcome.RECOVERED, recovered_unix=self.clock.unix()))
            base, _, episode = hit.id.rpartition("@")
            if base and hit.kind in PASSING:  # a launcher, or a newer watchdog, may have written others
                leaf = base.partition(f"-{IncidentKind.SWITCH_SUSPECT}-")[2]
                self._passing[base] = _Passing(episode, IncidentKind(hit.kind), hit.node, leaf)

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
            self._write(
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

    def named(self, verdict: Verdict) -> Verdict:
        """Return a verdict with the episode it belongs to: the open one of its kind, or a new one."""
        if verdict.family not in PASSING:
            return verdict
        known = self._passing.get(verdict.incident)
        if known:
            known.over_since = None
            return replace(verdict, episode=known.episode)
        # Also where the clock was set back: what is over is another one.
        tries = (replace(verdict, episode=str(at)) for at in itertools.count(int(self.clock.unix())))
        named = next(each for each in tries if not self.journal.incident(each.incident))
        node = None if verdict.leaf else verdict.node
        self._passing[verdict.incident] = _Passing(named.episode, verdict.family, node, verdict.leaf)
        return named

    def is_new(self, verdict: Verdict) -> bool:
        """Whether the verdict has not been told within the last minute; from now on it has."""
        fresh = verdict.key not in self._told
        self._told[verdict.key] = self.clock.monotonic()
        return fresh

    def record(self, verdict: Verdict, below: Collection[NodeName] = ()) -> Incident:
        """Return the incident a verdict belongs to, written down where that says something new."""
        known = self._known(verdict)
        if known and (
            verdict.key in self._told
            or known.outcome is IncidentOutcome.RECOVERED
            or verdict.kind is IncidentKind.REQUEUE_HELD
        ):
            return known
        now = self.clock.unix()
        idle = self.acting or verdict.remedy is Remedy.NOTHING
        would = "" if idle else f"; observed only, would {verdict.remedy}"
        return self._write(
            Incident(
                id=known.id if known else verdict.incident,
                kind=verdict.incident_kind,
                node=None if verdict.leaf else verdict.node,
                attempt=verdict.attempt,
                evidence="; ".join(verdict.reasons) + would,
                began_unix=now - verdict.since_s,
                detected_unix=now,
            ),
            below,
        )

    def _known(self, verdict: Verdict) -> Incident | None:
        if verdict.attempt and verdict.kind is IncidentKind.REQUEUE_HELD:
            # What made Slurm requeue it is on record, and being held is a part of that.
            for hit in self.journal.incidents(job=verdict.attempt.job, limit=16):
                if hit.attempt == verdict.attempt:
                    return hit
        return self.journal.incident(verdict.incident)

    def _write(self, incident: Incident, below: Collection[NodeName] = ()) -> Incident:
        kept = self.journal.record_incident(incident, below)
        self.memory.changed(incident.attempt.job if incident.attempt else None)
        return kept

    def settle(self, snapshot: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Close what is over: of these verdicts, reached just now, nothing is."""
        now = self.clock.monotonic()
        self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_S}
        standing = {replace(verdict, episode="").incident for verdict in verdicts}
        for base, passing in list(self._passing.items()):
            over = base not in standing and is_over(
                passing.kind, passing.node, passing.leaf, snapshot, self.policy
            )
            passing.over_since = (passing.over_since or now) if over else None
            if passing.over_since is not None and now - passing.over_since >= PASSED_S:
                del self._passing[base]
                self._end(f"{base}@{passing.episode}", now - passing.over_since)

    def _end(self, name: str, ago_s: float) -> None:
        known = self.journal.incident(name)
        if known and known.outcome is IncidentOutcome.OPEN:
            ended = max(self.clock.unix() - ago_s, known.detected_unix)
            self._write(replace(known, outcome=IncidentOutcome.RECOVERED, recovered_unix=ended))
            self.say(f"{name}: over")

    def hear_doubt(self, doubt: Verdict | None) -> bool:
        """Note whether we doubt ourselves now; return whether that has just begun."""
        now = self.clock.monotonic()
        begun = doubt is not None and self._doubt_since is None
        if doubt and self._doubt_since is None:
            self._doubt_since = now
            self.say(f"{doubt.kind}: touching nothing: {'; '.join(doubt.reasons)}")
        if doubt and not self._doubt and self._doubt_since is not None and now - self._doubt_since >= DOUBT_S:
            began = self.clock.unix() - (now - self._doubt_since)
            self._doubt = incident_id(None, IncidentKind.WATCHDOG_PARTITIONED, f"{began:.0f}")
            self._write(self._doubted(began, "; ".join(doubt.reasons)))
        if not doubt and self._doubt_since is not None:
            self.say(f"{IncidentKind.WATCHDOG_PARTITIONED}: over after {now - self._doubt_since:.1f} s")
            known = self.journal.incident(self._doubt) if self._doubt else None
            if known:
                self._write(self._doubted(known.began_unix, known.evidence, recovered_unix=self.clock.unix()))
            self._doubt_since, self._doubt = None, ""
        return begun

    def _doubted(self, began: float, evidence: str, recovered_unix: float = 0.0) -> Incident:
        return Incident(
            id=self._doubt,
            kind=IncidentKind.WATCHDOG_PARTITIONED,
            evidence=evidence,
            began_unix=began,
            detected_unix=began + DOUBT_S,
            recovered_unix=recovered_unix,
            outcome=IncidentOutcome.RECOVERED if recovered_unix else IncidentOutcome.OPEN,
        )

    def close(self, job: int, outcome: IncidentOutcome) -> None:
        """Give every open incident of a job its end: the job's own."""
        self.journal.close_incidents(job, outcome, self.clock.unix())
        self.memory.changed(job)


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
        line = b"%017.3f %s\n" % (seen.unix, json.dumps(asdict(seen)).encode())
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
        yield LeaderLock(last_unix=_last(descriptor), carried=_carried(descriptor), _file=descriptor)


def _last(descriptor: int) -> float | None:
    left = os.pread(descriptor, LONGEST_LINE, 0)
    try:
        return float(left.split()[0]) if left else None
    except (ValueError, IndexError):  # half of it was written, or somebody else did
        return os.fstat(descriptor).st_mtime


def _carried(descriptor: int) -> Carried | None:
    try:
        return Carried(**json.loads(os.pread(descriptor, LONGEST_LINE, 0).partition(b" ")[2]))
    except (ValueError, TypeError):  # the same, or an older watchdog
        return None
