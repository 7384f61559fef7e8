"""What was seen, as frozen values: the whole input of a verdict, apart from the policy. Pure.

Every duration is in seconds by the watchdog's own monotonic clock. Where something was not looked at, or could not
be seen, the value says so (`ProbeResult.UNKNOWN`, None): unknown is never taken for bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.records import HealthSeverity, IncidentKind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import Attempt, NodeName

TAG = "deeplink: "
"""How the reason of every node we drain begins: what we did not drain we never resume."""


class ProbeResult(Enum):
    """What came of trying to reach a node's slurmd."""

    ANSWERS = "answers"
    REFUSES = "refuses"  # the host's kernel is up, slurmd is not
    SILENT = "silent"
    UNKNOWN = "unknown"  # not tried, or our own network is at fault

    @property
    def away(self) -> bool:
        """Whether slurmd was tried and was not there."""
        return self is ProbeResult.REFUSES or self is ProbeResult.SILENT


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
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
        most_lost: so many launchers are believed to be lost at once though their hosts are there; a tenth of the
            jobs if that is more.
        most_sick: so many nodes are drained for what their checks find; a tenth of the cluster if that is more.
        brake_window_s: how far back the brake looks.
        act_on_switch: whether the nodes of a silent leaf are given up (named after the leaf), or left alone.
        resume: whether nodes that we drained are taken back once they have answered for `resume_s`; those drained
            in a leaf's name are in any case.
        resume_s: see `resume`.
        resume_sick_s: the same for a node that its own checks had drained, and for a leaf, which may come and go.
        told_s: what a node's checks found counts for so long after it was told.
        attend_s: a standing agent not heard for so long is silent.
        most_frozen: stuck mounts on so many nodes at once are the storage's, not the nodes'.
        starved_s: agents that are silent while ranks start are, for so long, only starved.
        patience_s: so long is nothing done about a job all of whose agents are silent at once.
        help_itself_s: a launcher that misses a node which is known to be lost has so long to begin its recovery.
        most_fruitless: so many starts that failed by themselves without one new step, and the job is held.
        leak_s: GPUs counted as used on a node without a job for so long have leaked.
    """

    away_probes: int = 3
    away_s: float = 1.5
    silence_s: float = 2.5
    witness_s: float = 1.5
    tense_agent_s: float = 0.6
    tense_beat_s: float = 2.2
    launcher_lost_s: float = 20.0
    hang_grace_s: float = 3.0
    most_dead: int = 2
    most_lost: int = 2
    most_sick: int = 2
    brake_window_s: float = 60.0
    act_on_switch: bool = True
    resume: bool = False
    resume_s: float = 10.0
    resume_sick_s: float = 60.0
    told_s: float = 20.0
    attend_s: float = 20.0
    most_frozen: int = 3
    starved_s: float = 30.0
    patience_s: float = 60.0
    help_itself_s: float = 5.0
    most_fruitless: int = 3
    leak_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node, as seen now.

    Attributes:
        leaf: its leaf switch; empty where unknown.
        slurmd: what our newest probe found.
        away_s: from the first probe of an unbroken row without an answer to the newest; 0 when it answered.
        away_probes: length of that row.
        answering_s: the same for answers.
        probed_s: since the newest probe.
        responding: slurmctld hears from it.
        down: Slurm has given it up.
        drained: it is to get no new work.
        ours: its reason carries our tag and our journal says that we drained it.
        idle: it runs nothing and could take work.
        strangers: running jobs on it that never beat to us.
        why: the incident that its reason names, where it is ours.
        findings: what its checks found wrong, as far as that was told lately.
        heard_s: since an agent on it was last heard, by us or by the launcher of a job; None: never.
        attended_s: since its standing agent was last heard; None where none is known.
        well_s: for how long its standing agent has told us of nothing that speaks against its use, unbroken.
        boot_id: its kernel's, by the newest word on that; empty where unknown.
        booted_s: since Slurm began to show a later boot time of it; None while it showed one alone.
        boot_shown: its boot time, as Slurm prints it; empty where it prints none.
        slurmd_anew_s: since Slurm began to show that its slurmd was started anew; None while it has not been.
        slurmd_age_s: since its slurmd was started, by the node's own clock; None where Slurm does not show it, or
            a time that is still to come.
        leaked_gpus: GPUs that Slurm counts as used on it though it has no job.
        leaked_s: for how long.
    """

    name: NodeName
    leaf: str = ""
    slurmd: ProbeResult = ProbeResult.UNKNOWN
    away_s: float = 0.0
    away_probes: int = 0
    answering_s: float = 0.0
    probed_s: float = 0.0
    responding: bool = True
    down: bool = False
    drained: bool = False
    ours: bool = False
    idle: bool = False
    strangers: int = 0
    why: str = ""
    findings: tuple[HealthFinding, ...] = ()
    heard_s: float | None = None
    attended_s: float | None = None
    well_s: float = 0.0
    boot_id: str = ""
    booted_s: float | None = None
    boot_shown: str = ""
    slurmd_anew_s: float | None = None
    slurmd_age_s: float | None = None
    leaked_gpus: int = 0
    leaked_s: float = 0.0

    @property
    def of_leaf(self) -> bool:
        """Whether we gave it up in the name of its leaf switch."""
        named = self.why.partition("@")[0].endswith(f"-{IncidentKind.SWITCH_SUSPECT}-{self.leaf}")
        return self.ours and bool(self.leaf) and named

    @property
    def sick(self) -> bool:
        """Whether we drained it for what its own checks found."""
        return self.ours and f"-{IncidentKind.NODE_SICK}-" in self.why

    @property
    def heard_since(self) -> bool:
        """Whether an agent on it was heard lately while its slurmd did not answer: then the node lives.

        A word after the newest probe says nothing of that: the node may just have come back. Nor does one of long
        ago: first its slurmd may have been gone, or the network bad, and then the node itself.
        """
        if not self.slurmd.away or self.heard_s is None or not self.probed_s <= self.heard_s < HEARD_FOR_S:
            return False
        return self.away_s + self.probed_s - self.heard_s >= HEARD_SINCE_S

    def wrong(self, *severities: HealthSeverity) -> tuple[HealthFinding, ...]:
        """Return its findings of these severities."""
        return tuple(finding for finding in self.findings if finding.severity in severities)


