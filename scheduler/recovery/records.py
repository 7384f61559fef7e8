"""What the watchdog remembers, as frozen values: jobs, attempts, progress, nodes, incidents, actions. Pure.

`deeplink.core.codec` turns them into messages and rows by the annotations of their fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping  # noqa: TC003 - `core.codec` reads the annotations
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from deeplink.core.codec import stand_in
from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Finding, Severity
from deeplink.core.text import printable
from deeplink.core.types import Attempt, NodeName  # noqa: TC001 - as above

_SLUG = re.compile(r"[a-z][a-z0-9-]{0,63}")


class RecordError(DeepLinkError):
    """A record holds something that cannot be kept."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
        self.what, self.problem = what, problem


class Phase(Enum):
    """How a job is, as its launcher reports."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STRANDED = "stranded"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    ended: bool  # the launcher is done: no more heartbeats are to be expected

    def __init__(self, word: str) -> None:
        self.ended = word in {"succeeded", "failed"}


class IncidentOutcome(Enum):
    """How an incident ended."""

    OPEN = "open"
    RECOVERED = "recovered"
    FAILED = "failed"


class IncidentKind(StrEnum):
    """Kinds of incidents known today. A record may carry another: a launcher may be newer than the watchdog."""

    NODE_SILENT = "node-silent"
    NODE_DEAD = "node-dead"
    RANK_FAILED = "rank-failed"
    LAUNCH_FAILED = "launch-failed"  # what starts the ranks failed, and no rank is known to have
    RANKS_HUNG = "ranks-hung"
    LAUNCHER_LOST = "launcher-lost"
    LAUNCHER_RESTARTED = "launcher-restarted"  # it died and was started again; the ranks went on
    JOB_STRANDED = "job-stranded"
    REQUEUE_HELD = "requeue-held"
    SWITCH_SUSPECT = "switch-suspect"
    WATCHDOG_PARTITIONED = "self-in-doubt"
    NODE_BACK = "node-back"
    NODE_SICK = "node-sick"  # its own checks say so
    NODE_CUT_OFF = "node-cut-off"  # it came back with the kernel it had: no one could reach it, it was not dead
    NODE_REBOOTED = "node-rebooted"  # it came back with another kernel, perhaps before Slurm noticed
    SLURMD_LOST = "slurmd-lost"  # slurmd is gone, the node and its ranks are not
    STRAGGLER = "straggler"
    APPLICATION_FAILED = "application-failed"  # the same failure at the same step: no node is to blame
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    STORAGE_FROZEN = "storage-frozen"
    AGENTS_SILENT = "agents-silent"  # all at once: the wire to them, not they
    WATCHDOG_AWAY = "watchdog-away"  # the one that led did not end in order: no one watched for a time


KNOWN_LATER = frozenset({IncidentKind.NODE_CUT_OFF, IncidentKind.NODE_REBOOTED})
"""What a lost node turns out to have been."""
NODE_LOST = frozenset({IncidentKind.NODE_SILENT, IncidentKind.NODE_DEAD, IncidentKind.JOB_STRANDED}) | KNOWN_LATER
"""Kinds that, with one node at one time, are one thing seen by different eyes."""
OF_THE_APPLICATION = frozenset(
    {
        IncidentKind.RANK_FAILED,
        IncidentKind.RANKS_HUNG,
        IncidentKind.APPLICATION_FAILED,
        IncidentKind.OUT_OF_MEMORY,
    }
)
"""Kinds in which ranks went wrong, and no node, as far as is known."""
RANKS_ENDED = frozenset({IncidentKind.RANK_FAILED, IncidentKind.LAUNCH_FAILED})
"""Kinds that the loss of a node looks like before it is noticed."""


BLAMELESS = frozenset(
    {
        IncidentKind.RANK_FAILED,
        IncidentKind.LAUNCH_FAILED,
        IncidentKind.APPLICATION_FAILED,
        IncidentKind.OUT_OF_MEMORY,
        IncidentKind.PREEMPTED,
        IncidentKind.TIME_LIMIT,
    }
)
"""Kinds for which no node is to blame, whichever they name: the next start may use it again."""


class Action(StrEnum):
    """What was done about an incident; a record may carry another word."""

    NONE = "none"
    COMMENT = "comment"
    RELAUNCH = "relaunch"
    DRAIN = "drain"
    DRAIN_DOWN = "drain-down"
    REQUEUE = "requeue"
    REQUEUE_EXCLUDE = "requeue-exclude"
    RELEASE = "release"
    HOLD = "hold"
    RESUBMIT = "resubmit"


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """One thing that happened in the course of an incident: when (Unix time), and what, for people."""

    unix: float
    what: str

    def __post_init__(self) -> None:
        if not self.what.isprintable():
            object.__setattr__(self, "what", printable(self.what))


BEGAN = "first sign of it"
"""What the moment of the first evidence is called: of several, the earliest alone stays in a timeline."""


LONGEST_STACK = 64 << 10
_LONG = {"longest": LONGEST_STACK}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Where one rank was when it was asked."""

    rank: int
    pid: int = 0  # its process on its node; 0 where unknown
    state: str = ""  # of its process: R, S, D, T or Z as in proc(5); empty when there is no such process
    source: str = ""  # py-spy, faulthandler or kernel; empty when none could be had
    text: str = field(default="", metadata=_LONG)  # the stack of each thread, or why there is none
    flight: str = field(default="", metadata=_LONG)  # torch's newest collectives, as JSON; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that went wrong, from first evidence to recovery."""

    id: str  # made by who sees it first, and the same by whoever does (`end_id`, `incident_id`)
    kind: str  # what it was; a word of `IncidentKind`, or a newer one of the same form
    began_unix: float  # first evidence
    detected_unix: float  # verdict reached
    attempt: Attempt | None = None  # the attempt it ended; None when it is about no job
    node: NodeName | None = None  # the node to blame; None when none is
    action: str = Action.NONE  # what was done; a word of `Action`, or a newer one of the same form
    evidence: str = ""  # what was seen, for people
    acted_unix: float = 0.0  # action done; 0 while open
    recovered_unix: float = 0.0  # first training step of the next attempt; 0 while open
    outcome: IncidentOutcome = IncidentOutcome.OPEN
    steps_repeated: int = 0  # steps done again because they came after the last checkpoint
    number: int = 0  # short number in the journal that holds it, for people; 0 before it is kept
    timeline: tuple[Moment, ...] = ()  # what happened, in order; the journal adds what it knows itself
    ranks: int = 0  # of the attempt: what stood still, where it ended that; the journal adds it. 0: not known
    step_s: float = 0.0  # seconds of one step of that attempt; the journal adds it. 0: not known
    stacks: tuple[RankStack, ...] = ()  # where its ranks were, when that was asked. Told with it and kept apart
    job_label: str = ""  # what the job is called, `12_3` for a task of an array

    def __post_init__(self) -> None:
        """Refuse what could not be listed or found again, and make the evidence one printable line."""
        if not self.id or len(self.id) > 256 or not self.id.isprintable():  # noqa: PLR2004
            raise RecordError(f"incident {self.id!r}", "its id must be 1 to 256 printable characters")
        for name, word in (("kind", self.kind), ("action", self.action)):
            if not _SLUG.fullmatch(word):
                raise RecordError(f"incident {self.id!r}", f"{name} {word!r} is no lower-case word")
        if not self.evidence.isprintable():
            object.__setattr__(self, "evidence", printable(self.evidence))

    @property
    def job(self) -> str:
        """What the job is called; empty where it is about none."""
        return (self.job_label or str(self.attempt.job)) if self.attempt else ""

    @property
    def attempt_name(self) -> str:
        """The attempt, for people: by what its job is called."""
        return f"{self.job}.{self.attempt.restart}.{self.attempt.relaunch}" if self.attempt else ""


