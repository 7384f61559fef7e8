"""What the loop remembers between two looks: of the journal, and of the nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from deeplink.core.types import NodeName
from deeplink.scheduler.liveness.heartbeats import MOST_JOBS
from deeplink.scheduler.liveness.probe import PROBE_DEADLINE_S
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.recovery.node_rules import bars_return
from deeplink.scheduler.recovery.records import (
    BLAMELESS,
    KNOWN_LATER,
    NODE_LOST,
    IncidentKind,
    IncidentOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.liveness.heartbeats import AgentReport
    from deeplink.scheduler.liveness.probe import Address, Prober
    from deeplink.scheduler.recovery.evidence import NodeSnapshot, Snapshot, WatchPolicy
    from deeplink.scheduler.recovery.records import Incident
    from deeplink.scheduler.slurm.parse import NodeRow

RECENT_INCIDENTS = 16
LATER_S = 10.0  # a boot time is counted back from the node's clock: a smaller step of it is no boot
STALE_S = 3.0  # a row of answers to probes that was not carried on for so long is broken
REMEMBERED_S = 86_400.0
PATIENCE_S = 30.0  # how long after its return we wait for a node's agent to tell its kernel, where one told before
MOST_REMEMBERED = 1_024
MOST_CARRIED = 256
_NO_REASON = frozenset(
    {IncidentKind.RANK_FAILED, IncidentKind.STRAGGLER, IncidentKind.STORAGE_FROZEN, IncidentKind.AGENTS_SILENT}
)
"""Kinds for which no one starts a job again: one that is in the queue went there by its user's will."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptMemory:
    """What is on record of one attempt."""

    told: frozenset[str] = frozenset()  # kinds of its incidents that have not recovered
    suspects: tuple[NodeName, ...] = ()  # nodes that those blame
    rescued: bool = False  # one of them is of a kind that a restart is to cure


@dataclass(slots=True, kw_only=True)
class JournalCache:
    """What the loop asks of the journal in each round: read again once an incident or action was written."""

    journal: Journal
    _changes: int = -1
    _known: dict[object, Any] = field(default_factory=dict)

    def drained(self) -> dict[NodeName, float]:
        """Return the nodes we ever set out to drain, and when last."""
        return self._once("drained", self.journal.drained)

    def open_incidents(self) -> int:
        """Return how many incidents have no end."""
        return self._once("open", self.journal.open_incidents)

    def of(self, attempt: Attempt) -> AttemptMemory:
        """Return what is on record of an attempt."""
        return self._once(attempt, lambda: self._read(attempt))

    def _once(self, what: object, read: Callable[[], T]) -> T:
        changes = self.journal.changes
        if changes != self._changes or len(self._known) > MOST_JOBS:
            self._known.clear()
            self._changes = changes
        if what not in self._known:
            self._known[what] = read()
        known: T = self._known[what]
        return known

    def _read(self, attempt: Attempt) -> AttemptMemory:
        # Failed counts too: a launcher that Slurm ends while it waits for rescue gives its incident that end.
        hits = [
            hit
            for hit in self.journal.incidents(job=attempt.job, limit=RECENT_INCIDENTS)
            if hit.attempt == attempt and hit.outcome is not IncidentOutcome.RECOVERED
        ]
        return AttemptMemory(
            told=frozenset(hit.kind for hit in hits),
            suspects=tuple(sorted({hit.node for hit in hits if hit.node and hit.kind not in BLAMELESS})),
            rescued=any(hit.kind not in _NO_REASON for hit in hits),
        )


# Nodes: their boots, answers to probes, health, and return after a loss.


class BootAges(NamedTuple):
    """How long ago a node booted, in seconds; None where that was not seen."""

    booted_s: float | None  # since Slurm's boot time of it moved on
    slurmd_restarted_s: float | None  # since its slurmd was seen to have been started again
    slurmd_age_s: float | None  # since its slurmd was started, by the node's own clock; None: still to come


@dataclass(slots=True)
class BootHistory:
    """Slurm's boot times of the nodes and of their slurmds, and when each moved on."""

    _shown: dict[NodeName, str] = field(default_factory=dict)
    _moved_at: dict[NodeName, float] = field(default_factory=dict)
    _started: dict[NodeName, str] = field(default_factory=dict)
    _started_unix: dict[NodeName, float] = field(default_factory=dict)
    _restarted_at: dict[NodeName, float] = field(default_factory=dict)

    def note(self, rows: Iterable[NodeRow], now: float) -> None:
        """Note what Slurm shows at `now`, monotonic."""
        for row in rows:
            if row.slurmd_started and row.slurmd_started != self._started.get(row.name):
                if row.name in self._started:
                    self._restarted_at[row.name] = now
                self._started[row.name] = row.slurmd_started
                self._started_unix[row.name] = boot_unix(row.slurmd_started)
            before = self._shown.get(row.name)
            if not row.boot_time or before == row.boot_time:
                continue  # Slurm 22.05 shows none for a while after a node was resumed (measured)
            self._shown[row.name] = row.boot_time
            if before is not None and 0 < boot_unix(before) < boot_unix(row.boot_time) - LATER_S:
                self._moved_at[row.name] = now

    def of(self, name: NodeName, now: float, unix: float) -> BootAges:
        """Return what Slurm has shown of the boots of a node until now, monotonic and in Unix time."""
        moved, again = self._moved_at.get(name), self._restarted_at.get(name)
        started = self._started_unix.get(name, 0.0)
        return BootAges(
            None if moved is None else now - moved,
            None if again is None else now - again,
            unix - started if 0 < started <= unix else None,
        )