HEARD_SINCE_S = 1.0
"""Between the first probe that failed and a word of an agent, so that the word is surely the later one."""
HEARD_FOR_S = 20.0
"""For so long a word of an agent says that its node lives. Standing agents speak every five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """One job that beats to us, as seen now.

    Attributes:
        attempt: the newest attempt that beat.
        label: what the job is called, `12_3` for a task of an array.
        phase: by its newest beat.
        state: Slurm's word; None when Slurm does not know the job.
        reason: Slurm's word on why it waits.
        restarts: Slurm's count; greater than `attempt.restart` once Slurm has started it anew.
        requeueable: whether Slurm may start it again.
        nodes: what Slurm has allocated now.
        rank_nodes: where its ranks run, by its newest beat.
        spares: what rests, by the same.
        batch_host: where its launcher runs.
        beat_age_s: since its newest beat, or since we came back if that was later.
        deaf_s: for how much of that time it may have been we who heard nobody.
        missed_s: for how long it had not been heard when we came back; 0 where it has been heard since.
        agents_silent: for how long its launcher has missed which node's agent: surely, as it may have looked some
            time before it told; of who is missed the beat's age is added.
        progress_age_s: since a rank reported a new step; None before the first report of this attempt.
        step_timeout_s: the job's own limit on that; 0: not watched.
        suspects: nodes its launcher blamed in incidents of this attempt.
        heard: we ourselves have heard it since we began, or came back; else its beats are from the journal.
        rescued: an incident of this job is open: it did not go back into the queue by its user's will.
        boots: the kernel of each of its nodes, by the agents that this attempt began with.
        told: kinds of the incidents on record for this attempt that have not recovered.
        fruitless: starts in a row, the newest among them, that failed by themselves without a new step.
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
    spares: tuple[NodeName, ...] = ()
    batch_host: NodeName | None = None
    agents_silent: Mapping[NodeName, float] = field(default_factory=dict)
    progress_age_s: float | None = None
    step_timeout_s: float = 0.0
    suspects: tuple[NodeName, ...] = ()
    heard: bool = True
    missed_s: float = 0.0
    rescued: bool = False
    boots: Mapping[NodeName, str] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    fruitless: int = 0
    deaf_s: float = 0.0
    label: str = ""

    @property
    def name(self) -> str:
        """What the job is called."""
        return self.label or str(self.attempt.job)

    @property
    def silent_s(self) -> float:
        """For how long it has been silent, and that was not us."""
        return self.beat_age_s - self.deaf_s

    @property
    def unheard_s(self) -> float:
        """Since its newest beat, whether we were there to hear it or not."""
        return self.missed_s + self.beat_age_s

    @property
    def running(self) -> bool:
        """Whether Slurm runs the very incarnation that beat to us."""
        return self.state is JobState.RUNNING and self.restarts == self.attempt.restart

    @property
    def live(self) -> bool:
        """Whether it is running, and its launcher has not said that it is done."""
        return self.running and not self.phase.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything seen at one moment.

    Attributes:
        controller: slurmctld answered just now.
        controller_problem: why not, for people.
        dead_lately: nodes we called dead within the brake's window, those of a leaf given up left out.
        leaves_lately: leaves given up within the brake's window.
        thawed_s: since the shared storage was last seen frozen; None when it never was.
        sure_s: since we last doubted ourselves; None when we never did.
    """

    jobs: tuple[JobSnapshot, ...] = ()
    nodes: Mapping[NodeName, NodeSnapshot] = field(default_factory=dict)
    controller: bool = True
    controller_problem: str = ""
    dead_lately: frozenset[NodeName] = frozenset()
    leaves_lately: frozenset[str] = frozenset()
    thawed_s: float | None = None
    sure_s: float | None = None


MOST_CONTROLS = 5
FORGOTTEN_S = 180.0
"""A launcher silent for so long, whose job could not be helped meanwhile, is probed for no longer."""


def tense(jobs: Iterable[JobSnapshot], policy: WatchPolicy) -> tuple[JobSnapshot, ...]:
    """Return the jobs that give reason to probe; in calm nothing is probed, for slurmd logs each probe."""
    return tuple(job for job in jobs if job.live and _tense(job, policy))


def mute_launchers(jobs: Iterable[JobSnapshot], policy: WatchPolicy) -> tuple[JobSnapshot, ...]:
    """Return the jobs whose launchers are not heard now, if that is all of them, and more than one.

    One that was lost while another was still heard is no sign of anything else.
    """
    heard = tuple(job for job in jobs if job.live and job.heard)
    newest_s = min((job.beat_age_s for job in heard), default=0.0)
    mute = tuple(job for job in heard if job.beat_age_s < newest_s + policy.launcher_lost_s)
    return mute if newest_s >= policy.tense_beat_s and len(mute) > 1 else ()


def long_mute(mute: Iterable[JobSnapshot]) -> bool:
    """Whether no launcher has been heard for so long that no probe of their hosts tells more of that."""
    return min((job.beat_age_s for job in mute), default=0.0) > FORGOTTEN_S


def _tense(job: JobSnapshot, policy: WatchPolicy) -> bool:
    if job.silent_s > FORGOTTEN_S:
        return False
    limit = job.step_timeout_s
    return (
        job.phase is Phase.STRANDED
        or job.beat_age_s >= policy.tense_beat_s
        or any(silent >= policy.tense_agent_s for silent in job.agents_silent.values())
        or (limit > 0 and job.progress_age_s is not None and job.progress_age_s >= 0.8 * limit)
    )


def targets(
    suspicious: Iterable[JobSnapshot], nodes: Mapping[NodeName, NodeSnapshot], policy: WatchPolicy
) -> tuple[NodeName, ...]:
    """Return whom to probe: the nodes of suspicious jobs, their neighbours on the leaf, and a few others.

    The neighbours tell a dead node from a dead switch, the others tell both from a watchdog cut off itself. And
    nodes of which it is said that their slurmd is gone, and those that may come back.
    """
    theirs = {name for job in suspicious for name in job.nodes if name in nodes}
    theirs |= {name for name, node in nodes.items() if _doubtful_slurmd(node)}
    returning = {name for name, node in nodes.items() if may_return(node, policy)}
    if not theirs:
        return tuple(sorted(returning))
    leaves = {nodes[name].leaf for name in theirs} - {""}
    near = {name for name, node in nodes.items() if node.leaf in leaves and not node.down}
    rest = controls(name for name, node in nodes.items() if name not in theirs | near and not node.down)
    return tuple(sorted({*theirs, *near, *rest, *returning}))


def controls(names: Iterable[NodeName]) -> tuple[NodeName, ...]:
    """Return a few of these nodes, spread over the cluster, and the same ones each time.

    By them it is told whether it is we who hear nothing; an answer is worth more in an unbroken row.
    """
    listed = sorted(names)
    return tuple(listed[:: max(1, len(listed) // MOST_CONTROLS)][:MOST_CONTROLS])


def _doubtful_slurmd(node: NodeSnapshot) -> bool:
    """Whether somebody on the node lives, though Slurm, or the node itself, misses its slurmd."""
    missed = not node.responding and node.heard_s is not None and node.heard_s < FORGOTTEN_S
    gone = any(one.check == SLURMD and one.severity is not HealthSeverity.UNKNOWN for one in node.findings)
    return not node.down and (missed or gone)


def may_return(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    """Whether the node is one that we may take back once it is well: worth a probe."""
    unheard = node.sick and node.attended_s is None  # that it answers says nothing of what its checks found
    return node.ours and node.responding and not unheard and (policy.resume or node.of_leaf)


SLURMD, MOUNT, PROCESSES = "slurmd", "mount", "processes"
"""Checks of a node whose findings mean something else than that the node is sick."""