def incident_id(attempt: Attempt | None, kind: str, what: str = "") -> str:
    """Return the id of an incident that ends no attempt: whoever sees the same makes the same id.

    The loss of a node is one incident, whatever it turns out to be.

    >>> from deeplink.core.types import Attempt
    >>> incident_id(None, IncidentKind.NODE_SICK, "n3")
    'cluster-node-sick-n3'
    >>> incident_id(Attempt(17, 0, 2), IncidentKind.NODE_DEAD, "n3")
    '17.0.2-node-lost-n3'
    """
    name = "node-lost" if kind in NODE_LOST else kind
    return "-".join(filter(None, (str(attempt) if attempt else "cluster", name, what)))


def end_id(attempt: Attempt) -> str:
    """Return the id of what ended an attempt: it ends once, whoever sees it first, and whatever it is called.

    >>> from deeplink.core.types import Attempt
    >>> end_id(Attempt(17, 0, 2))
    '17.0.2-end'
    """
    return f"{attempt}-end"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt of a job."""

    attempt: Attempt
    phase: Phase
    nodes: tuple[NodeName, ...] = ()  # nodes of the ranks, in rank order
    spares: tuple[NodeName, ...] = ()
    world_size: int = 0
    began_unix: float = 0.0  # first heartbeat of this attempt
    beat_unix: float = 0.0  # newest heartbeat
    ended_unix: float = 0.0  # 0 while it is the job's newest and has not ended
    ring_crossings: int = 0  # leaf-to-leaf hops of the rank ring as launched
    ring_crossings_stock: int = 0  # the same for Slurm's own order by node name
    step_timeout_s: float = 0.0  # what the run was given, for watchdogs of older releases; 0: not watched
    detail: str = ""
    first_step: int | None = None  # first step it reported; None before the first report
    last_step: int | None = None  # newest step it reported; None before the first report
    last_step_unix: float = 0.0  # when, by the rank's own clock; 0 before the first report


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job the watchdog knows, with its attempts, oldest first (never empty)."""

    job: int  # its raw id
    name: str
    user: str
    attempts: tuple[AttemptRecord, ...]
    label: str = ""  # what it is called, `12_3` for a task of an array

    def __post_init__(self) -> None:
        """Call a job of which its launcher, an older one, did not say it by its id."""
        object.__setattr__(self, "label", self.label or str(self.job))

    @property
    def newest(self) -> AttemptRecord:
        """The attempt that counts."""
        return self.attempts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPoint:
    """One report of a training loop: by which rank of which attempt, at which step, when, and what it said."""

    attempt: Attempt
    step: int
    unix: float
    rank: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """How long the ranks' own part of a step was, in one span of time of an attempt. 0: not known."""

    attempt: Attempt
    unix: float  # the end of the span
    span_s: float
    ranks_each: int = 1  # so many ranks share a number, which is the slowest one's; the last one has the rest
    own_s: tuple[float, ...] = ()  # seconds of a step without waiting for others, without checkpoints
    data_s: tuple[float, ...] = ()  # of these, waiting for data


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """A health check's finding as it is sent and kept: the severity is what it asks for."""

    check: str  # disk, memory, clock, mount, network, gpu, slurmd, processes, or a name of the site's own
    severity: str
    problem: str
    since_unix: float = 0.0  # when it was first found, by the node's own clock

    @classmethod
    def of(cls, finding: Finding) -> HealthReport:
        """Return the report of a finding."""
        action, since_unix = finding.severity.action, finding.since_unix
        return cls(check=finding.check, severity=action, problem=finding.text, since_unix=since_unix)

    def finding(self) -> Finding:
        """Return what was found; of a severity that is not known here UNKNOWN."""
        severity = Severity.of_action(self.severity)
        return Finding(severity, self.problem, self.check, since_unix=self.since_unix)


