"""What was seen, as frozen values: the whole input of a verdict, apart from the policy. Pure.

Every duration is in seconds by the watchdog's own monotonic clock. Where something was not looked at, or could not
be seen, the value says so (`Answer.UNKNOWN`, None): unknown is never taken for bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.records import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.types import Attempt, NodeName

TAG = "deeplink: "
"""How the reason of every node we drain begins: what we did not drain we never resume."""


class Answer(Enum):
    """What came of trying to reach a node's slurmd."""

    ANSWERS = "answers"
    REFUSES = "refuses"  # the host's kernel is up, slurmd is not
    SILENT = "silent"
    UNKNOWN = "unknown"  # not tried, or our own network is at fault

    @property
    def away(self) -> bool:
        """Whether slurmd was tried and was not there."""
        return self in {Answer.REFUSES, Answer.SILENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When evidence is enough. Every figure may be changed; the defaults err on the side of waiting.

    Attributes:
        away_probes: so many probes of ours in a row without an answer ...
        away_s: ... over so long, and ...
        silence_s: ... a second witness (its launcher, or the launcher's beats) missing the node for so long, or
            the probes failing for so long where Slurm is the witness, before a node is called dead.
        witness_s: an agent missed for less than this is heard, and heard is not dead.
        tense_agent_s: an agent silent for so long makes us probe.
        tense_beat_s: a launcher silent for so long makes us probe.
        launcher_lost_s: a launcher silent for so long, though all its nodes answer, is lost.
        hang_grace_s: past the job's own step timeout we wait this long for its launcher to act.
        most_dead: so many dead nodes within `brake_window_s` are believed; a tenth of the cluster if that is more.
        brake_window_s: how far back the brake looks.
        act_on_switch: whether the nodes of a silent leaf are given up (named after the leaf), or left alone.
        resume: whether nodes that we drained are taken back once they have answered for `resume_s`.
        resume_s: see `resume`.
    """

    away_probes: int = 3
    away_s: float = 1.5
    silence_s: float = 3.0
    witness_s: float = 1.5
    tense_agent_s: float = 0.6
    tense_beat_s: float = 2.2
    launcher_lost_s: float = 20.0
    hang_grace_s: float = 3.0
    most_dead: int = 2
    brake_window_s: float = 60.0
    act_on_switch: bool = False
    resume: bool = False
    resume_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSight:
    """One node, as seen now.

    Attributes:
        leaf: its leaf switch; empty where unknown.
        slurmd: what our newest probe found.
        away_s: from the first probe of an unbroken row without an answer to the newest; 0 when it answered.
        away_probes: length of that row.
        answering_s: the same for answers.
        responding: slurmctld hears from it.
        down: Slurm has given it up.
        drained: it is to get no new work.
        ours: its reason carries our tag and our journal says that we drained it.
        idle: it runs nothing and could take work.
        strangers: running jobs on it that never beat to us.
    """

    name: NodeName
    leaf: str = ""
    slurmd: Answer = Answer.UNKNOWN
    away_s: float = 0.0
    away_probes: int = 0
    answering_s: float = 0.0
    responding: bool = True
    down: bool = False
    drained: bool = False
    ours: bool = False
    idle: bool = False
    strangers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSight:
    """One job that beats to us, as seen now.

    Attributes:
        attempt: the newest attempt that beat.
        phase: by its newest beat.
        state: Slurm's word; None when Slurm does not know the job.
        reason: Slurm's word on why it waits.
        restarts: Slurm's count; greater than `attempt.restart` once Slurm has started it anew.
        requeueable: whether Slurm may start it again.
        nodes: what Slurm has allocated now.
        rank_nodes: where its ranks run, by its newest beat.
        batch_host: where its launcher runs.
        beat_age_s: since its newest beat.
        agents_silent: for how long its launcher has missed which node's agent, corrected for the beat's age.
        progress_age_s: since a rank reported a new step; None before the first report of this attempt.
        step_timeout_s: the job's own limit on that; 0: not watched.
        suspects: nodes its launcher blamed in incidents of this attempt.
        heard: we ourselves have heard it since we began, or came back; else its beats are from the journal.
        rescued: an incident of this job is open: it did not go back into the queue by its user's will.
    """

    attempt: Attempt
    phase: Phase
    state: JobState | None
    nodes: tuple[NodeName, ...]
    beat_age_s: float
    reason: str = ""
    restarts: int = 0
    requeueable: bool = True
    rank_nodes: tuple[NodeName, ...] = ()
    batch_host: NodeName | None = None
    agents_silent: Mapping[NodeName, float] = field(default_factory=dict)
    progress_age_s: float | None = None
    step_timeout_s: float = 0.0
    suspects: tuple[NodeName, ...] = ()
    heard: bool = True
    rescued: bool = False

    @property
    def running(self) -> bool:
        """Whether Slurm runs the very incarnation that beat to us."""
        return self.state is JobState.RUNNING and self.restarts == self.attempt.restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Everything seen at one moment.

    Attributes:
        controller: slurmctld answered just now.
        controller_problem: why not, for people.
        dead_lately: nodes we called dead within the brake's window.
    """

    jobs: tuple[JobSight, ...] = ()
    nodes: Mapping[NodeName, NodeSight] = field(default_factory=dict)
    controller: bool = True
    controller_problem: str = ""
    dead_lately: frozenset[NodeName] = frozenset()


MOST_CONTROLS = 5
FORGOTTEN_S = 180.0
"""A launcher silent for so long, whose job could not be helped meanwhile, is probed for no longer."""


def tense(jobs: Iterable[JobSight], policy: Policy) -> tuple[JobSight, ...]:
    """Return the jobs that give reason to probe; in calm nothing is probed, for slurmd logs each probe."""
    return tuple(job for job in jobs if _tense(job, policy))


def _tense(job: JobSight, policy: Policy) -> bool:
    if not job.running or job.phase.ended or job.beat_age_s > FORGOTTEN_S:
        return False
    limit = job.step_timeout_s
    return (
        job.phase is Phase.STRANDED
        or job.beat_age_s >= policy.tense_beat_s
        or any(silent >= policy.tense_agent_s for silent in job.agents_silent.values())
        or (limit > 0 and job.progress_age_s is not None and job.progress_age_s >= 0.8 * limit)
    )


def targets(
    suspicious: Iterable[JobSight], nodes: Mapping[NodeName, NodeSight], policy: Policy
) -> tuple[NodeName, ...]:
    """Return whom to probe: the nodes of suspicious jobs, their neighbours on the leaf, and a few others.

    The neighbours tell a dead node from a dead switch, the others tell both from a watchdog cut off itself.
    """
    theirs = {name for job in suspicious for name in job.nodes if name in nodes}
    leaves = {nodes[name].leaf for name in theirs} - {""}
    near = {name for name, node in nodes.items() if node.leaf in leaves and not node.down}
    rest = sorted(name for name, node in nodes.items() if name not in theirs | near and not node.down)
    # Spread over the cluster, and the same ones each time: an answer is worth more in an unbroken row.
    stride = max(1, len(rest) // MOST_CONTROLS)
    controls = rest[::stride][:MOST_CONTROLS] if theirs else []
    returning = [name for name, node in nodes.items() if policy.resume and node.ours and node.responding]
    return tuple(sorted({*theirs, *near, *controls, *returning}))
