"""Evidence -> verdicts, each with its reasons, and what each asks to be done. Pure.

docs/verdicts.md has the table; `recovery_steps` makes of each remedy one command after another. The order of
thought: is it us? a switch? more at once than can be believed? Only then is a node called dead, sick or without
its slurmd, or a job restarted. `witnesses` says what proves a node dead; docs/decisions/0006-recovery-ladder.md,
0021-whom-to-blame.md and 0043-witnesses.md say why each rule is as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.recovery.evidence import ProbeResult, Remedy, Verdict
from deeplink.scheduler.recovery.node_rules import (
    about_leaf,
    answers,
    began_again,
    beyond_help,
    blamed,
    brake,
    counting,
    dead_nodes,
    is_lost,
    lost_slurmds,
    missed,
    rebooted,
    returning,
    sick_nodes,
    silent_leaves,
    storage_frozen,
    waits_for,
)
from deeplink.scheduler.recovery.records import IncidentKind, Phase
from deeplink.scheduler.recovery.witnesses import is_braked
from deeplink.scheduler.slurm.states import LAUNCH_FAILED, JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.core.types import NodeName
    from deeplink.scheduler.recovery.evidence import JobSnapshot, NodeSnapshot, Snapshot, WatchPolicy

_KINDS = {
    JobState.PREEMPTED: (IncidentKind.PREEMPTED, "Slurm gave its nodes to another job"),
    JobState.TIMEOUT: (IncidentKind.TIME_LIMIT, "it reached its time limit"),
    JobState.DEADLINE: (IncidentKind.TIME_LIMIT, "it reached its deadline"),
    JobState.OUT_OF_MEMORY: (IncidentKind.OUT_OF_MEMORY, "Slurm ended it for the memory it used"),
}


def judge(snapshot: Snapshot, policy: WatchPolicy) -> tuple[Verdict, ...]:
    """Return what is wrong, the gravest first; empty when all is well or too little is known."""
    if us := doubts(snapshot):
        return (Verdict(kind=IncidentKind.WATCHDOG_PARTITIONED, remedy=Remedy.NOTHING, reasons=us),)
    leaves = silent_leaves(snapshot.nodes)
    switches = [verdict for leaf in leaves.values() for verdict in about_leaf(leaf, snapshot, policy, len(leaves))]
    cut_off = {node.name for leaf in leaves.values() for node in leaf}
    dead = dead_nodes(snapshot, policy, cut_off)
    held = brake(dead, snapshot, policy)
    lost: set[NodeName | None] = {*cut_off, *dead}
    given_up = {verdict.node: verdict.leaf for verdict in switches if verdict.node} | dict.fromkeys(dead, "")
    return (
        *switches,
        *silent_agents(snapshot, policy),
        *[blamed(snapshot, policy, node, why, held) for node, why in dead.items()],
        *lost_slurmds(snapshot, policy, lost),
        *sick_nodes(snapshot, policy, lost),
        *([] if held else [each for job in snapshot.jobs for each in about_job(job, snapshot, policy, given_up)]),
        *endings(snapshot),
        *([] if held else returning(snapshot, policy)),
    )


# Is it us?


def doubts(snapshot: Snapshot) -> tuple[str, ...]:
    """Return why we should not believe our own eyes now; empty when we may."""
    away = () if snapshot.controller else (f"slurmctld does not answer: {snapshot.controller_problem}",)
    return (*away, *cut_off(snapshot))


def cut_off(snapshot: Snapshot) -> tuple[str, ...]:
    """Return why our own network may be at fault; empty where nothing speaks for that."""
    tried = [
        node
        for node in snapshot.nodes.values()
        if node.slurmd is not ProbeResult.UNKNOWN and not node.down and not _given_up(node, snapshot)
    ]
    away = sum([node.slurmd.away for node in tried])
    if away * 2 <= len(tried):
        return ()
    return (f"{away} of {len(tried)} nodes do not answer us: more likely our own network is at fault",)


def _given_up(node: NodeSnapshot, snapshot: Snapshot) -> bool:
    """Whether its silence is proved, and known for what it is: it says nothing of us."""
    # While a job is being taken off such nodes they alone may be probed.
    return node.slurmd.away and (node.name in snapshot.dead_lately or node.leaf in snapshot.leaves_lately)


# Are many agents silent at once? Then it is what they share, not they.


def silent_agents(snapshot: Snapshot, policy: WatchPolicy) -> list[Verdict]:
    """Return that agents are silent at once though their nodes are not: one verdict at most; nothing is done."""
    # One of which only the journal knows may have been taken away while no one listened.
    standing = [
        node
        for node in snapshot.nodes.values()
        if node.attended_s is not None and node.heard_s is not None and not node.down
    ]
    quiet = [node for node in standing if (node.attended_s or 0.0) >= policy.attend_s and not node.slurmd.away]
    reasons = []
    if len(standing) > 1 and len(quiet) * 2 > len(standing):
        reasons.append(f"{len(quiet)} of {len(standing)} standing agents are not heard any more")
    missing = [(job, _agents_missed(job, snapshot, policy)) for job in snapshot.jobs]
    deaf = [(job, len(silent)) for job, silent in missing if silent and min(silent) >= policy.attend_s]
    reasons += [
        f"the launcher of job {job.name} misses {count} of its {len(_agents(job))} agents at once"
        for job, count in deaf
    ]
    if not reasons:
        return []
    alone = deaf[0][0].attempt if len(deaf) == 1 and not quiet else None
    return [Verdict(kind=IncidentKind.AGENTS_SILENT, remedy=Remedy.NOTHING, reasons=tuple(reasons), attempt=alone)]


def _agents_missed(job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> list[float]:
    """Return for how long a launcher that lives misses its agents, where most are, and their nodes answer us."""
    silent = {name: silent_s for name, silent_s in _agents(job).items() if silent_s >= policy.silence_s}
    answering = [name for name in silent if answers(name, snapshot)]
    most = job.live and job.beat_age_s < policy.tense_beat_s and len(answering) * 2 > len(_agents(job))
    return list(silent.values()) if most and len(silent) > 1 else []


def _agents(job: JobSnapshot) -> dict[NodeName, float]:
    """Return for how long each agent is silent, without those of nodes that the job has lost for good."""
    return {name: silent_s for name, silent_s in job.agents_silent.items() if name in job.nodes}


# Which jobs cannot help themselves, and what would.


def about_job(
    job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy, given_up: Mapping[NodeName, str]
) -> list[Verdict]:
    """Return what is wrong with a job; empty when it is well, helps itself, or can only be waited for."""
    # `given_up`: nodes called dead just now, and the leaf in whose name; empty: their own.
    if waiting := _in_queue(job, snapshot, policy):
        return [waiting]
    if not job.live or _unsettled(job, snapshot, given_up):
        return []
    dead = tuple([name for name in job.nodes if name in given_up])
    dead = dead or tuple([name for name in job.rank_nodes if name in snapshot.nodes and snapshot.nodes[name].down])
    if not dead and _is_everywhere(job, snapshot, policy):
        return []
    verdict = _needs_restart(job, snapshot, policy, given_up, dead)
    return [verdict] if verdict else []


def _is_everywhere(job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> bool:
    """Whether on every other node it would be the same: storage stands still, or most agents do, for a while."""
    silent_s = _agents_missed(job, snapshot, policy)
    patient = bool(silent_s) and min(silent_s) < policy.brake_s
    return patient or IncidentKind.STORAGE_FROZEN in job.told or storage_frozen(snapshot, policy)


def _in_queue(job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> Verdict | None:
    """Return what is to be done about a job that Slurm has put back into its queue; None when nothing is."""
    if job.state is not JobState.PENDING or job.restarts <= job.attempt.restart or job.phase is Phase.SUCCEEDED:
        return None
    if job.reason not in {"BeginTime", "", LAUNCH_FAILED}:
        return None
    # Requeued because of what went wrong, not by its user, and made to wait for the hold's end.
    held = f"Slurm put it back into the queue and holds it ({job.reason or 'no reason given'})"
    ran = not job.phase.ended
    if job.rescued or (ran and job.heard and job.reason == LAUNCH_FAILED):
        return _restart(job, IncidentKind.REQUEUE_HELD, (held,), exclude=_suspects(job, policy))
    # Slurm does that at once when a batch host registers that has lost the job's script: it booted again.
    back = began_again(job, snapshot)
    if back and ran:
        reasons = (f"{', '.join(back)} rebooted under it", held)
        exclude = tuple(sorted({*back, *_suspects(job, policy)}))
        return _restart(
            job, IncidentKind.NODE_REBOOTED, reasons, exclude=exclude, blame=back[0], since_s=job.unheard_s
        )
    return None


def _needs_restart(
    job: JobSnapshot,
    snapshot: Snapshot,
    policy: WatchPolicy,
    given_up: Mapping[NodeName, str],
    dead: tuple[NodeName, ...],
) -> Verdict | None:
    """Return the verdict on a job that lost a node, or its launcher, and cannot help itself, or does not."""
    back = rebooted(job, snapshot, policy)
    leaf = next(filter(None, map(given_up.get, dead)), "") or _gone_leaf(dead, snapshot)
    whole_leaf = {name for name, node in snapshot.nodes.items() if leaf and node.leaf == leaf}
    # A spare that is lost is no loss to the ranks.
    used = {*job.rank_nodes, job.batch_host}
    beyond = tuple(name for name in back if name in used and beyond_help(job, name, snapshot, policy))
    kind, why = None, ""
    if job.phase is Phase.STRANDED and (dead or _is_word_of_now(job, policy)):
        kind, why = IncidentKind.JOB_STRANDED, "its launcher cannot restart the ranks inside the allocation"
    elif beyond and job.phase is not Phase.RECOVERING:
        kind = IncidentKind.NODE_REBOOTED
        why = f"its ranks on {beyond[0]} are gone, and its launcher does nothing about it"
    elif is_lost(job, snapshot, policy, given_up.keys()):
        kind, why = IncidentKind.LAUNCHER_LOST, f"its launcher is not heard for {job.beat_age_s:.1f} s"
    elif lost := waits_for(job, policy, given_up.keys()):
        kind, why = IncidentKind.JOB_STRANDED, f"its launcher waits for {', '.join(lost)}"
    if kind is None:
        return None
    reasons = (f"{', '.join(back)} rebooted under it",) if back else ()
    # A launcher that is stranded has said whom it misses: that is one incident.
    blame = (*dead, *back, *(job.suspects if kind is IncidentKind.JOB_STRANDED else ()))
    alone = kind is IncidentKind.LAUNCHER_LOST and not (dead or back)
    return _restart(
        job,
        IncidentKind.NODE_REBOOTED if back and not dead else kind,
        (*reasons, why),
        held=_launcher_brake(job, snapshot, policy) if alone else (),
        exclude=tuple(sorted({*dead, *back, *whole_leaf, *_suspects(job, policy)})),
        blame=min(blame, key=lambda name: name not in job.rank_nodes, default=None),  # a spare strands no one
        leaf=leaf,
        since_s=job.unheard_s if kind is IncidentKind.LAUNCHER_LOST else 0.0,
    )


def _launcher_brake(job: JobSnapshot, snapshot: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why so many launchers, lost at once on hosts that answer, are not believed; empty when they are."""
    # At once: they fell silent within half of the time that makes one lost. Each has one witness against it, and
    # were our port closed it would be the same: no time ends that doubt. Jobs that Slurm may not start again do
    # not count: they stay as they are.
    apart_s = policy.launcher_lost_s / 2
    live = [one for one in snapshot.jobs if one.live and one.heard and one.requeueable]
    lost = [
        one
        for one in live
        if abs(one.beat_age_s - job.beat_age_s) <= apart_s and answers(one.batch_host, snapshot)
    ]
    count = len(lost)
    every = 1 < count == len(live)
    if not every and not is_braked([0.0] * count, len(live), policy):
        return ()
    return (
        f"brake: {count} of {len(live)} launchers silent at once on hosts that answer: is it our port, or token?",
    )


