"""What the watchdog remembers, as frozen values: jobs, attempts, progress, nodes, incidents, actions. Pure.

`deeplink.scheduler.watch.messages` turns them into wire messages and back, `journal` keeps them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.types import Attempt, NodeName

_SLUG = re.compile(r"[a-z][a-z0-9-]{0,63}")


class RecordError(DeepLinkError):
    """A record holds something that cannot be kept."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"{what}: {problem}")
        self.what, self.problem = what, problem


class Phase(Enum):
    """How a job is, by its launcher's word."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STRANDED = "stranded"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the launcher is done: no beats are to be expected any more."""
        return self in {Phase.SUCCEEDED, Phase.FAILED}


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
    JOB_STRANDED = "job-stranded"
    REQUEUE_HELD = "requeue-held"
    SWITCH_SUSPECT = "switch-suspect"
    WATCHDOG_PARTITIONED = "self-in-doubt"
    NODE_BACK = "node-back"
    NODE_SICK = "node-sick"  # its own checks say so
    NODE_CUT_OFF = "node-cut-off"  # it came back with the kernel it had: nobody could reach it, it was not dead
    NODE_REBOOTED = "node-rebooted"  # it came back with another kernel, perhaps before Slurm noticed
    SLURMD_LOST = "slurmd-lost"  # slurmd is gone, the node and its ranks are not
    STRAGGLER = "straggler"
    APPLICATION_FAILED = "application-failed"  # the same failure at the same step: no node is to blame
    OUT_OF_MEMORY = "out-of-memory"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    GRES_LEAKED = "gres-leaked"
    STORAGE_FROZEN = "storage-frozen"
    AGENTS_SILENT = "agents-silent"  # all at once: the wire to them, not they
    WATCHDOG_AWAY = "watchdog-away"  # the one that led did not end in order: nobody watched for a time


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
        """Make what happened one printable line."""
        object.__setattr__(self, "what", printable(self.what))


