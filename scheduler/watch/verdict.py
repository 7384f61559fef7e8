"""Evidence -> verdicts, each with its reasons. Pure: no clock, no process, no wire, no memory.

The order of thought: is it us? is it a switch? are there more dead than can be believed? Only then is a node
called dead or a job restarted. docs/decisions/0006-recovery-ladder.md says why each rule is as it is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.evidence import Answer, JobSight, NodeSight, Policy, Sight
from deeplink.scheduler.watch.records import Kind, Phase, incident_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from deeplink.types import Attempt, NodeName


class Remedy(StrEnum):
    """What is to be done about a verdict."""

    NOTHING = "nothing"
    COMMENT = "comment"  # on the node, for who looks at it: its work goes on, and it gets more
    HOLD = "hold"  # the job, with the reason: started again it would fail again
    DRAIN = "drain"
    DRAIN_DOWN = "drain-down"
    RESTART = "restart"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong, why we think so, and what is to be done.

    Attributes:
        attempt: the attempt it ends or threatens; None where it is about no job of ours.
        node: the node to blame; None when none is.
        leaf: the leaf switch to blame; empty when none is.
        reasons: the evidence, for people.
        since_s: how long ago the first evidence was seen.
        exclude: nodes that the job is not to be started on again.
    """

    kind: Kind
    remedy: Remedy
    reasons: tuple[str, ...]
    attempt: Attempt | None = None
    node: NodeName | None = None
    leaf: str = ""
    since_s: float = 0.0
    exclude: tuple[NodeName, ...] = ()

    @property
    def incident(self) -> str:
        """The id of the incident this belongs to: a job stranded by a dead node is that node's incident."""
        kind = Kind.NODE_DEAD if self.node else self.kind
        return incident_id(self.attempt, kind, self.node or self.leaf)

    @property
    def key(self) -> str:
        """The name of the action: the same verdict has the same key, whoever reaches it."""
        return f"{self.incident}/{self.kind}/{self.remedy}"


def judge(sight: Sight, policy: Policy) -> tuple[Verdict, ...]:
    """Return what is wrong, the gravest first; empty when all is well or too little is known."""
    doubts = _doubts(sight, policy)
    if doubts:
        return (Verdict(kind=Kind.SELF_IN_DOUBT, remedy=Remedy.NOTHING, reasons=doubts),)
    leaves = _silent_leaves(sight.nodes)
    switches = [verdict for leaf in leaves.values() for verdict in _switch(leaf, sight, policy, len(leaves))]
    given_up: set[NodeName | None] = {verdict.node for verdict in switches if verdict.node}
    dead = _dead_nodes(sight, policy, {node.name for leaf in leaves.values() for node in leaf})
    brake = _brake(dead, sight, policy)
    if brake:
        return (*switches, *(_dead(sight, policy, node, why, brake) for node, why in dead.items()))
    given_up |= set(dead)
    return (
        *switches,
        *(_dead(sight, policy, node, why, ()) for node, why in dead.items()),
        *(verdict for job in sight.jobs for verdict in _job(job, sight, policy, given_up)),
        *(_returning(sight, policy)),
    )


def _doubts(sight: Sight, policy: Policy) -> tuple[str, ...]:
    if not sight.controller:
        return (f"slurmctld does not answer: {sight.controller_problem}",)
    tried = [node for node in sight.nodes.values() if node.slurmd is not Answer.UNKNOWN and not node.down]
    away = [node for node in tried if node.slurmd.away]
    if len(away) * 2 > len(tried):
        return (f"{len(away)} of {len(tried)} nodes do not answer us: more likely our own network is at fault",)
    live = [job for job in sight.jobs if _live(job) and job.heard]
    mute = [job for job in live if job.beat_age_s >= policy.tense_beat_s]
    reachable = [job for job in mute if _answers(job.batch_host, sight)]
    if len(live) > 1 and len(mute) == len(live) and reachable:
        return (
            f"none of {len(live)} launchers is heard, though their hosts answer: our own ears may be at fault",
        )
    return ()


def _live(job: JobSight) -> bool:
    return job.running and not job.phase.ended


def _answers(name: NodeName | None, sight: Sight) -> bool:
    return name is not None and name in sight.nodes and sight.nodes[name].slurmd is Answer.ANSWERS


def _silent_leaves(nodes: Mapping[NodeName, NodeSight]) -> dict[str, tuple[NodeSight, ...]]:
    """Return the leaves with two nodes or more of which none answers: their switch is the simpler explanation.

    Nodes given up before (down, or drained by us) do not count: two deaths far apart are no switch.
    """
    members = defaultdict(list)
    for node in nodes.values():
        if node.leaf and not node.down and not node.ours:
            members[node.leaf].append(node)
    return {
        leaf: tuple(sorted(those, key=lambda node: node.name))
        for leaf, those in sorted(members.items())
        if len(those) > 1 and all(node.slurmd is Answer.SILENT for node in those)
    }