def boot_unix(shown: str) -> float:
    """Return a boot time as Slurm prints it in Unix time; 0 where it is none.

    >>> boot_unix("2026-11-22T11:30:01") - boot_unix("2026-11-22T11:29:01"), boot_unix("Unknown")
    (60.0, 0.0)
    """
    try:
        return datetime.fromisoformat(shown).astimezone().timestamp()
    except ValueError:
        return 0.0


@dataclass(frozen=True, slots=True)
class Carried:
    """What a watchdog leaves at each round for one that is started again at once. Moments are Unix time."""

    unix: float  # of the round
    since_unix: float  # it has listened since then, without a gap in which nobody could be heard
    # Nodes that do not answer: how, since when and until when, and to how many probes.
    away: Mapping[str, tuple[str, float, float, int]]


@dataclass(frozen=True, slots=True)
class _Row:
    """An unbroken row of like answers of one node: away or not."""

    answer: ProbeResult
    since: float
    until: float
    probes: int


@dataclass(slots=True, kw_only=True)
class ProbeHistory:
    """Probes nodes and remembers how each has answered. One thread only."""

    prober: Prober
    clock: Clock
    counts: Counter[ProbeResult] = field(default_factory=Counter)  # answers since this was last cleared
    _rows: dict[NodeName, _Row] = field(default_factory=dict)

    def probe(self, addresses: Mapping[NodeName, Address]) -> None:
        """Try these nodes, all at once, for at most half a second."""
        began = self.clock.monotonic()
        answers = self.prober.probe(addresses, PROBE_DEADLINE_S) if addresses else {}
        ended = self.clock.monotonic()
        self.counts.update(answers.values())
        rows = {}
        for name, answer in answers.items():
            before = self._rows.get(name)
            if before and before.answer.away == answer.away and before.answer is not ProbeResult.UNKNOWN:
                rows[name] = _Row(answer, before.since, ended, before.probes + 1)
            else:
                rows[name] = _Row(answer, began, ended, 1)
        # A row that was not carried on this time is broken, unless it is only the other caller's turn.
        kept = {name: row for name, row in self._rows.items() if name not in rows and ended - row.until < STALE_S}
        self._rows = {**kept, **rows}

    def carry(self, offset: float) -> dict[str, tuple[str, float, float, int]]:
        """Return the rows of nodes that are away, for another to go on with; `offset` makes Unix time of ours."""
        away = [(name, row) for name, row in self._rows.items() if row.answer.away][:MOST_CARRIED]
        return {name: (row.answer.value, row.since + offset, row.until + offset, row.probes) for name, row in away}

    def take_over(self, away: Mapping[str, tuple[str, float, float, int]], offset: float) -> None:
        """Go on with rows that another left."""
        self._rows |= {
            NodeName(name): _Row(ProbeResult(answer), since - offset, until - offset, probes)
            for name, (answer, since, until, probes) in away.items()
        }

    def forget(self) -> None:
        """Break every row: it was we who were away."""
        self._rows.clear()

    def reach(self, name: NodeName) -> bool | None:
        """Return whether a node answered when it was probed last; None when that says nothing now."""
        row = self._rows.get(name)
        if row is None or row.answer is ProbeResult.UNKNOWN or self.clock.monotonic() - row.until > STALE_S:
            return None
        return row.answer is ProbeResult.ANSWERS

    def away(self, name: NodeName) -> tuple[float, int]:
        """Return for how long, and in how many probes, a node has not answered, unbroken and up to now; else 0."""
        row = self._rows.get(name)
        if row is None or not row.answer.away or self.clock.monotonic() - row.until > STALE_S:
            return 0.0, 0
        return row.until - row.since, row.probes

    def seen(self, nodes: Mapping[NodeName, NodeSnapshot], now: float) -> dict[NodeName, NodeSnapshot]:
        """Return the nodes with what the probes say of them at `now`, monotonic."""
        probed = {name: self._seen(nodes[name], row, now) for name, row in self._rows.items() if name in nodes}
        return {**nodes, **probed}

    @staticmethod
    def _seen(node: NodeSnapshot, row: _Row, now: float) -> NodeSnapshot:
        if row.answer is ProbeResult.UNKNOWN:
            return node
        lasted, probed_s = row.until - row.since, max(0.0, now - row.until)
        if row.answer is ProbeResult.ANSWERS:
            return replace(node, slurmd=row.answer, answering_s=lasted, probed_s=probed_s)
        return replace(node, slurmd=row.answer, away_s=lasted, away_probes=row.probes, probed_s=probed_s)


