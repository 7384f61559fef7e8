"""Reports the job's phase, attempt and open incident to the journal and the watchdog."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from deeplink.core import process_metrics as names
from deeplink.core.publish import write_text
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import attempt_from_wire
from deeplink.scheduler.recovery.records import (
    Action,
    Beat,
    Incident,
    IncidentKind,
    IncidentOutcome,
    NodeRecord,
    Phase,
    ProgressPoint,
    RankTimes,
    end_id,
    incident_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.scheduler.launch.backend import Backend, RunContext
    from deeplink.scheduler.launch.hangs import StackReport
    from deeplink.scheduler.launch.launch_spec import RankLayout
    from deeplink.v1 import common_pb2

BEAT_S = 1.0
FROZEN_S = 10.0  # what does not come back for so long hangs with its storage: reported, and never acted on
HELD_BACK_S = 10.0  # a node given up for so long, with nothing done about it yet, is reported when it comes back
ATTEMPT_FILE = "attempt"  # in the job's state folder: its newest attempt, for a script with several `deeplink run`


def first_attempt(backend: Backend) -> Attempt:
    """Return the attempt a run begins with: newer than all before it in this job, or it would be fenced."""
    fresh = Attempt(backend.job, backend.restart, 0)
    try:
        last = Attempt.parse((backend.folder / ATTEMPT_FILE).read_text(encoding="ascii"))
    except FileNotFoundError:
        return fresh
    return replace(last, relaunch=last.relaunch + 1) if last >= fresh else fresh


def note_attempt(backend: Backend, attempt: Attempt) -> None:
    """Write down that `attempt` has begun, for `first_attempt` of a later run."""
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


def _facts_of(layout: RankLayout) -> dict[str, object]:
    return {
        "nodes": layout.active,
        "spares": layout.resting,
        "world_size": layout.launch.world_size,
        "ring_crossings": layout.crossings,
        "ring_crossings_stock": layout.crossings_stock,
    }


class StatusReporter:
    """Keeps and reports the state of a job: about once a second, and at once when something happened."""

    def __init__(self, run: RunContext) -> None:
        self.incident: Incident | None = None  # the one that is being recovered from
        self._agents, self._events, self._clock = run.agents, run.events, run.clock
        self._beat = Beat(
            attempt=first_attempt(run.backend),
            phase=Phase.STARTING,
            user=run.backend.user,
            job_name=run.backend.job_name,
            job_label=run.backend.label,
            step_timeout_s=run.spec.step_timeout_s or 0.0,
        )
        self._points: list[ProgressPoint] = []
        self._rank_times: list[RankTimes] = []
        self._rank_time_log = RankTimesLog()
        self._frozen: Incident | None = None
        self._held_back: dict[NodeName, Incident] = {}
        self._slow: dict[str, Incident] = {}
        self._taken_over: Incident | None = None  # from a host of which it is open what became of it
        self._reported = run.clock.monotonic()

    def describe(self, **facts: object) -> None:
        """Take note of facts of the newest attempt (fields of `Beat`), for the next heartbeat."""
        self._beat = replace(self._beat, **facts)  # type: ignore[arg-type] # the fields are Beat's own

    def begin(self, layout: RankLayout) -> None:
        """A new attempt is about to be started on this layout."""
        launch, where = layout.launch, _facts_of(layout)
        self._held_back.clear()
        self.describe(attempt=launch.attempt, **where)
        self._events.event(
            "attempt-started",
            f"attempt {launch.attempt}: {layout}",
            attempt=str(launch.attempt),
            **where,
            ranks=launch.ranks,
            groups_cut=layout.cut_by_size,
            master=f"{launch.master_address}:{launch.master_port}",
        )

    def take_over(
        self,
        layout: RankLayout,
        incident: Incident | None,
        because: str,
        quiet_s: float,
        host: NodeName | None = None,
    ) -> None:
        """Go on with an attempt and its open incident; that its launcher died is an incident that is over."""
        # With its `host`, whose loss is one incident, with this in it: that is told once it is known.
        self.describe(attempt=layout.launch.attempt, phase=Phase.RUNNING, **_facts_of(layout))
        self.incident = incident
        begun = self._begun(IncidentKind.LAUNCHER_RESTARTED, None, because, quiet_s)
        self._taken_over = replace(begun, node=host)
        if host is None:
            self._report_taken_over()

    def _report_taken_over(self, *, is_lost: bool = False) -> None:
        taken, self._taken_over = self._taken_over, None
        if taken is not None and is_lost:  # as far as was seen: whoever ends us may know of it, and will say
            kind = IncidentKind.NODE_SILENT
            name = incident_id(taken.attempt, kind, taken.node or "")
            self._report([replace(taken, id=name, kind=kind)], now=True)
        elif taken is not None:
            self._report([self._over(replace(taken, node=None))], now=True)

    def named(self, nodes: Sequence[NodeName]) -> NodeName | None:
        """Return the node that an incident of these names: the host of a launcher that died, else the first."""
        taken = self._taken_over
        return taken.node if taken is not None and taken.node in nodes else next(iter(nodes), None)

    def _with_taken_over(self, lost: Incident) -> Incident:
        """Return the loss of a node, with what the loss of its launcher tells where that was its host."""
        taken = self._taken_over
        if taken is None or taken.node != lost.node:
            return lost
        self._taken_over = None
        began = min(taken.began_unix, lost.began_unix)
        return replace(lost, began_unix=began, evidence=f"{lost.evidence}; {taken.evidence}")

    def note_first_step(self, step: int | None, repeated: int) -> None:
        """The attempt reports its first step, and does so many again: what it was started for is over."""
        # What was found since is not: ranks that are being ended for it may still report.
        attempt = str(self._beat.attempt)
        again = f" ({repeated} steps done again)" if repeated else ""
        said = f"attempt {attempt} reports step {step}{again}"
        self._events.event("first-step", said, attempt=attempt, step=step, steps_repeated=repeated)
        if self.incident is not None and self.incident.acted_unix:
            self.settle(IncidentOutcome.RECOVERED, steps_repeated=repeated)

    def note(self, points: Iterable[ProgressPoint]) -> None:
        """Take rank 0's points over, for the next heartbeat; other ranks' are not reported."""
        self._points += [point for point in points if point.rank == 0]

    def note_rank_times(self, reports: Iterable[common_pb2.Progress], attempt: Attempt) -> None:
        """Take over how long the ranks' steps were, for the next heartbeat."""
        times = self._rank_time_log.take(reports, attempt, self._clock.monotonic())
        if times is not None:
            self._rank_times.append(replace(times, unix=self._clock.unix()))

    def tick(self) -> None:
        """Report how things are, if it is time to."""
        if self._clock.monotonic() - self._reported >= BEAT_S:
            self._look_at_storage()
            self._report()

    def enter(self, phase: Phase, detail: str = "") -> None:
        """Report at once that a new phase began."""
        if phase.ended:
            self.note_slow({})
            self._report_taken_over(is_lost=phase is Phase.FAILED)
        self._beat = replace(self._beat, phase=phase, detail=detail)
        self._report([self.incident] if self.incident else [], now=True)

    def open(
        self,
        kind: IncidentKind,
        node: NodeName | None,
        quiet_s: float,
        because: str,
        action: Action,
        *,
        ends: bool = True,
    ) -> None:
        """Begin an incident, `quiet_s` old, that ends the attempt unless said; it is told with the next phase."""
        self._held_back.clear()  # what was to be done is done now
        begun = self._with_taken_over(self._begun(kind, node, because, quiet_s))
        begun = replace(begun, id=end_id(self._beat.attempt)) if ends else begun
        self.incident = replace(begun, action=action)

    # Incidents of their own beside the open one, about which nothing is done: slow ranks, lost spares, nodes that
    # came back, frozen storage.

    def note_slow(self, found: Mapping[NodeName, str]) -> None:
        """Report at once nodes whose rank has become slow, with the reason, and those that are no more."""
        attempt, kind = self._beat.attempt, IncidentKind.STRAGGLER
        slow = {incident_id(attempt, kind, node): (node, why) for node, why in found.items()}
        acted_on = self.incident.id if self.incident is not None else None  # ends with what was done about it
        begun = {key: self._begun(kind, *slow[key]) for key in slow if key not in self._slow and key != acted_on}
        ended = {key: self._slow.pop(key) for key in self._slow.keys() - slow.keys()}
        self._slow |= begun
        self._report_all([*begun.values(), *(self._over(one) for key, one in ended.items() if key != acted_on)])

    def lose_spares(self, quiet_s: Mapping[NodeName, float], because: str) -> None:
        """Report the loss of nodes that ran no ranks, and for how long nothing was heard of each: over at once."""
        kind = IncidentKind.NODE_SILENT
        lost = (self._begun(kind, node, because, silent_s) for node, silent_s in quiet_s.items())
        self._report([self._over(self._with_taken_over(one)) for one in lost], now=True)

    def hold_back(self, quiet_s: Mapping[NodeName, float], because: str) -> None:
        """Take note of nodes that are given up, and for how long each was silent; nothing may be done yet."""
        for node, silent_s in quiet_s.items():
            if node not in self._held_back:
                self._held_back[node] = self._begun(IncidentKind.NODE_SILENT, node, because, silent_s)

    def come_back(self) -> None:
        """Report the nodes about which nothing could be done for long, now that they are heard again."""
        if self._taken_over is not None and self._taken_over.node in self._agents.unix():
            self._report_taken_over()
        if self._held_back:
            held_back, self._held_back = self._held_back.values(), {}
            now = self._clock.unix()
            back = [one for one in held_back if now - one.detected_unix >= HELD_BACK_S]
            said = "it came back, and nothing was done"
            self._report_all([self._over(replace(one, evidence=f"{one.evidence}; {said}")) for one in back])

    def _look_at_storage(self) -> None:
        stuck_s = self._events.stuck_s()
        if self._frozen is None and stuck_s >= FROZEN_S:
            because = f"what this launcher writes to the job's folder does not come back for {stuck_s:.0f} s"
            self._frozen = self._begun(IncidentKind.STORAGE_FROZEN, None, because, stuck_s)
            self._events.event("storage-frozen", because, stuck_s=stuck_s)
            self._report([self._frozen], now=True)
        elif self._frozen is not None and not stuck_s:
            ended, self._frozen = self._over(self._frozen), None
            self._events.event("storage-back", "the job's folder can be written again")
            self._report([ended], now=True)

    def _begun(self, kind: IncidentKind, node: NodeName | None, because: str, quiet_s: float = 0.0) -> Incident:
        """Return an incident that is found now, its first evidence `quiet_s` old."""
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

    # The open incident.

    def locate(self, found: StackReport) -> None:
        """Add where its ranks were to the open incident."""
        if self.incident is not None and found.gist:
            self.add(found.gist)
            self.incident = replace(self.incident, stacks=found.stacks)

    def add(self, found: str) -> None:
        """Add to the open incident what was found since."""
        if self.incident is not None and found:
            self.incident = replace(self.incident, evidence=f"{self.incident.evidence}; {found}")

    def acted(self) -> None:
        """The open incident's action is done."""
        if self.incident is not None:
            self.incident = replace(self.incident, acted_unix=self._clock.unix())

    def refused(self) -> None:
        """The open incident's action could not be done."""
        if self.incident is not None:
            self.incident = replace(self.incident, action=Action.NONE)

    def settle(self, outcome: IncidentOutcome, *, steps_repeated: int = 0) -> None:
        """End the open incident, if there is one, and report it at once."""
        if self.incident is None:
            return
        recovered = self._clock.unix() if outcome is IncidentOutcome.RECOVERED else 0.0
        ended = replace(self.incident, outcome=outcome, recovered_unix=recovered, steps_repeated=steps_repeated)
        self.incident = None
        self._report([ended], now=True)

    def _report_all(self, incidents: list[Incident]) -> None:
        if incidents:
            self._report(incidents, now=True)

    def _report(self, incidents: Sequence[Incident] = (), *, now: bool = False) -> None:
        self._reported = self._clock.monotonic()
        beat = replace(
            self._beat,
            node_beats=self._node_beats(),
            progress=tuple(self._points),
            rank_times=tuple(self._rank_times),
            incidents=tuple(incidents),
        )
        self._points, self._rank_times = [], []
        self._events.beat(beat, now=now)

    def _node_beats(self) -> tuple[NodeRecord, ...]:
        now = self._clock.unix()
        records = []
        facts, health, boots = self._agents.facts, self._agents.health(), self._agents.boot_ids()
        answered = self._agents.unix()  # of one that has not answered a launcher that took over nothing is known
        for node, silence in self._agents.silence().items():
            if node not in answered:
                continue
            store = self._agents.store_of(node)
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


