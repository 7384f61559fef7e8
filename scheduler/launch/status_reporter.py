"""Reports the job's phase, attempt and open incident to the journal and the watchdog."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deeplink.publish import write_text
from deeplink.scheduler.watch.records import (
    Action,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    NodeRecord,
    Phase,
    ProgressPoint,
    incident_id,
)
from deeplink.types import Attempt, NodeName
from deeplink.wire import attempt_from_wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.launch_spec import RankLayout
    from deeplink.scheduler.launch.stack_collection import StackReport
    from deeplink.v1 import common_pb2

BEAT_S = 1.0
FROZEN_S = 10.0
"""What does not come back for so long hangs with its storage. It is told, and never acted on."""
HELD_BACK_S = 10.0
"""A node that is given up for so long, though nothing may be done about it yet, is told of when it comes back."""

ATTEMPT_FILE = "attempt"
"""In the job's state folder: its newest attempt. A script may call `deeplink run` several times."""


def first_attempt(backend: Backend) -> Attempt:
    """Return the attempt a run begins with: newer than all before it in this job, or it would be fenced."""
    fresh = Attempt(backend.job, backend.restart, 0)
    try:
        last = Attempt.parse((backend.folder / ATTEMPT_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return fresh
    return replace(last, relaunch=last.relaunch + 1) if last >= fresh else fresh


def note_attempt(backend: Backend, attempt: Attempt) -> None:
    """Leave word that `attempt` has begun, for `first_attempt` of a later run.

    Raises:
        OSError: it cannot be written.
    """
    write_text(backend.folder / ATTEMPT_FILE, str(attempt))


def points_of(reports: Iterable[common_pb2.Progress]) -> list[ProgressPoint]:
    """Return agents' progress reports as values, but for those of ranks that have done no step yet."""
    return [
        ProgressPoint(
            attempt=attempt_from_wire(report.attempt),
            step=report.step,
            unix=report.unix,
            rank=report.rank,
            metrics=dict(report.metrics),
        )
        for report in reports
        if report.step or not report.section
    ]


@dataclass(slots=True)
class _Pace:
    """How long a step takes: over the newest attempt, by rank 0's own clock."""

    first: ProgressPoint | None = None
    last: ProgressPoint | None = None

    def note(self, point: ProgressPoint) -> None:
        if self.first is None or point.attempt != self.first.attempt:
            self.first = point
        self.last = point

    @property
    def step_s(self) -> float:
        """Seconds; 0 where too little was heard."""
        if self.first is None or self.last is None or self.last.step <= self.first.step:
            return 0.0
        return max(0.0, self.last.unix - self.first.unix) / (self.last.step - self.first.step)


class StatusReporter:
    """Keeps what is to be told of a job, and tells it: about once a second, and at once when something happened.

    Attributes:
        incident: the one that is being recovered from; None most of the time.
    """

    def __init__(self, backend: Backend, fleet: AgentPool, chronicle: EventLog, clock: Clock) -> None:
        self.incident: Incident | None = None
        self._fleet, self._chronicle, self._clock = fleet, chronicle, clock
        attempt = first_attempt(backend)
        self._beat = Beat(
            attempt=attempt,
            phase=Phase.STARTING,
            user=backend.user,
            job_name=backend.job_name,
            job_label=backend.label,
        )
        self._points: list[ProgressPoint] = []
        self._pace = _Pace()
        self._frozen: Incident | None = None
        self._held_back: dict[NodeName, Incident] = {}
        self._slow: dict[str, Incident] = {}
        self._told = clock.monotonic()

    def describe(self, **facts: object) -> None:
        """Take note of facts of the newest attempt (fields of `Beat`); they are told with the next beat."""
        self._beat = replace(self._beat, **facts)  # type: ignore[arg-type] # the fields are Beat's own

    def begin(self, layout: RankLayout, step_timeout_s: float) -> None:
        """A new attempt is about to be started on this layout."""
        launch = layout.launch
        self._held_back.clear()
        where: dict[str, object] = {
            "nodes": layout.active,
            "spares": layout.resting,
            "world_size": launch.world_size,
            "ring_crossings": layout.crossings,
            "ring_crossings_stock": layout.crossings_stock,
        }
        self.describe(attempt=launch.attempt, step_timeout_s=step_timeout_s, **where)
        self._chronicle.event(
            "attempt-started",
            f"attempt {launch.attempt}: {layout}",
            attempt=str(launch.attempt),
            **where,
            ranks=launch.ranks,
            groups_cut=layout.cut_by_size,
            master=f"{launch.master_address}:{launch.master_port}",
        )

    def note_first_step(self, step: int | None, repeated: int) -> None:
        """The attempt reports its first step, and does so many again: what it was started for is over.

        What was found since is not: ranks that are being ended for it may still report.
        """
        attempt = str(self._beat.attempt)
        again = f" ({repeated} steps done again)" if repeated else ""
        self._chronicle.event(
            "first-step",
            f"attempt {attempt} reports step {step}{again}",
            attempt=attempt,
            step=step,
            steps_repeated=repeated,
        )
        if self.incident is not None and self.incident.acted_unix:
            self.settle(IncidentOutcome.RECOVERED, steps_repeated=repeated)

    def note(self, points: Iterable[ProgressPoint]) -> None:
        """Take rank 0's reports over, to be told with the next beat; other ranks' are not told."""
        taken = [point for point in points if point.rank == 0]
        self._points.extend(taken)
        for point in taken:
            self._pace.note(point)

    def tick(self) -> None:
        """Tell how things are, if it is time to."""
        if self._clock.monotonic() - self._told >= BEAT_S:
            self._look_at_storage()
            self._tell([])

    def enter(self, phase: Phase, detail: str = "") -> None:
        """Tell at once that a new phase began."""
        if phase.ended:
            self.note_slow({})
        self._beat = replace(self._beat, phase=phase, detail=detail)
        self._tell([self.incident] if self.incident else [], now=True)

    def open(
        self, kind: IncidentKind, node: NodeName | None, quiet_s: float, because: str, action: Action
    ) -> None:
        """Begin an incident whose first evidence is `quiet_s` old; it is told with the next phase."""
        self._held_back.clear()  # what was to be done is done now
        begun = self._begun(kind, node, because, quiet_s)
        self.incident = replace(begun, action=action, ranks=self._beat.world_size, step_s=self._pace.step_s)

    def note_slow(self, found: Mapping[NodeName, str]) -> None:
        """Tell at once of nodes whose rank has become slow, with the reason, and of those that are no more.

        That is an incident of its own beside the open one: nothing is done about it.
        """
        slow = {
            incident_id(self._beat.attempt, IncidentKind.STRAGGLER, node): (node, why)
            for node, why in found.items()
        }
        news = []
        for key, (node, why) in slow.items():
            if key not in self._slow and (self.incident is None or self.incident.id != key):
                self._slow[key] = self._begun(IncidentKind.STRAGGLER, node, why)
                news.append(self._slow[key])
        for key in self._slow.keys() - slow.keys():
            ended = self._slow.pop(key)
            if self.incident is None or self.incident.id != key:  # else it ends with what was done about it
                news.append(self._over(ended))
        if news:
            self._tell(news, now=True)

    def lose_spares(self, quiet_s: Mapping[NodeName, float], because: str) -> None:
        """Tell of the loss of nodes that ran no ranks, and for how long nothing was heard of each.

        Those are incidents of their own beside the open one, and over at once.
        """
        lost = [
            self._begun(IncidentKind.NODE_SILENT, node, because, silent_s) for node, silent_s in quiet_s.items()
        ]
        self._tell([self._over(one) for one in lost], now=True)

    def hold_back(self, quiet_s: Mapping[NodeName, float], because: str) -> None:
        """Take note of nodes that are given up, and for how long each was silent; nothing may be done yet."""
        for node, silent_s in quiet_s.items():
            if node not in self._held_back:
                begun = self._begun(IncidentKind.NODE_SILENT, node, because, silent_s)
                self._held_back[node] = replace(begun, ranks=self._beat.world_size)

    def come_back(self) -> None:
        """Tell of the nodes about which nothing could be done for long, now that they are heard again.

        Those are incidents of their own beside the open one, and over.
        """
        now, held_back = self._clock.unix(), self._held_back
        if not held_back:
            return
        self._held_back = {}
        over = [
            self._over(replace(one, evidence=f"{one.evidence}; it came back, and nothing was done"))
            for one in held_back.values()
            if now - one.detected_unix >= HELD_BACK_S
        ]
        if over:
            self._tell(over, now=True)

    def _begun(self, kind: IncidentKind, node: NodeName | None, because: str, quiet_s: float = 0.0) -> Incident:
        """Return an incident that is found now, its first evidence `quiet_s` old; no rank stands still for it."""
        now = self._clock.unix()
        return Incident(
            id=incident_id(self._beat.attempt, kind, node or ""),
            kind=kind,
            node=node,
            attempt=self._beat.attempt,
            evidence=because,
            began_unix=now - quiet_s,
            detected_unix=now,
        )

    def _over(self, incident: Incident) -> Incident:
        return replace(incident, outcome=IncidentOutcome.RECOVERED, recovered_unix=self._clock.unix())

    def locate(self, found: StackReport) -> None:
        """Add where its ranks were to the open incident."""
        if self.incident is not None and found.gist:
            evidence = f"{self.incident.evidence}; {found.gist}"
            self.incident = replace(self.incident, evidence=evidence, stacks=found.stacks)

    def add(self, found: str) -> None:
        """Add to the open incident what was found since."""
        if self.incident is not None and found:
            self.incident = replace(self.incident, evidence=f"{self.incident.evidence}; {found}")

    def acted(self) -> None:
        """The open incident's action is done."""
        if self.incident is not None:
            self.incident = replace(self.incident, acted_unix=self._clock.unix())

    def refused(self) -> None:
        """What was to be done about the open incident could not be."""
        if self.incident is not None:
            self.incident = replace(self.incident, action=Action.NONE)

    def settle(self, outcome: IncidentOutcome, *, steps_repeated: int = 0) -> None:
        """End the open incident, if there is one, and tell at once."""
        if self.incident is None:
            return
        recovered = self._clock.unix() if outcome is IncidentOutcome.RECOVERED else 0.0
        ended = replace(self.incident, outcome=outcome, recovered_unix=recovered, steps_repeated=steps_repeated)
        self.incident = None
        self._tell([ended], now=True)

    def _look_at_storage(self) -> None:
        """Tell that the shared storage hangs, and that it goes on; nothing is ever done about it."""
        stuck_s = self._chronicle.stuck_s()
        if self._frozen is None and stuck_s >= FROZEN_S:
            because = f"what this launcher writes to the job's folder does not come back for {stuck_s:.0f} s"
            begun = self._begun(IncidentKind.STORAGE_FROZEN, None, because, stuck_s)
            self._frozen = replace(begun, ranks=self._beat.world_size)
            self._chronicle.event("storage-frozen", because, stuck_s=stuck_s)
            self._tell([self._frozen], now=True)
        elif self._frozen is not None and not stuck_s:
            ended = self._over(self._frozen)
            self._frozen = None
            self._chronicle.event("storage-back", "the job's folder can be written again")
            self._tell([ended], now=True)

    def _tell(self, incidents: list[Incident], *, now: bool = False) -> None:
        self._told = self._clock.monotonic()
        points, self._points = self._points, []
        beat = replace(self._beat, node_beats=self._node_beats())
        self._chronicle.beat(beat, points=points, incidents=incidents, now=now)

    def _node_beats(self) -> tuple[NodeRecord, ...]:
        now = self._clock.unix()
        records = []
        facts, health, boots = self._fleet.facts, self._fleet.health(), self._fleet.boot_ids()
        for node, silence in self._fleet.silence().items():
            store = self._fleet.store_of(node)
            records.append(
                NodeRecord(
                    name=node,
                    topology_address=facts[node].topology_address,
                    seen_unix=now - silence.answer_s,
                    silent_s=silence.answer_s,
                    shards=store.shards,
                    shard_bytes=store.bytes,
                    verified_bytes=store.verified_bytes,
                    free_bytes=store.free_bytes,
                    job=self._beat.attempt.job,
                    health=health[node],
                    boot_id=boots[node],
                )
            )
        return tuple(records)
