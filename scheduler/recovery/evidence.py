"""What was seen, as frozen values: the whole input of a verdict, apart from the policy. Pure.

Every duration is in seconds by the watchdog's own monotonic clock. Where something was not looked at, or could not
be seen, the value says so (`ProbeResult.UNKNOWN`, None): unknown is never taken for bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from deeplink.core.finding import Severity
from deeplink.scheduler.recovery.records import IncidentKind, Phase, end_id, incident_id
from deeplink.scheduler.recovery.witnesses import Thresholds
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.core.finding import Finding
    from deeplink.core.types import Attempt, NodeName

TAG = "deeplink: "  # how the reason of every node we drain begins: what we did not drain we never resume
HEARD_SINCE_S = 1.0  # between the first failed probe and a report of an agent, so that the report is surely later
HEARD_FOR_S = 20.0  # for so long a report of an agent, one every five seconds, says that its node lives
FORGOTTEN_S = 180.0  # a launcher silent for so long, whose job could not be helped meanwhile, is probed seldom:
SELDOM_S, WHILE_S = 60.0, 3.0  # so often, for so long
MOST_CONTROLS = 5
SLURMD, MOUNT, PROCESSES = "slurmd", "mount", "processes"  # checks whose findings do not make the node sick


class ProbeResult(Enum):
    """What came of trying to reach a node's slurmd."""

    ANSWERS = "answers"
    REFUSES = "refuses"  # the host's kernel is up, slurmd is not
    SILENT = "silent"
    UNKNOWN = "unknown"  # not tried, or our own network is at fault

    away: bool  # slurmd was tried and was not there

    def __init__(self, word: str) -> None:
        self.away = word in {"refuses", "silent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy(Thresholds):
    """When evidence is enough, and what an operator lets the watchdog do."""

    resume: bool = False  # nodes that we drained are taken back; those drained in a leaf's name are in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node, as seen now."""

    name: NodeName
    leaf: str = ""  # its leaf switch; empty where unknown
    slurmd: ProbeResult = ProbeResult.UNKNOWN  # what our newest probe found
    away_s: float = 0.0  # from the first probe of a row without an answer to the newest; 0: answered
    away_probes: int = 0  # length of that row
    answering_s: float = 0.0  # the same for answers
    probed_s: float = 0.0  # since the newest probe
    responding: bool = True  # slurmctld hears from it
    down: bool = False  # Slurm has given it up
    drained: bool = False  # it is to get no new work
    ours: bool = False  # its reason carries our tag and our journal says that we drained it
    strangers: int = 0  # running jobs on it that never beat to us
    why: str = ""  # the incident that its reason names, where it is ours
    findings: tuple[Finding, ...] = ()  # what its checks found wrong, as far as that was told lately
    heard_s: float | None = None  # since we, or a launcher, last heard an agent on it; None: never
    attended_s: float | None = None  # since its standing agent was last heard; None where none is known
    well_s: float = 0.0  # for how long its standing agent has found nothing against its use, unbroken
    boot_id: str = ""  # its kernel's, by the newest report on that; empty where unknown
    booted_s: float | None = None  # since Slurm began to show a later boot time; None: it showed one alone
    boot_shown: str = ""  # its boot time, as Slurm prints it; empty where it prints none
    slurmd_restarted_s: float | None = None  # since Slurm showed that its slurmd was started again
    slurmd_age_s: float | None = None  # since its slurmd was started, by its own clock; None: unknown, or to come

    @property
    def of_leaf(self) -> bool:
        """Whether we gave it up in the name of its leaf switch."""
        incident = self.why.partition(":")[0].partition("@")[0]
        named = incident.endswith(f"-{IncidentKind.SWITCH_SUSPECT}-{self.leaf}")
        return self.ours and bool(self.leaf) and named

    @property
    def sick(self) -> bool:
        """Whether we drained it for what its own checks found."""
        return self.ours and f"-{IncidentKind.NODE_SICK}-" in self.why

    @property
    def heard_since(self) -> bool:
        """Whether an agent on it was heard lately while its slurmd did not answer: then the node lives."""
        # A word after the newest probe says nothing of that: the node may just have come back. Nor does one of
        # long ago: first its slurmd may have been gone, or the network bad, and then the node itself.
        if not self.slurmd.away or self.heard_s is None or not self.probed_s <= self.heard_s < HEARD_FOR_S:
            return False
        return self.away_s + self.probed_s - self.heard_s >= HEARD_SINCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """One job that sends us heartbeats, as seen now."""

    attempt: Attempt  # the newest attempt that sent heartbeats
    phase: Phase  # by its newest heartbeat
    state: JobState | None  # Slurm's word; None when Slurm does not know the job
    nodes: tuple[NodeName, ...]  # what Slurm has allocated now
    beat_age_s: float  # since its newest heartbeat, or since we came back if that was later
    reason: str = ""  # why, says Slurm, it waits
    restarts: int = 0  # Slurm's count; greater than `attempt.restart` once Slurm has started it again
    requeueable: bool = True  # whether Slurm may start it again
    rank_nodes: tuple[NodeName, ...] = ()  # where its ranks run, by its newest heartbeat
    spares: tuple[NodeName, ...] = ()  # what rests, by the same
    batch_host: NodeName | None = None  # where its launcher runs
    # For how long its launcher has surely missed which node's agent: the heartbeat's age is added.
    agents_silent: Mapping[NodeName, float] = field(default_factory=dict)
    suspects: tuple[NodeName, ...] = ()  # nodes its launcher blamed in incidents of this attempt
    heard: bool = True  # we ourselves have heard it since we began, or came back
    doubted: bool = False  # its newest heartbeat came before we last doubted ourselves
    missed_s: float = 0.0  # for how long it had not been heard when we came back; 0 where it has been heard since
    rescued: bool = False  # an incident of this job is open: it did not go back into the queue by its user's will
    boots: Mapping[NodeName, str] = field(default_factory=dict)  # kernels of its nodes as this attempt began
    told: frozenset[str] = frozenset()  # kinds of the incidents on record for this attempt that have not recovered
    label: str = ""  # what the job is called, `12_3` for a task of an array
    running: bool = field(init=False)  # Slurm runs the very attempt whose heartbeats we have
    live: bool = field(init=False)  # it is running, and its launcher has not said that it is done

    def __post_init__(self) -> None:
        """Find out once whether it is live: every rule asks for it."""
        running = self.state is JobState.RUNNING and self.restarts == self.attempt.restart
        object.__setattr__(self, "running", running)
        object.__setattr__(self, "live", running and not self.phase.ended)

    @property
    def name(self) -> str:
        """What the job is called."""
        return self.label or str(self.attempt.job)

    @property
    def unheard_s(self) -> float:
        """Since its newest heartbeat, whether we were there to hear it or not."""
        return self.missed_s + self.beat_age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything seen at one moment."""

    jobs: tuple[JobSnapshot, ...] = ()
    nodes: Mapping[NodeName, NodeSnapshot] = field(default_factory=dict)
    controller: bool = True  # slurmctld answered just now
    controller_problem: str = ""  # why not, for people
    dead_lately: frozenset[NodeName] = frozenset()  # called dead within the brake's window, but for a leaf's
    leaves_lately: frozenset[str] = frozenset()  # leaves given up within the brake's window


def tense(jobs: Iterable[JobSnapshot], policy: WatchPolicy, *, cut_off: bool = False) -> tuple[JobSnapshot, ...]:
    """Return the jobs that give reason to probe; in calm nothing is probed, for slurmd logs each probe."""
    return tuple([job for job in jobs if job.live and _tense(job, policy, cut_off=cut_off)])


def _tense(job: JobSnapshot, policy: WatchPolicy, *, cut_off: bool) -> bool:
    if job.beat_age_s > FORGOTTEN_S and not cut_off and job.beat_age_s % SELDOM_S >= WHILE_S:
        return False
    return (
        job.phase is Phase.STRANDED
        or job.beat_age_s >= policy.tense_beat_s
        or any(silent >= policy.tense_agent_s for silent in job.agents_silent.values())
    )


def targets(
    suspicious: Iterable[JobSnapshot], nodes: Mapping[NodeName, NodeSnapshot], policy: WatchPolicy
) -> tuple[NodeName, ...]:
    """Return whom to probe: the nodes of suspicious jobs, their neighbours on the leaf, and a few others."""
    # The neighbours tell a dead node from a dead switch, the others tell both from a watchdog cut off itself. And
    # nodes of which it is said that their slurmd is gone, and those that may come back.
    theirs = {name for job in suspicious for name in job.nodes if name in nodes}
    theirs |= {
        name
        for name, node in nodes.items()
        if (node.findings or not node.responding) and not node.down and _doubtful_slurmd(node)
    }
    returning = {name for name, node in nodes.items() if node.ours and may_return(node, policy)}
    if not theirs:
        return tuple(sorted(returning))
    leaves = {nodes[name].leaf for name in theirs} - {""}
    near = {name for name, node in nodes.items() if node.leaf in leaves and not node.down}
    rest = controls(name for name, node in nodes.items() if name not in theirs | near and not node.down)
    return tuple(sorted({*theirs, *near, *rest, *returning}))


def controls(names: Iterable[NodeName]) -> tuple[NodeName, ...]:
    """Return a few of these nodes, spread over the cluster, and the same ones each time."""
    # By them it is told whether it is we who hear nothing; an answer is worth more in an unbroken row.
    listed = sorted(names)
    return tuple(listed[:: max(1, len(listed) // MOST_CONTROLS)][:MOST_CONTROLS])


def _doubtful_slurmd(node: NodeSnapshot) -> bool:
    """Whether somebody on the node lives, though Slurm, or the node itself, misses its slurmd."""
    missed = not node.responding and node.heard_s is not None and node.heard_s < FORGOTTEN_S
    return missed or any(one.check == SLURMD and one.severity is not Severity.UNKNOWN for one in node.findings)


def may_return(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    """Whether the node is one that we may take back once it is well: worth a probe."""
    if not node.ours or not node.responding:
        return False
    unheard = node.attended_s is None and node.sick  # that it answers says nothing of what its checks found
    return not unheard and (policy.resume or node.of_leaf)


class Remedy(StrEnum):
    """What is to be done about a verdict."""

    NOTHING = "nothing"
    COMMENT = "comment"  # on the node, for people: its work goes on, and it gets more
    DRAIN = "drain"
    DRAIN_DOWN = "drain-down"
    RESTART = "restart"
    RESUME = "resume"


PASSING = frozenset(
    {IncidentKind.NODE_SICK, IncidentKind.SLURMD_LOST, IncidentKind.AGENTS_SILENT, IncidentKind.SWITCH_SUSPECT}
)
"""Kinds of no job in particular, which pass by themselves and come again: each time is another incident."""
_OF_A_LOST_NODE = frozenset({IncidentKind.JOB_STRANDED, IncidentKind.LAUNCHER_LOST})
"""Kinds that, with a node to blame, are the loss of that node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong, why we think so, and what is to be done."""

    kind: IncidentKind
    remedy: Remedy
    reasons: tuple[str, ...]  # the evidence, for people
    attempt: Attempt | None = None  # the attempt it ends or threatens; None where it is about no job of ours
    node: NodeName | None = None  # the node to blame; None when none is
    leaf: str = ""  # the leaf switch to blame; empty when none is
    since_s: float = 0.0  # how long ago the first evidence was seen
    exclude: tuple[NodeName, ...] = ()  # nodes that the job is not to be started on again
    idle: bool = False  # no rank of the attempt is on the node, nor its launcher: that ends no attempt
    ends: bool = field(init=False)  # whether it ends an attempt
    incident: str = field(init=False)  # the id of the incident this belongs to

    def __post_init__(self) -> None:
        """Name the incident: whoever sees the same fault names the same one."""
        attempt = None if self.incident_kind in PASSING else self.attempt
        object.__setattr__(self, "ends", attempt is not None and not self.idle)
        what = self.leaf or self.node or ""
        name = end_id(attempt) if attempt and self.ends else incident_id(attempt, self.incident_kind, what)
        object.__setattr__(self, "incident", name)

    @property
    def incident_kind(self) -> IncidentKind:
        """The kind of the incident, as it is recorded: of a stranded job the dead node's, say."""
        if self.leaf:
            return IncidentKind.SWITCH_SUSPECT
        return IncidentKind.NODE_DEAD if self.node and self.kind in _OF_A_LOST_NODE else self.kind

    @property
    def passes(self) -> bool:
        """Whether it may be over without anything being done."""
        return self.ends or self.incident_kind in PASSING

    @property
    def order(self) -> str:
        """What is asked, of whom: with the incident's id the name of the action, whoever reaches the verdict."""
        whose = self.attempt if self.remedy is Remedy.RESTART else None
        return "/".join(filter(None, (self.kind, self.remedy, self.node, str(whose or ""))))

    @property
    def key(self) -> str:
        """The verdict in one line: the same one has the same, whoever reaches it."""
        return f"{self.incident}/{self.order}"