def _switch(leaf: tuple[NodeSight, ...], sight: Sight, policy: Policy, leaves: int) -> list[Verdict]:
    names = [node.name for node in leaf]
    hit = [job for job in sight.jobs if _live(job) and set(names) & set(job.nodes)]
    if not hit or not all(_long_away(node, policy) and node.away_s >= policy.silence_s for node in leaf):
        return []
    name = leaf[0].leaf
    why = f"all {len(names)} nodes of {name} ({', '.join(names)}) are silent for {leaf[0].away_s:.1f} s"
    since = max(node.away_s for node in leaf)
    verdict = Verdict(
        kind=Kind.SWITCH_SUSPECT,
        remedy=Remedy.NOTHING,
        reasons=(f"{why}, others answer: the switch",),
        attempt=hit[0].attempt,
        leaf=name,
        since_s=since,
    )
    if not policy.act_on_switch or leaves > 1:
        return [verdict]
    down = [
        replace(verdict, remedy=_node_remedy(node.name, sight, policy), node=node.name)
        for node in leaf
        if any(node.name in job.nodes for job in hit)
    ]
    return [verdict, *down]


def _long_away(node: NodeSight, policy: Policy) -> bool:
    long = node.away_probes >= policy.away_probes and node.away_s >= policy.away_s
    return node.slurmd.away and not node.down and long


def _dead_nodes(sight: Sight, policy: Policy, on_silent_leaf: set[NodeName]) -> dict[NodeName, tuple[str, ...]]:
    dead = {}
    for name, node in sorted(sight.nodes.items()):
        if name in on_silent_leaf or not _long_away(node, policy) or not _others_answer(node, sight):
            continue
        witnesses = _witnesses(node, sight, policy)
        if witnesses:
            said = "refuses connections" if node.slurmd is Answer.REFUSES else "is silent"
            dead[name] = (f"slurmd {said} for {node.away_s:.1f} s ({node.away_probes} probes)", *witnesses)
    return dead


def _others_answer(node: NodeSight, sight: Sight) -> bool:
    mates = [
        other
        for other in sight.nodes.values()
        if other.leaf == node.leaf and other.leaf and other.name != node.name and not other.down and not other.ours
    ]
    witnesses = mates or [other for other in sight.nodes.values() if other.name != node.name]
    return any(other.slurmd is not Answer.UNKNOWN and not _silent(other) for other in witnesses) and any(
        other.slurmd is Answer.ANSWERS for other in sight.nodes.values()
    )


def _silent(node: NodeSight) -> bool:
    return node.slurmd is Answer.SILENT


def _on(name: NodeName, sight: Sight) -> list[JobSight]:
    return [job for job in sight.jobs if _live(job) and name in job.nodes]


def _witnesses(node: NodeSight, sight: Sight, policy: Policy) -> tuple[str, ...]:
    """Return who else misses the node; empty when nobody does, or when one hears it, or it is not our business."""
    jobs = _on(node.name, sight)
    said = []
    for job in jobs:
        silent = job.agents_silent.get(node.name)
        heard = job.beat_age_s < policy.tense_beat_s
        if silent is not None and heard and silent < policy.witness_s:
            return ()
        if silent is not None and heard and silent >= policy.silence_s:
            said.append(f"the launcher of job {job.attempt.job} misses its agent for {silent:.1f} s")
        if job.batch_host == node.name and job.beat_age_s >= policy.silence_s:
            said.append(f"it is the batch host of job {job.attempt.job}, not heard for {job.beat_age_s:.1f} s")
    if jobs and not node.responding and _silent(node) and node.away_s >= policy.silence_s:
        said.append("slurmctld misses it too")
    return tuple(said)


def _lost(job: JobSight, sight: Sight, policy: Policy, given_up: AbstractSet[NodeName | None]) -> bool:
    """Whether the launcher is gone: its host is given up, or it is silent for long though its host answers."""
    host = job.batch_host
    gone = host in given_up or host not in job.nodes or (host in sight.nodes and sight.nodes[host].down)
    if gone:
        return job.beat_age_s >= policy.silence_s
    # One that we never heard may have ended while we were away, and its script may have gone on to something else.
    return job.heard and job.beat_age_s >= policy.launcher_lost_s


def _node_remedy(name: NodeName, sight: Sight, policy: Policy) -> Remedy:
    """DOWN ends what runs on the node: only where a job of ours needs it, and no other job loses by it."""
    jobs = _on(name, sight)
    needed = [job for job in jobs if job.phase is Phase.STRANDED or _lost(job, sight, policy, {name})]
    used = [job for job in jobs if job not in needed and name in job.rank_nodes]
    return Remedy.DRAIN_DOWN if needed and not used and not sight.nodes[name].strangers else Remedy.DRAIN


def _dead(sight: Sight, policy: Policy, name: NodeName, why: tuple[str, ...], brake: tuple[str, ...]) -> Verdict:
    jobs = _on(name, sight)
    needy = [job for job in jobs if job.phase is Phase.STRANDED or _lost(job, sight, policy, {name})]
    silences = [job.agents_silent.get(name, 0.0) for job in jobs]
    return Verdict(
        kind=Kind.NODE_DEAD,
        remedy=Remedy.NOTHING if brake else _node_remedy(name, sight, policy),
        reasons=(*why, *brake),
        attempt=(needy or jobs)[0].attempt,
        node=name,
        since_s=max(sight.nodes[name].away_s, *silences),
    )