def _is_word_of_now(job: JobSnapshot, policy: WatchPolicy) -> bool:
    """Whether the launcher spoke since we were away, or in doubt (what it missed may be back), or will not."""
    return (job.heard and not job.doubted) or job.beat_age_s >= policy.launcher_lost_s


def _unsettled(job: JobSnapshot, snapshot: Snapshot, given_up: Mapping[NodeName, str]) -> bool:
    """Whether a node of the job neither answers nor is given up: a requeue would hang on it."""
    for name in job.nodes:
        node = snapshot.nodes.get(name)
        known = node is not None and (node.down or node.slurmd is ProbeResult.ANSWERS)
        if name not in given_up and not known:
            return True
    return False


def _gone_leaf(dead: tuple[NodeName, ...], snapshot: Snapshot) -> str:
    """Return the leaf of which no one is left, should Slurm have given its nodes up before us; else empty."""
    leaf = snapshot.nodes[dead[0]].leaf if dead and dead[0] in snapshot.nodes else ""
    below = [node for node in snapshot.nodes.values() if leaf and node.leaf == leaf]
    return leaf if len(below) > 1 and all(node.down or node.slurmd.away for node in below) else ""


def _suspects(job: JobSnapshot, policy: WatchPolicy) -> tuple[NodeName, ...]:
    return tuple(sorted(missed(job, policy) | set(job.suspects)))


