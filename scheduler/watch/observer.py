"""Gathering the evidence: asks Slurm, probes nodes, reads the heartbeats; draws no conclusion."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import JobId
from deeplink.scheduler.liveness.heartbeats import NOTHING_SAID, AgentReport, words
from deeplink.scheduler.liveness.probe import slurmd_port
from deeplink.scheduler.recovery.evidence import (
    FORGOTTEN_S,
    TAG,
    JobSnapshot,
    NodeSnapshot,
    Snapshot,
    WatchPolicy,
    controls,
    targets,
    tense,
)
from deeplink.scheduler.slurm.client import SLURMD_PORT, Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.memory import BootHistory, Carried, HealthHistory, JournalCache, ProbeHistory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.liveness.heartbeats import HeartbeatTable, LauncherHeartbeat
    from deeplink.scheduler.liveness.probe import Address, Prober
    from deeplink.scheduler.recovery.evidence import ProbeResult
    from deeplink.scheduler.recovery.records import NodeRecord
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow
    from deeplink.scheduler.watch.memory import BootAges

log = logging.getLogger(__name__)

COMMAND_S = 8.0
"""Bound on one command: a dead controller is given up after 4 to 9 s by Slurm's own clients (measured)."""
OWNER_S = 2.0  # bound on the question whose job it is: a call waits for it, and holds a thread of the server
TOPOLOGY_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClusterAnswers:
    """What Slurm said last, and when."""

    at: float
    jobs: Mapping[JobId, JobRow] = field(default_factory=dict)
    nodes: Mapping[NodeName, NodeRow] = field(default_factory=dict)
    problem: str = ""