@dataclass(slots=True)
class HealthHistory:
    """For how long standing agents have had nothing to say against nodes that are out of service."""

    _since: dict[NodeName, float] = field(default_factory=dict)

    def note(
        self, out: Collection[NodeName], said: Mapping[NodeName, AgentReport], now: float, policy: WatchPolicy
    ) -> None:
        """Note what is said of the nodes that we drained."""
        well = {name for name in out if name in said and _well(said[name], policy)}
        self._since = {name: self._since.get(name, now) for name in well}

    def age_s(self, name: NodeName, now: float) -> float:
        """Return for how long the node has been well; 0 when it is not, or no one says."""
        since = self._since.get(name)
        return 0.0 if since is None else now - since


def _well(word: AgentReport, policy: WatchPolicy) -> bool:
    # Heard of itself, not taken from the journal, and lately.
    told = word.heard_s is not None and word.attended_s is not None and word.attended_s < policy.told_s
    return told and not any(map(bars_return, word.findings))


@dataclass(slots=True)
class _Lost:
    incident: str
    began_unix: float
    at: float
    boot_id: str
    missed: bool = False  # by Slurm, since then
    back_at: float | None = None


@dataclass(slots=True, kw_only=True)
class ReturnedNodes:
    """Waits for lost nodes to come back. One thread only."""

    journal: Journal
    clock: Clock
    say: Callable[[str], None]
    _lost: dict[NodeName, _Lost] = field(default_factory=dict)

    def begin(self) -> None:
        """Wait for those that were lost while another led, too."""
        since = self.clock.unix() - REMEMBERED_S
        for incident in reversed(self.journal.incidents(since_unix=since, limit=MOST_REMEMBERED)):
            if incident.node and incident.kind in NODE_LOST - KNOWN_LATER:
                self.lose(incident, "")

    def lose(self, incident: Incident, boot_id: str) -> None:
        """Wait for the node of this incident; `boot_id` is the kernel it had, empty where unknown."""
        if incident.node and incident.kind in NODE_LOST - KNOWN_LATER:
            before = self._lost.get(incident.node)
            if before is None or before.incident != incident.id:
                self._lost[incident.node] = _Lost(
                    incident.id, incident.began_unix, self.clock.monotonic(), boot_id
                )
            if len(self._lost) > MOST_REMEMBERED:
                del self._lost[next(iter(self._lost))]

    def note(self, snapshot: Snapshot) -> None:
        """Tell of those that are back."""
        if not self._lost or not snapshot.controller:
            return
        now = self.clock.monotonic()
        for name, lost in list(self._lost.items()):
            node = snapshot.nodes.get(name)
            if node is None or now - lost.at > REMEMBERED_S:
                del self._lost[name]
                continue
            lost.missed = lost.missed or node.down or not node.responding
            lost.back_at = (lost.back_at or now) if self._is_back(node, lost, now) else None
            kind = _what_it_was(node, lost, now) if lost.back_at is not None else None
            if kind:
                del self._lost[name]
                self._tell(name, lost, kind)

    @staticmethod
    def _is_back(node: NodeSnapshot, lost: _Lost, now: float) -> bool:
        if node.slurmd.away or node.down or not node.responding:
            return False
        # That Slurm hears it says something only where it had noticed the loss.
        return node.slurmd is ProbeResult.ANSWERS or _heard_after(node, lost, now) or lost.missed

    def _tell(self, name: NodeName, lost: _Lost, kind: IncidentKind) -> None:
        known = self.journal.incident(lost.incident)
        if known is None:
            return
        after = self.clock.unix() - lost.began_unix
        rebooted = kind is IncidentKind.NODE_REBOOTED
        which = "another kernel: it had rebooted" if rebooted else "the kernel it had: it was cut off"
        evidence = f"{name} came back after {after:.0f} s with {which}"
        self.journal.record_incident(replace(known, kind=kind, evidence=evidence))
        self.journal.record_moment(lost.incident, self.clock.unix(), evidence)
        self.say(f"{lost.incident}: {evidence}")


def _heard_after(node: NodeSnapshot, lost: _Lost, now: float) -> bool:
    return node.heard_s is not None and now - node.heard_s > lost.at


def _what_it_was(node: NodeSnapshot, lost: _Lost, now: float) -> IncidentKind | None:
    """Return which it was; None while that is not known."""
    if lost.boot_id and node.boot_id and (node.boot_id != lost.boot_id or _heard_after(node, lost, now)):
        return IncidentKind.NODE_REBOOTED if node.boot_id != lost.boot_id else IncidentKind.NODE_CUT_OFF
    if lost.boot_id and lost.back_at is not None and now - lost.back_at < PATIENCE_S:
        return None
    booted = boot_unix(node.boot_shown)
    if not booted:
        return None
    if booted > lost.began_unix - LATER_S:
        return IncidentKind.NODE_REBOOTED
    # With a new slurmd the boot time may be one that was written down before.
    anew = node.slurmd_restarted_s is not None and node.slurmd_restarted_s < now - lost.at
    return None if anew else IncidentKind.NODE_CUT_OFF
