"""Gathering the evidence: asks Slurm, probes nodes, reads the beats; draws no conclusion."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.states import JobState, NodeState
from deeplink.scheduler.watch.evidence import (
    FORGOTTEN_S,
    TAG,
    Answer,
    JobSight,
    NodeSight,
    Policy,
    Sight,
    targets,
    tense,
)
from deeplink.scheduler.watch.records import Kind, Outcome
from deeplink.types import JobId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.watch.book import BeatBook, Heard
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.probe import Address, Prober
    from deeplink.types import NodeName

SLURMD_PORT = 6818
COMMAND_S = 8.0
"""Bound on one command: a dead controller is given up after 4 to 9 s by Slurm's own clients (measured)."""
PROBE_DEADLINE_S = 0.5
TOPOLOGY_AGE_S = 60.0
RECENT_INCIDENTS = 16


@dataclass(frozen=True, slots=True)
class Cluster:
    """What Slurm said last, and when."""

    at: float
    jobs: Mapping[JobId, JobRow] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeRow] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """An unbroken row of like answers of one node: away or not."""

    answer: Answer
    since: float
    until: float
    probes: int


@dataclass(slots=True, kw_only=True)
class Observer:
    """The watchdog's eyes. One thread only.

    Args:
        slurm: the way to Slurm; its commands should be bounded by a few seconds.
        prober: the way to nodes.
        book: what launchers said.
        journal: what is on record: who was drained by us, which incidents are open.
        clock: time.
        policy: what counts as suspicious.
    """

    slurm: Slurm
    prober: Prober
    book: BeatBook
    journal: Journal
    clock: Clock
    policy: Policy
    cluster: Cluster = field(default_factory=lambda: Cluster(at=float("-inf")))
    probes: Counter[Answer] = field(default_factory=Counter)
    _rows: dict[NodeName, _Row] = field(default_factory=dict)
    _leaves: dict[NodeName, str] = field(default_factory=dict)
    _leaves_at: float = float("-inf")
    _port: int = 0

    def ask(self) -> None:
        """Ask Slurm for its jobs and nodes; where it does not answer, that becomes the news."""
        try:
            if not self._port:
                self._port = slurmd_port(self.slurm)
            jobs = {row.id: row for row in self.slurm.jobs()}
            nodes = {row.name: row for row in self.slurm.nodes()}
            if self.clock.monotonic() - self._leaves_at > TOPOLOGY_AGE_S:
                self._leaves = self._find_leaves()
                self._leaves_at = self.clock.monotonic()
        except DeepLinkError as problem:
            self.cluster = replace(self.cluster, at=self.clock.monotonic(), problem=str(problem))
        else:
            self.cluster = Cluster(self.clock.monotonic(), jobs, nodes)

    def look(self) -> Sight:
        """Return what is to be seen now; probes where there is suspicion, for at most half a second."""
        now = self.clock.monotonic()
        jobs = tuple(self._job(heard, now) for heard in self.book.all() if self._ours(heard))
        before = self._nodes(jobs)
        suspicious = tense(jobs, self.policy)
        self._probe(targets(suspicious, before, self.policy))
        return Sight(
            jobs=jobs,
            nodes={name: self._seen(node) for name, node in before.items()},
            controller=not self.cluster.problem,
            controller_problem=self.cluster.problem,
            dead_lately=frozenset(
                name
                for name, began in self.journal.drained().items()
                if began >= self.clock.unix() - self.policy.brake_window_s
            ),
        )

    def reach(self, name: NodeName) -> bool | None:
        """Return whether a node answered when it was probed last; None when that says nothing now."""
        row = self._rows.get(name)
        if row is None or row.answer is Answer.UNKNOWN or self.clock.monotonic() - row.until > _STALE_S:
            return None
        return row.answer is Answer.ANSWERS

    def probe_now(self, names: tuple[NodeName, ...]) -> None:
        """Probe these nodes, suspicious or not."""
        self._probe(names)

    def vanished(self) -> tuple[int, ...]:
        """Return the jobs that Slurm has forgotten and that are silent for long: they ended while we were away."""
        now = self.clock.monotonic()
        silent = [heard.beat.attempt.job for heard in self.book.all() if now - heard.heard_at > FORGOTTEN_S]
        return () if self.cluster.problem else tuple(job for job in silent if JobId(job) not in self.cluster.jobs)

    def forgive(self) -> None:
        """Forget every unbroken row: it was we who were away."""
        self._rows.clear()
        self.book.forgive(self.clock.monotonic())

    def _ours(self, heard: Heard) -> bool:
        """Whether Slurm confirms the job, and that it is of the user who beat: else it is none of our business."""
        row = self.cluster.jobs.get(JobId(heard.beat.attempt.job))
        return row is not None and (not heard.beat.user or row.user == heard.beat.user)

    def _job(self, heard: Heard, now: float) -> JobSight:
        beat, age = heard.beat, max(0.0, now - heard.heard_at)
        row = self.cluster.jobs[JobId(beat.attempt.job)]
        # Failed counts too: a launcher that Slurm ends while it waits for rescue gives its incident that end.
        hits = [
            hit
            for hit in self.journal.incidents(job=beat.attempt.job, limit=RECENT_INCIDENTS)
            if hit.attempt == beat.attempt
            and hit.outcome is not Outcome.RECOVERED
            and hit.kind != Kind.RANK_FAILED
        ]
        return JobSight(
            attempt=beat.attempt,
            phase=beat.phase,
            state=row.state,
            reason=row.reason,
            restarts=row.restarts,
            requeueable=row.requeueable,
            nodes=row.nodes,
            rank_nodes=beat.nodes,
            batch_host=row.batch_host,
            beat_age_s=age,
            agents_silent={
                node.name: node.silent_s + (age if node.silent_s >= self.policy.tense_agent_s else 0.0)
                for node in beat.node_beats
            },
            progress_age_s=None if heard.step is None else max(0.0, now - heard.progressed_at),
            step_timeout_s=beat.step_timeout_s,
            suspects=tuple(sorted({hit.node for hit in hits if hit.node})),
            heard=heard.ourselves,
            rescued=bool(hits),
        )

    def _nodes(self, jobs: tuple[JobSight, ...]) -> dict[NodeName, NodeSight]:
        known = {job.attempt.job for job in jobs}
        strangers = Counter(
            name
            for row in self.cluster.jobs.values()
            if row.state is JobState.RUNNING and row.id not in known
            for name in row.nodes
        )
        drained = self.journal.drained()
        return {
            name: NodeSight(
                name=name,
                leaf=self._leaves.get(name, ""),
                responding=row.responding,
                down=row.down,
                drained=row.drained,
                ours=row.reason.startswith(TAG) and name in drained,
                idle=row.state is NodeState.IDLE and not row.flags,
                strangers=strangers[name],
            )
            for name, row in self.cluster.nodes.items()
        }

    def _seen(self, node: NodeSight) -> NodeSight:
        row = self._rows.get(node.name)
        if row is None or row.answer is Answer.UNKNOWN:
            return node
        lasted = row.until - row.since
        if row.answer is Answer.ANSWERS:
            return replace(node, slurmd=row.answer, answering_s=lasted)
        return replace(node, slurmd=row.answer, away_s=lasted, away_probes=row.probes)

    def _probe(self, names: tuple[NodeName, ...]) -> None:
        began = self.clock.monotonic()
        addresses: dict[NodeName, Address] = {
            name: (row.address, row.port or self._port or SLURMD_PORT)
            for name in names
            if (row := self.cluster.nodes.get(name))
        }
        answers = self.prober.probe(addresses, PROBE_DEADLINE_S) if addresses else {}
        ended = self.clock.monotonic()
        self.probes.update(answers.values())
        rows = {}
        for name, answer in answers.items():
            before = self._rows.get(name)
            if before and before.answer.away == answer.away and before.answer is not Answer.UNKNOWN:
                rows[name] = _Row(answer, before.since, ended, before.probes + 1)
            else:
                rows[name] = _Row(answer, began, ended, 1)
        # A row that was not carried on this time is broken, unless it is only the other caller's turn.
        kept = {name: row for name, row in self._rows.items() if name not in rows and ended - row.until < _STALE_S}
        self._rows = {**kept, **rows}

    def _find_leaves(self) -> dict[NodeName, str]:
        leaves = {
            name: switch.name for switch in self.slurm.topology() if switch.level == 0 for name in switch.nodes
        }
        return leaves or {node.name: node.leaf for node in self.journal.nodes() if node.leaf}


_STALE_S = 3.0


def slurmd_port(slurm: Slurm) -> int:
    """Return the port slurmd listens on where a node has none of its own."""
    said = re.search(r"^SlurmdPort\s*=\s*(\d+)", slurm.run(["scontrol", "show", "config"]), re.MULTILINE)
    return int(said[1]) if said else SLURMD_PORT
