"""Maps verdicts to incidents on record, and closes an incident when its cause has passed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from deeplink.scheduler.watch.actor import action_word
from deeplink.scheduler.watch.records import Incident, IncidentKind, IncidentOutcome, incident_id
from deeplink.scheduler.watch.rules.expiry import is_over
from deeplink.scheduler.watch.verdict import PASSING, Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from deeplink.clock import Clock
    from deeplink.scheduler.watch.evidence import Snapshot, WatchPolicy
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.journal_cache import JournalCache
    from deeplink.scheduler.watch.verdict import Verdict
    from deeplink.types import NodeName

DOUBT_S = 3.0
"""Doubt about ourselves that lasts so long is an incident."""
PASSED_S = 5.0
"""What is seen to be over for so long is."""
REPEAT_S = 60.0
"""A verdict that stays is said, and written, again after so long."""


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
    """Keeps the incidents of the watchdog's own verdicts. One thread only.

    Args:
        acting: what is decided is done; else it is only said.
        say: told one line for what ends.
    """

    journal: Journal
    recall: JournalCache
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
        """Take note that whoever led before us did not end in order, and nobody watched until we began."""
        began = min(since_unix, until_unix)
        evidence = (
            "the watchdog that led before did not end in order (killed, out of memory, its host gone?): "
            f"nobody watched for {until_unix - began:.1f} s"
        )
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
        if not verdict.passes:
            return verdict
        known = self._passing.get(verdict.incident)
        if known:
            known.over_since = None
            return replace(verdict, episode=known.episode)
        first = int(self.clock.unix())
        # Also where the clock was set back: what is over is another one.
        episode = next(
            str(at) for at in count(first) if not self.journal.incident(replace(verdict, episode=str(at)).incident)
        )
        node = None if verdict.leaf else verdict.node
        self._passing[verdict.incident] = _Passing(episode, verdict.family, node, verdict.leaf)
        return replace(verdict, episode=episode)

    def is_new(self, verdict: Verdict) -> bool:
        """Whether the verdict has not been told within the last minute; from now on it has."""
        fresh = verdict.key not in self._told
        self._told[verdict.key] = self.clock.monotonic()
        return fresh

    def record(self, verdict: Verdict, below: Collection[NodeName] = ()) -> Incident:
        """Return the incident a verdict belongs to, written down where that says something new.

        Args:
            verdict: reached just now.
            below: the nodes of the leaf it blames, if it does.
        """
        known = self._known(verdict)
        if known and (
            verdict.key in self._told
            or known.outcome is IncidentOutcome.RECOVERED
            or verdict.kind is IncidentKind.REQUEUE_HELD
        ):
            return known
        now = self.clock.unix()
        would = (
            "" if self.acting or verdict.remedy is Remedy.NOTHING else f"; observed only, would {verdict.remedy}"
        )
        return self._write(
            Incident(
                id=known.id if known else verdict.incident,
                kind=verdict.incident_kind,
                node=None if verdict.leaf else verdict.node,
                attempt=verdict.attempt,
                action=action_word(Remedy.NOTHING),
                evidence="; ".join(verdict.reasons) + would,
                began_unix=now - verdict.since_s,
                detected_unix=now,
            ),
            below,
        )

    def _known(self, verdict: Verdict) -> Incident | None:
        if verdict.attempt and verdict.kind in {IncidentKind.REQUEUE_HELD, IncidentKind.STORAGE_FROZEN}:
            # What made Slurm requeue it is on record, being held is a part of that; and what a launcher told of
            # its storage is.
            recent = self.journal.incidents(job=verdict.attempt.job, limit=16)
            theirs = [hit for hit in recent if hit.attempt == verdict.attempt]
            wanted = [
                hit for hit in theirs if verdict.kind is IncidentKind.REQUEUE_HELD or hit.kind == verdict.kind
            ]
            if wanted:
                return wanted[0]
        return self.journal.incident(verdict.incident)

    def _write(self, incident: Incident, below: Collection[NodeName] = ()) -> Incident:
        kept = self.journal.record_incident(incident, below)
        self.recall.changed(incident.attempt.job if incident.attempt else None)
        return kept

    def settle(self, sight: Snapshot, verdicts: Iterable[Verdict]) -> None:
        """Close what is over: of these verdicts, reached just now, nothing is."""
        now = self.clock.monotonic()
        self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_S}
        standing = {replace(verdict, episode="").incident for verdict in verdicts}
        for base, passing in list(self._passing.items()):
            over = base not in standing and is_over(passing.kind, passing.node, passing.leaf, sight, self.policy)
            passing.over_since = (passing.over_since or now) if over else None
            if passing.over_since is not None and now - passing.over_since >= PASSED_S:
                del self._passing[base]
                self._end(f"{base}@{passing.episode}", now - passing.over_since)

    def _end(self, name: str, ago_s: float) -> None:
        known = self.journal.incident(name)
        if known and known.outcome is IncidentOutcome.OPEN:
            ended = self.clock.unix() - ago_s
            self._write(
                replace(known, outcome=IncidentOutcome.RECOVERED, recovered_unix=max(ended, known.detected_unix))
            )
            self.say(f"{name}: over")

    def hear_doubt(self, doubt: Verdict | None) -> bool:
        """Take note of whether we doubt ourselves now; return whether that has just begun."""
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
        self.recall.changed(job)