def _restart(
    job: JobSnapshot,
    kind: IncidentKind,
    reasons: tuple[str, ...],
    *,
    exclude: tuple[NodeName, ...],
    held: tuple[str, ...] = (),
    blame: NodeName | None = None,
    leaf: str = "",
    since_s: float = 0.0,
) -> Verdict:
    if not job.requeueable:
        reasons = (*reasons, "the job may not be requeued (--no-requeue)")
    return Verdict(
        kind=kind,
        remedy=Remedy.RESTART if job.requeueable and not held else Remedy.NOTHING,
        reasons=(*reasons, *held),
        attempt=job.attempt,
        node=blame,
        leaf=leaf,
        since_s=since_s,
        exclude=exclude,
    )


# What Slurm itself did or counts.


def endings(snapshot: Snapshot) -> list[Verdict]:
    """Return how jobs were ended, as far as their launchers have not said it already."""
    ended = [(job, *_KINDS[job.state]) for job in snapshot.jobs if job.state in _KINDS]
    return [
        Verdict(kind=kind, remedy=Remedy.NOTHING, reasons=(why,), attempt=job.attempt)
        for job, kind, why in ended
        if job.phase is not Phase.SUCCEEDED and kind not in job.told
    ]


# What came may pass by itself: is it over?


def is_over(verdict: Verdict, snapshot: Snapshot, policy: WatchPolicy) -> bool:
    """Whether what was judged before, and is not judged now, is seen to be over; not seen is not over."""
    if verdict.ends:  # unless that attempt goes on, with all its nodes
        return any(
            job.attempt == verdict.attempt and job.live and job.phase is Phase.RUNNING
            for job in snapshot.jobs
            if job.beat_age_s < policy.tense_beat_s and not missed(job, policy)
        )
    node = None if verdict.leaf else verdict.node
    there = snapshot.nodes.get(node) if node else None
    if node and there is None:
        return True  # Slurm knows no such node any more
    match verdict.incident_kind:
        case IncidentKind.NODE_SICK:
            return there is not None and _tells(there, policy) and not counting(there, storage_frozen=False)
        case IncidentKind.SLURMD_LOST:
            return there is not None and not there.down and _has_slurmd(there)
        case IncidentKind.SWITCH_SUSPECT:
            below = [one for one in snapshot.nodes.values() if one.leaf == verdict.leaf]
            return all(_has_slurmd(one) and not one.down and not one.of_leaf for one in below)
        case _:
            return True


def _tells(node: NodeSnapshot, policy: WatchPolicy) -> bool:
    return node.heard_s is not None and node.heard_s < policy.told_s


def _has_slurmd(node: NodeSnapshot) -> bool:
    return node.slurmd is ProbeResult.ANSWERS or (node.slurmd is ProbeResult.UNKNOWN and node.responding)