def _brake(dead: Mapping[NodeName, object], sight: Sight, policy: Policy) -> tuple[str, ...]:
    count = len(set(dead) | sight.dead_lately)
    most = max(policy.most_dead, len(sight.nodes) // 10)
    if not dead or count <= most:
        return ()
    return (f"brake: {count} dead nodes within {policy.brake_window_s:.0f} s are more than the {most} believed",)


def _job(job: JobSight, sight: Sight, policy: Policy, given_up: AbstractSet[NodeName | None]) -> list[Verdict]:
    if _held(job):
        held = f"Slurm put it back into the queue and holds it ({job.reason or 'no reason given'})"
        return [_restart(job, Kind.REQUEUE_HELD, (held,), exclude=_suspects(job, policy))]
    if not _live(job) or _unsettled(job, sight, given_up):
        return []
    dead = tuple(name for name in job.nodes if name in given_up) or _downed(job, sight)
    exclude = tuple(sorted({*dead, *_suspects(job, policy)}))
    blame = dead[0] if dead else None
    if job.phase is Phase.STRANDED:
        why = ("its launcher has no rung left inside the allocation",)
        return [_restart(job, Kind.JOB_STRANDED, why, exclude=exclude, blame=blame)]
    if _lost(job, sight, policy, given_up):
        why = (f"its launcher is not heard for {job.beat_age_s:.1f} s",)
        return [_restart(job, Kind.LAUNCHER_LOST, why, exclude=exclude, blame=blame, since_s=job.beat_age_s)]
    hung = _hung(job, policy)
    if hung and not dead:
        exclude = _suspects(job, policy) or _elsewhere(job, sight)
        return [_restart(job, Kind.RANKS_HUNG, hung, exclude=exclude, since_s=job.progress_age_s or 0.0)]
    return []


def _held(job: JobSight) -> bool:
    """Whether Slurm requeued it because of what went wrong, not its user, and lets it wait for the hold's end."""
    again = job.state is JobState.PENDING and job.restarts > job.attempt.restart
    return again and job.rescued and job.phase is not Phase.SUCCEEDED and job.reason in {"BeginTime", ""}


def _unsettled(job: JobSight, sight: Sight, given_up: AbstractSet[NodeName | None]) -> bool:
    """Whether a node of the job neither answers nor is given up: a requeue would hang on it."""
    return any(
        name not in given_up and not _answers(name, sight) and not (name in sight.nodes and sight.nodes[name].down)
        for name in job.nodes
    )


def _downed(job: JobSight, sight: Sight) -> tuple[NodeName, ...]:
    return tuple(name for name in job.rank_nodes if name in sight.nodes and sight.nodes[name].down)


def _suspects(job: JobSight, policy: Policy) -> tuple[NodeName, ...]:
    return tuple(sorted(_missed(job, policy) | set(job.suspects)))


def _missed(job: JobSight, policy: Policy) -> set[NodeName]:
    return {name for name, silent_s in job.agents_silent.items() if silent_s >= policy.witness_s}


def _hung(job: JobSight, policy: Policy) -> tuple[str, ...]:
    age, limit = job.progress_age_s, job.step_timeout_s
    heard = job.beat_age_s < policy.tense_beat_s and not _missed(job, policy)
    if job.phase is not Phase.RUNNING or not heard or age is None or limit <= 0:
        return ()
    if age < limit + policy.hang_grace_s:
        return ()
    return (f"no step for {age:.1f} s (limit {limit:g} s), though its launcher and every node answer",)


def _elsewhere(job: JobSight, sight: Sight) -> tuple[NodeName, ...]:
    """Return the job's nodes if it has room elsewhere: which of them hangs is not known."""
    free = [node for name, node in sight.nodes.items() if node.idle and name not in job.nodes]
    return job.nodes if len(free) >= len(job.nodes) else ()


def _restart(
    job: JobSight,
    kind: Kind,
    reasons: tuple[str, ...],
    *,
    exclude: tuple[NodeName, ...],
    blame: NodeName | None = None,
    since_s: float = 0.0,
) -> Verdict:
    if not job.requeueable:
        reasons = (*reasons, "the job may not be requeued (--no-requeue)")
    return Verdict(
        kind=kind,
        remedy=Remedy.RESTART if job.requeueable else Remedy.NOTHING,
        reasons=reasons,
        attempt=job.attempt,
        node=blame,
        since_s=since_s,
        exclude=exclude,
    )


def _returning(sight: Sight, policy: Policy) -> list[Verdict]:
    if not policy.resume:
        return []
    return [
        Verdict(
            kind=Kind.NODE_BACK,
            remedy=Remedy.RESUME,
            reasons=(f"we drained it; it answers for {node.answering_s:.0f} s and is registered",),
            node=name,
        )
        for name, node in sorted(sight.nodes.items())
        if node.ours and node.drained and node.responding and node.answering_s >= policy.resume_s
    ]