BEGAN = "first sign of it"
"""What the moment of the first evidence is called: of several, the earliest alone stays in a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Where one rank was when it was asked.

    Attributes:
        pid: its process on its node; 0 where unknown.
        state: of its process: R, S, D, T or Z as in proc(5); empty when there is no such process.
        source: py-spy, faulthandler or kernel; empty when none could be had.
        text: the stack of each thread, or why there is none.
        flight: the newest collectives of torch's flight recorder, as JSON; empty where there is none.
    """

    rank: int
    pid: int = 0
    state: str = ""
    source: str = ""
    text: str = ""
    flight: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that went wrong, from first evidence to recovery.

    Attributes:
        id: unique for ever: `<attempt>-<kind>-<node or rank>` (see `incident_id`).
        kind: what it was; a word of `IncidentKind`, or a newer one of the same form.
        node: the node to blame; None when none is.
        attempt: the attempt it ended; None when it is about no job.
        action: what was done; a word of `Action`, or a newer one of the same form.
        evidence: what was seen, for people.
        began_unix: first evidence.
        detected_unix: verdict reached.
        acted_unix: action done; 0 while open.
        recovered_unix: first training step of the next attempt; 0 while open.
        steps_repeated: steps done again because they came after the last checkpoint.
        number: short number in the journal that holds it, for people; 0 before it is kept.
        timeline: what happened, in order; the journal adds what it knows itself.
        ranks: of the attempt it ended: what stood still meanwhile; 0: not known.
        step_s: seconds of one step of that attempt; 0: not known.
        job_label: what the job is called, `12_3` for a task of an array; the journal adds it, empty where unknown.
        stacks: where its ranks were, when that was asked. Told with it and kept apart: an incident read from a
            journal has none, `Journal.stacks` has them.
    """

    id: str
    kind: str
    began_unix: float
    detected_unix: float
    attempt: Attempt | None = None
    node: NodeName | None = None
    action: str = Action.NONE
    evidence: str = ""
    acted_unix: float = 0.0
    recovered_unix: float = 0.0
    outcome: IncidentOutcome = IncidentOutcome.OPEN
    steps_repeated: int = 0
    number: int = 0
    timeline: tuple[Moment, ...] = ()
    ranks: int = 0
    step_s: float = 0.0
    stacks: tuple[RankStack, ...] = ()
    job_label: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not be listed or found again, and make the evidence one printable line.

        Raises:
            RecordError: no id, or a kind or action that is no lower-case word.
        """
        if not self.id or len(self.id) > 256 or not self.id.isprintable():  # noqa: PLR2004
            raise RecordError(f"incident {self.id!r}", "its id must be 1 to 256 printable characters")
        for name, word in (("kind", self.kind), ("action", self.action)):
            if not _SLUG.fullmatch(word):
                raise RecordError(f"incident {self.id!r}", f"{name} {word!r} is no lower-case word")
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
    """Return the id of an incident: the same facts give the same id, so recording twice changes nothing.

    >>> from deeplink.types import Attempt
    >>> incident_id(Attempt(17, 0, 2), IncidentKind.NODE_DEAD, "n3")
    '17.0.2-node-dead-n3'
    """
    return "-".join(part for part in (str(attempt) if attempt else "cluster", kind, what) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt of a job.

    Attributes:
        nodes: nodes of the ranks, in rank order.
        began_unix: first beat of this attempt.
        beat_unix: newest beat.
        ended_unix: 0 while it is the job's newest and has not ended.
        ring_crossings: leaf-to-leaf hops of the rank ring as launched.
        ring_crossings_stock: the same for Slurm's own order by node name.
        step_timeout_s: without progress for so long the ranks count as hung; 0: not watched.
        first_step: first step it reported; None before the first report.
        last_step: newest step it reported; None before the first report.
        last_step_unix: when, by the rank's own clock; 0 before the first report.
    """

    attempt: Attempt
    phase: Phase
    nodes: tuple[NodeName, ...] = ()
    spares: tuple[NodeName, ...] = ()
    world_size: int = 0
    began_unix: float = 0.0
    beat_unix: float = 0.0
    ended_unix: float = 0.0
    ring_crossings: int = 0
    ring_crossings_stock: int = 0
    step_timeout_s: float = 0.0
    detail: str = ""
    first_step: int | None = None
    last_step: int | None = None
    last_step_unix: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job the watchdog knows, with its attempts, oldest first (never empty).

    Attributes:
        job: its raw id.
        label: what it is called, `12_3` for a task of an array.
    """

    job: int
    name: str
    user: str
    attempts: tuple[AttemptRecord, ...]
    label: str = ""

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


class HealthSeverity(StrEnum):
    """What a finding asks for; in the order of gravity. UNKNOWN asks for nothing: it is never taken for bad."""

    UNKNOWN = "unknown"
    OBSERVE = "observe"
    COMMENT = "comment"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFinding:
    """What one of a node's health checks finds wrong.

    Attributes:
        check: disk, memory, clock, mount, network, gpu, slurmd, processes, or a name of the site's own.
        problem: for people.
        since_unix: when it was first found, by the node's own clock.
    """

    check: str
    severity: HealthSeverity
    problem: str
    since_unix: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node as its newest launcher saw it.

    Attributes:
        topology_address: SLURM_TOPOLOGY_ADDR, e.g. `core.spine0.leaf1.n3`; empty where unknown.
        seen_unix: when its agent last answered.
        silent_s: for how long its agent had been silent when its launcher last looked.
        shards: sealed shards in its store.
        shard_bytes: bytes of them.
        verified_bytes: bytes of those that were read whole there and found right; None: its launcher, an older
            one, does not say.
        free_bytes: free space of the file system they are on.
        job: the job whose launcher told us; 0: the node's standing agent did.
        health: what its own checks found wrong when we last heard of it.
        boot_id: of its kernel: another one after a reboot; empty where unknown.
    """

    name: NodeName
    topology_address: str = ""
    seen_unix: float = 0.0
    silent_s: float = 0.0
    shards: int = 0
    shard_bytes: int = 0
    verified_bytes: int | None = None
    free_bytes: int = 0
    job: int = 0
    health: tuple[HealthFinding, ...] = ()
    boot_id: str = ""

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
    """What one launcher says about its job, once a second.

    Attributes:
        job_label: what the job is called, `12_3` for a task of an array.
        waited_s: since the launcher looked, until it was heard: what it says of nodes is older by so much.
    """

    attempt: Attempt
    phase: Phase
    user: str = ""
    job_name: str = ""
    job_label: str = ""
    nodes: tuple[NodeName, ...] = ()
    spares: tuple[NodeName, ...] = ()
    world_size: int = 0
    node_beats: tuple[NodeRecord, ...] = ()
    progress: tuple[ProgressPoint, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ring_crossings: int = 0
    ring_crossings_stock: int = 0
    step_timeout_s: float = 0.0
    detail: str = ""
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        """Make what people named printable."""
        for name in ("user", "job_name", "job_label", "detail"):
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """Something the watchdog set out to do: written before the first command, closed after the last.

    Attributes:
        key: names attempt, verdict and node: an action is begun once, whoever restarts the watchdog.
        incident: id of the incident it answers.
        remedy: which rung (a word of `deeplink.scheduler.watch.verdict.Remedy`).
        exclude: nodes the job is not to run on again.
        began_unix: when the intent was written.
        done_unix: 0 while it is under way.
        result: how it ended, for people.
    """

    key: str
    incident: str
    remedy: str
    attempt: Attempt | None
    node: NodeName | None
    exclude: tuple[NodeName, ...] = ()
    reason: str = ""
    began_unix: float = 0.0
    done_unix: float = 0.0
    result: str = ""

    def __post_init__(self) -> None:
        """Make the reason printable, which quotes what was seen."""
        object.__setattr__(self, "reason", printable(self.reason))