# How long the ranks' own part of a step is: without waiting for other ranks, and without checkpoints, which one
# saves for all. Pure.

EVERY_S = 10.0  # between two rows
MOST_NUMBERS = 4_096
"""Of one row: where there are more ranks, several share a number, the slowest one's."""


class _Counted(NamedTuple):
    """A rank's counters so far; and its own word, where it counts nothing."""

    steps: float = 0.0
    own_s: float = 0.0
    data_s: float = 0.0
    work_s: float = 0.0


class RankTimesLog:
    """Makes the rows of an attempt from its ranks' reports."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._began = 0.0
        self._before: dict[int, _Counted] = {}
        self._newest: dict[int, _Counted] = {}

    def take(self, reports: Iterable[common_pb2.Progress], attempt: Attempt, now: float) -> RankTimes | None:
        """Take in reports; return a row, still without its time, where one is due. `now` is monotonic."""
        if attempt != self._attempt:
            self._attempt, self._began, self._before, self._newest = attempt, now, {}, {}
        for report in reports:
            if attempt_from_wire(report.attempt) == attempt:
                self._newest[report.rank] = _counted(report)
        span_s = now - self._began
        if span_s < EVERY_S or not self._newest:
            return None
        each = -(-(max(self._newest) + 1) // MOST_NUMBERS)
        times = {rank: _step_of(self._before.get(rank), counted) for rank, counted in self._newest.items()}
        own_s, data_s = _slowest(times, each)
        self._began, self._before = now, dict(self._newest)
        if not any(own_s):
            return None
        return RankTimes(attempt=attempt, unix=0.0, span_s=span_s, ranks_each=each, own_s=own_s, data_s=data_s)


def _counted(report: common_pb2.Progress) -> _Counted:
    told = report.metrics
    data_s, compute_s, rest_s, steps = (
        told.get(name, 0.0) for name in (names.DATA_S, names.COMPUTE_S, names.REST_S, names.STEPS)
    )
    return _Counted(steps, data_s + compute_s + rest_s, data_s, report.work_s)


def _step_of(before: _Counted | None, now: _Counted) -> tuple[float, float]:
    """Return seconds of a step, and of waiting for data in it; 0 where they are not known."""
    before = before or _Counted()
    steps = now.steps - before.steps
    if steps <= 0:  # it has done none, or counts none: then its own word is what there is
        return (0.0 if now.steps else max(0.0, now.work_s)), 0.0
    own_s, data_s = (now.own_s - before.own_s) / steps, (now.data_s - before.data_s) / steps
    return max(0.0, own_s), max(0.0, data_s)


def _slowest(times: Mapping[int, tuple[float, float]], each: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rows = [(0.0, 0.0)] * (max(times) // each + 1)
    for rank, time in times.items():
        rows[rank // each] = max(rows[rank // each], time)
    return tuple(_rounded(own_s) for own_s, _ in rows), tuple(_rounded(data_s) for _, data_s in rows)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}") if math.isfinite(seconds) else 0.0
