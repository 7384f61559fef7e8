"""A small Slurm that schedules by first fit, for histories that hypothesis makes up: nodes and jobs come, go."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from deeplink.core.types import JobId, NodeName
from deeplink.scheduler.placement.hint.cluster_survey import (
    ClusterState,
    KnownFabric,
    NodeNow,
    Partition,
    Row,
    Ties,
    marked,
)
from deeplink.scheduler.placement.hint.decide import Trial, Weighed, tried
from deeplink.scheduler.placement.hint.decision import Ask, Decision, HintKind, Why
from deeplink.scheduler.placement.hint.reconcile import Deed, HintChange, Memory, Mine, SurveyedCluster, plan
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.topology.graph import Fabric

NODES = tuple(NodeName(f"n{number}") for number in range(8))
PATHS = {node: ("core", f"leaf{place % 4}") for place, node in enumerate(NODES)}  # names do not follow the leaves
SITE = KnownFabric(Ties(Fabric(PATHS)), Fabric(PATHS))
NOTHING = Decision(kind=HintKind.NOTHING, why=Why.BUSY, words="")


def at_once(start: str, nodes: tuple[NodeName, ...]) -> Trial:
    return Trial(start=start, nodes=nodes) if nodes else Trial(refused="busy")


def first_fit(free: list[NodeName]) -> Callable[[Ask, Weighed, frozenset[NodeName]], Decision]:
    """Return the test of gain against a Slurm that takes the first nodes that are free."""

    def settle(ask: Ask, weighed: Weighed, kept: frozenset[NodeName]) -> Decision:
        own = tuple(node for node in free if node not in kept)[: ask.nodes]
        return tried(weighed, lambda _options: at_once("now", own), lambda wish: wish)

    return settle


def survey_of(busy: set[NodeName], planned: set[NodeName] = frozenset()) -> SurveyedCluster:  # type: ignore[assignment]
    """Return the cluster, beside a Slurm that takes the first nodes that are free."""
    now = now_of(busy, planned=planned)
    return SurveyedCluster(now, SITE, first_fit([node for node in NODES if now.nodes[node].ready]))


def now_of(
    busy: AbstractSet[NodeName],
    down: AbstractSet[NodeName] = frozenset(),
    planned: AbstractSet[NodeName] = frozenset(),
) -> ClusterState:
    def node(name: NodeName) -> NodeNow:
        idle, dead = name not in busy, name in down
        return NodeNow(
            dead=dead,
            ready=idle and not dead and name not in planned,
            idle=idle,
            features=frozenset(),
            gres="",
            gres_used="",
            cpus=4,
            free_cpus=4 if idle else 0,
            memory_mib=4000,
            free_mib=4000,
        )

    main = Partition(name="main", up=True, limit_s=1 << 30, whole=False, shares=False, nodes=NODES)
    return ClusterState({"main": main}, {name: node(name) for name in NODES}, "main")


@dataclass
class Job:
    """A job: one of ours where `ask` is set."""

    id: int
    nodes: int
    priority: int
    runs_s: int
    ask: Ask | None = None
    wish: Decision = NOTHING
    wished_at: float = 0.0
    required: frozenset[NodeName] = frozenset()
    planned: frozenset[NodeName] = frozenset()
    reason: str = ""
    switches_since: int | None = None
    on: frozenset[NodeName] = frozenset()
    started: int | None = None
    held_s: int = 0  # how long a hint has been what held it
    overtaken: bool = False


@dataclass
class Cluster:
    """Slurm: the order of its queue is kept, plans are made for those that wait where `plans` is set."""

    plans: bool
    depth: int = 100
    jobs: list[Job] = field(default_factory=list)
    down: set[NodeName] = field(default_factory=set)
    now: int = 0

    @property
    def waiting(self) -> list[Job]:
        return sorted((job for job in self.jobs if job.started is None), key=lambda job: (-job.priority, job.id))

    @property
    def busy(self) -> set[NodeName]:
        running = [job for job in self.jobs if job.started is not None and self.now < job.started + job.runs_s]
        return {node for job in running for node in job.on}

    def schedule(self, since_last: int) -> None:
        """Look at the waiting jobs in order; each that fits starts."""
        kept: set[NodeName] = set()
        for place, job in enumerate(self.waiting):
            if place >= self.depth:
                job.reason = job.reason or "Priority"
                continue
            free = [node for node in NODES if node not in self.busy and node not in self.down and node not in kept]
            chosen = self._chosen(job, free)
            if chosen:
                job.on, job.started, job.planned = frozenset(chosen), self.now, frozenset()
                continue
            job.reason = "Resources"
            job.held_s = job.held_s + since_last if len(free) >= job.nodes else 0
            job.planned = frozenset()
            if self.plans:
                alive = [*free, *(node for node in NODES if node not in self.down and node not in free)]
                job.planned = job.required or frozenset([node for node in alive if node not in kept][: job.nodes])
                kept |= job.planned

    def _chosen(self, job: Job, free: list[NodeName]) -> list[NodeName]:
        if job.required:
            return list(job.required) if job.required <= set(free) else []
        if len(free) < job.nodes:
            return []
        chosen = free[: job.nodes]
        if job.wish.kind is HintKind.SWITCHES:
            if job.switches_since is None:
                job.switches_since = self.now
            by_leaf = sorted(free, key=lambda node: (-sum(PATHS[node] == PATHS[one] for one in free), PATHS[node]))
            chosen = by_leaf[: job.nodes]
            leaves = {PATHS[node] for node in chosen}
            over = self.now - job.switches_since >= job.wish.patience_s
            if len(leaves) > job.wish.switches and not over:
                return []
        return chosen

    def row(self, job: Job) -> Row:
        return Row(
            id=JobId(job.id),
            label=str(job.id),
            state=JobState.PENDING if job.started is None else JobState.RUNNING,
            reason=job.reason,
            user="me" if job.ask else "other",
            partitions=("main",),
            nodes=job.nodes,
            priority=job.priority,
            required=job.required,
            excluded=frozenset(),
            planned=job.planned,
            reservation="",
            comment=marked("", job.required) if job.required else "",
        )

    def survey(self) -> SurveyedCluster:
        planned = {node for job in self.waiting for node in job.planned}
        now = now_of(self.busy, self.down, planned - self.busy)
        return SurveyedCluster(now, SITE, first_fit([node for node in NODES if now.nodes[node].ready]))


@dataclass
class Round:
    """The planner beside it."""

    cluster: Cluster
    memories: dict[int, Memory] = field(default_factory=dict)

    def go(self) -> list[HintChange]:
        rows = [self.cluster.row(job) for job in self.cluster.waiting]
        ours = {job.id: job for job in self.cluster.waiting if job.ask}
        mine = [
            Mine(
                row=self.cluster.row(job),
                ask=job.ask or Ask(),
                wish=job.wish,
                wished_at=job.wished_at,
                memory=self.memories.get(job.id, Memory()),
            )
            for job in ours.values()
        ]
        moves = plan(mine, rows, self.cluster.survey(), float(self.cluster.now))
        for move in moves:
            job = ours[int(move.job.row.id)]
            self.memories[job.id] = move.memory
            if move.deed is not Deed.LEAVE:
                job.reason = ""  # as Slurm does, until it has looked again
                job.wish = move.decision
                job.required = frozenset(move.decision.nodes)
                if move.decision.kind is HintKind.NODES:
                    job.wished_at = self.cluster.now
            elif job.wish.kind is HintKind.NOTHING:
                job.wish = replace(move.decision, kind=HintKind.NOTHING, nodes=())
        return moves