stand_in(Finding, HealthReport, HealthReport.of, HealthReport.finding)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node as its newest launcher saw it."""

    name: NodeName = field(metadata={"wire": "node"})
    topology_address: str = ""  # SLURM_TOPOLOGY_ADDR, e.g. `core.spine0.leaf1.n3`; empty where unknown
    seen_unix: float = 0.0  # when its agent last answered
    silent_s: float = 0.0  # for how long its agent had been silent when its launcher last looked
    shards: int = 0  # sealed shards in its store
    shard_bytes: int = 0  # bytes of them
    verified_bytes: int | None = None  # read whole there and found right; None: an older launcher does not say
    free_bytes: int = 0  # free space of the file system they are on
    job: int = 0  # the job whose launcher told us; 0: the node's standing agent did
    health: tuple[Finding, ...] = ()  # what its own checks found wrong when we last heard of it
    boot_id: str = ""  # of its kernel: another one after a reboot; empty where unknown
    attended_unix: float = 0.0  # when its standing agent was last heard, as is on record; 0: never

    @property
    def leaf(self) -> str:
        """The leaf switch the node hangs on; empty where unknown.

        >>> NodeRecord(name="n3", topology_address="core.spine0.leaf1.n3").leaf
        'leaf1'
        """
        parts = self.topology_address.split(".")
        return parts[-2] if len(parts) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one launcher says about its job, once a second."""

    attempt: Attempt
    phase: Phase
    user: str = ""
    job_name: str = ""
    job_label: str = ""  # what the job is called, `12_3` for a task of an array
    nodes: tuple[NodeName, ...] = ()
    spares: tuple[NodeName, ...] = ()
    world_size: int = 0
    node_beats: tuple[NodeRecord, ...] = ()
    progress: tuple[ProgressPoint, ...] = ()
    rank_times: tuple[RankTimes, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ring_crossings: int = 0
    ring_crossings_stock: int = 0
    step_timeout_s: float = 0.0
    detail: str = ""
    waited_s: float = 0.0  # since the launcher looked, until it was heard

    def __post_init__(self) -> None:
        for name in ("user", "job_name", "job_label", "detail"):
            if not getattr(self, name).isprintable():
                object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """Something the watchdog set out to do: written before the first command, closed after the last."""

    key: str  # names attempt, verdict and node: an action is begun once, whoever restarts the watchdog
    incident: str  # id of the incident it answers
    remedy: str  # which rung (a word of `deeplink.scheduler.recovery.evidence.Remedy`)
    attempt: Attempt | None
    node: NodeName | None
    exclude: tuple[NodeName, ...] = ()  # nodes the job is not to run on again
    reason: str = ""
    began_unix: float = 0.0  # when the intent was written
    done_unix: float = 0.0  # 0 while it is under way
    result: str = ""  # how it ended, for people

    def __post_init__(self) -> None:
        """Make the reason printable, which quotes what was seen."""
        if not self.reason.isprintable():
            object.__setattr__(self, "reason", printable(self.reason))