class Observer:
    """Sees the cluster for the watchdog. One thread only, but for what the server asks."""

    def __init__(
        self,
        *,
        slurm: Slurm,
        prober: Prober,
        heartbeats: HeartbeatTable,
        journal: Journal,
        clock: Clock,
        policy: WatchPolicy,
    ) -> None:
        self.slurm, self.heartbeats, self.journal, self.clock, self.policy = (
            slurm,
            heartbeats,
            journal,
            clock,
            policy,
        )
        self.cluster = ClusterAnswers(at=float("-inf"))
        self.memory = JournalCache(journal=journal)
        self.doubted = self._cut_off = self.tense = False
        self._probed = ProbeHistory(prober=prober, clock=clock)
        self._boots, self._wellness = BootHistory(), HealthHistory()
        self._doubted_at, self._mute_s = float("-inf"), 0.0
        self._since_unix = clock.unix()  # we have listened since then without a gap
        self._leaves: dict[NodeName, str] = {}
        self._leaves_at = float("-inf")
        self._port = 0

    @property
    def probes(self) -> Counter[ProbeResult]:
        """How probes were answered, since this was cleared."""
        return self._probed.counts

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
            now = self.clock.monotonic()
            self._boots.note(nodes.values(), now)
            self.cluster = ClusterAnswers(now, jobs, nodes)

    def look(self) -> Snapshot:
        """Return what is to be seen now; probes where there is suspicion, for at most half a second."""
        now = self.clock.monotonic()
        if self.doubted:
            self._doubted_at = now
        self._forgive_mute(now)
        heard = [
            (one, self.cluster.jobs[JobId(one.beat.attempt.job)])
            for one in self.heartbeats.all()
            if self._ours(one)
        ]
        heard.sort(key=lambda one: one[0].beat.attempt.job)  # the same order each time: the first one names things
        jobs = tuple(self._job(one, row, now) for one, row in heard)
        said = words(
            self.heartbeats.attended(), ((one, frozenset(row.nodes)) for one, row in heard), now, self.policy
        )
        before = self._nodes(jobs, said, now)
        suspicious = tense(jobs, self.policy, cut_off=self._cut_off)
        self.tense = bool(suspicious)
        self.probe_now(targets(suspicious, before, self.policy))
        nodes = self._probed.seen(before, now)
        lately = self._given_up_lately(nodes)
        return Snapshot(
            jobs=jobs,
            nodes=nodes,
            controller=not self.cluster.problem,
            controller_problem=self.cluster.problem,
            dead_lately=frozenset(name for name, leaf in lately.items() if not leaf),
            leaves_lately=frozenset(leaf for leaf in lately.values() if leaf),
        )

    def _given_up_lately(self, nodes: Mapping[NodeName, NodeSnapshot]) -> dict[NodeName, str]:
        """Return the nodes given up within the brake's window, and the leaf in whose name; empty: their own."""
        # Nodes drained for what their checks find are not among them: those have a brake of their own.
        since = self.clock.unix() - self.policy.brake_s
        lately = {}
        for name, began in self.memory.drained().items():
            node = nodes.get(name)
            if began >= since and not (node and node.sick):
                lately[name] = node.leaf if node and node.of_leaf else ""
        return lately

    def knows(self, name: NodeName) -> bool:
        """Return whether Slurm knows the node; True while it has not been heard. From any thread."""
        nodes = self.cluster.nodes
        return not nodes or name in nodes

    @property
    def is_silent(self) -> bool:
        """Whether Slurm did not answer when it was asked last, or was not asked yet."""
        return bool(self.cluster.problem) or self.cluster.at < 0.0

    def owner(self, job: int) -> str:
        """Return the user whose job it is, by what Slurm said last; empty where it said nothing of it."""
        row = self.cluster.jobs.get(JobId(job))
        return row.user if row else ""

    def asked_owner(self, job: int) -> str:
        """Ask Slurm whose job it is."""
        return Slurm(partial(self.slurm.run, timeout_s=OWNER_S)).job(job).user

    def nodes_at(self, hosts: Collection[str]) -> frozenset[NodeName] | None:
        """Return the nodes that have one of these host names or addresses; None while Slurm has not been heard."""
        named = {name for host in hosts for name in (host, host.partition(".")[0])} - {"localhost"}
        rows = self.cluster.nodes.values()
        return frozenset(row.name for row in rows if {row.name, row.host, row.address} & named) if rows else None

    def reach(self, name: NodeName) -> bool | None:
        """Return whether a node answered when it was probed last; None when that says nothing now."""
        return self._probed.reach(name)

    def lost(self, name: NodeName) -> bool:
        """Return whether our own probes miss a node for as long as a death takes; not while we doubt ourselves."""
        away_s, probes = self._probed.away(name)
        return not self.doubted and probes >= self.policy.away_probes and away_s >= self.policy.doubt_s

    def probe_now(self, names: tuple[NodeName, ...]) -> None:
        """Probe these nodes, suspicious or not, for at most half a second."""
        addresses: dict[NodeName, Address] = {
            name: (row.address, row.port or self._port or SLURMD_PORT)
            for name in names
            if (row := self.cluster.nodes.get(name))
        }
        self._probed.probe(addresses)

    def probe_suspects(self, names: tuple[NodeName, ...]) -> None:
        """Probe these nodes, and a few others where one is silent: alone it would look as if it were us."""
        self.probe_now(names)
        if any(self.reach(name) is False for name in names):
            others = (name for name, row in self.cluster.nodes.items() if name not in names and not row.down)
            self.probe_now(controls(others))

    def silent(self, names: Iterable[NodeName]) -> frozenset[NodeName]:
        """Return which of these nodes do not answer; those of which nothing is known now are probed first."""
        asked = tuple(names)
        untold = tuple(name for name in asked if self.reach(name) is None)
        if untold:
            self.probe_now(untold)
        return frozenset(name for name in asked if self.reach(name) is False)

    def vanished(self) -> tuple[int, ...]:
        """Return the jobs that Slurm has forgotten and that are silent for long: they ended while we were away."""
        now = self.clock.monotonic()
        silent = [heard.beat.attempt.job for heard in self.heartbeats.all() if now - heard.heard_at > FORGOTTEN_S]
        return () if self.cluster.problem else tuple(job for job in silent if JobId(job) not in self.cluster.jobs)

    def doubt(self, *, network: bool) -> None:
        """Note that we doubt ourselves; `network`: our own network."""
        self.doubted, self._cut_off = True, self._cut_off or network

    def trust(self) -> None:
        """Note that we trust ourselves again. What was not heard over a network in doubt says nothing."""
        if self._cut_off:
            self._probed.forget()
            self._begin_anew(away=False)
        self.doubted = self._cut_off = False

    def forgive(self) -> None:
        """Forget every unbroken row: it was we who were away."""
        self._probed.forget()
        self._begin_anew(away=True)

    def _begin_anew(self, *, away: bool) -> None:
        self._since_unix = self.clock.unix()
        self.heartbeats.forgive(self.clock.monotonic(), away=away)

    def carry(self) -> Carried:
        """Return what was seen, for a watchdog that is started again at once should we be killed."""
        unix = self.clock.unix()
        return Carried(unix, self._since_unix, self._probed.carry(unix - self.clock.monotonic()))

    def take_over(self, carried: Carried | None, nodes: Iterable[NodeRecord]) -> None:
        """Begin with what is on record, and with what the one before us saw, where nothing was missed since."""
        now, unix = self.clock.monotonic(), self.clock.unix()
        if carried:
            self._since_unix = carried.since_unix
            self._probed.take_over(carried.away, unix - now)
        since_unix = carried.since_unix if carried else unix
        self.heartbeats.restore(self.journal.jobs(), now, unix, nodes, since_unix=since_unix)

    def _forgive_mute(self, now: float) -> None:
        """Let silences begin again where none of several launchers was heard for long, and one is now."""
        # It may have been our port that was closed: the others are heard a moment later.
        ages = [now - one.heard_at for one in self.heartbeats.all() if one.ourselves and not one.beat.phase.ended]
        before, self._mute_s = self._mute_s, min(ages) if len(ages) > 1 else 0.0
        if before >= self.policy.launcher_lost_s / 2 > self._mute_s:
            self._begin_anew(away=False)

    def called(self, job: int) -> str:
        """Return what a job is called, `12_3` for a task of an array; its raw id where Slurm does not know it."""
        row = self.cluster.jobs.get(JobId(job))
        return row.label if row else str(job)

    def _ours(self, heard: LauncherHeartbeat) -> bool:
        """Whether Slurm confirms the job, and that it is of the user who beat: else it is none of our business."""
        row = self.cluster.jobs.get(JobId(heard.beat.attempt.job))
        return row is not None and (not heard.beat.user or row.user == heard.beat.user)

    def _job(self, heard: LauncherHeartbeat, row: JobRow, now: float) -> JobSnapshot:
        beat, age = heard.beat, max(0.0, now - heard.heard_at)
        remembered, known = self.memory.of(beat.attempt), self.cluster.nodes
        return JobSnapshot(
            attempt=beat.attempt,
            label=row.label,
            phase=beat.phase,
            state=row.state,
            reason=row.reason,
            restarts=row.restarts,
            requeueable=row.requeueable,
            nodes=row.nodes,
            rank_nodes=beat.nodes,
            spares=beat.spares,
            batch_host=row.batch_host,
            beat_age_s=age,
            agents_silent={
                node.name: node.silent_s + (age if node.silent_s >= self.policy.tense_agent_s else 0.0)
                for node in (() if heard.missed_s else beat.node_beats)  # what it said before says nothing of now
                if not known or node.name in known
            },
            suspects=remembered.suspects,
            heard=heard.ourselves,
            missed_s=heard.missed_s,
            doubted=heard.missed_s > 0.0 or heard.heard_at <= self._doubted_at,
            rescued=remembered.rescued,
            boots=heard.boots,
            told=remembered.told,
        )

    def _nodes(
        self, jobs: tuple[JobSnapshot, ...], said: Mapping[NodeName, AgentReport], now: float
    ) -> dict[NodeName, NodeSnapshot]:
        known = {job.attempt.job for job in jobs}
        strangers = Counter(
            name
            for row in self.cluster.jobs.values()
            if row.state is JobState.RUNNING and row.id not in known
            for name in row.nodes
        )
        rows, unix = self.cluster.nodes, self.clock.unix()
        ours = {name for name in self.memory.drained() if name in rows and rows[name].reason.startswith(TAG)}
        self._wellness.note(ours, said, now, self.policy)
        return {
            name: self._node(
                row,
                said.get(name, NOTHING_SAID),
                self._boots.of(name, now, unix),
                strangers=strangers[name],
                well_s=self._wellness.age_s(name, now) if name in ours else 0.0,
                ours=name in ours,
            )
            for name, row in rows.items()
        }

    def _node(
        self, row: NodeRow, said: AgentReport, boots: BootAges, *, strangers: int, well_s: float, ours: bool
    ) -> NodeSnapshot:
        return NodeSnapshot(
            name=row.name,
            leaf=self._leaves.get(row.name, ""),
            responding=row.responding,
            down=row.down,
            drained=row.drained,
            ours=ours,
            strangers=strangers,
            why=row.reason.removeprefix(TAG) if ours else "",
            findings=said.findings,
            heard_s=said.heard_s,
            attended_s=said.attended_s,
            well_s=well_s,
            boot_id=said.boot_id,
            booted_s=boots.booted_s,
            boot_shown=row.boot_time,
            slurmd_restarted_s=boots.slurmd_restarted_s,
            slurmd_age_s=boots.slurmd_age_s,
        )

    def _find_leaves(self) -> dict[NodeName, str]:
        leaves = {
            name: switch.name for switch in self.slurm.topology() if switch.level == 0 for name in switch.nodes
        }
        return leaves or {node.name: node.leaf for node in self.journal.nodes() if node.leaf}
