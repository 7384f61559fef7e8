"""Which jobs cannot help themselves, and what would. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import HELD, LAUNCH_FAILED, JobState
from deeplink.scheduler.watch.records import IncidentKind, Phase
from deeplink.scheduler.watch.rules.agents import be_patient
from deeplink.scheduler.watch.rules.queries import answers, is_lost, missed, waits_for
from deeplink.scheduler.watch.rules.reboots import began_anew, beyond_help, rebooted
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.watch.evidence import JobSnapshot, Snapshot, WatchPolicy
    from deeplink.types import NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What was judged before the jobs.

    Attributes:
        given_up: nodes called dead just now, and the leaf in whose name; empty: their own.
        storage_frozen: shared storage stands still.
    """

    given_up: Mapping[NodeName, str]
    storage_frozen: bool = False


def about_job(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy, around: Around) -> list[Verdict]:
    """Return what is wrong with a job; empty when it is well, helps itself, or can only be waited for."""
    waiting = _in_queue(job, sight, policy)
    if waiting:
        return [waiting]
    if not job.live or _unsettled(job, sight, around):
        return []
    dead = tuple(name for name in job.nodes if name in around.given_up) or _downed(job, sight)
    if not dead and (around.storage_frozen or be_patient(job, sight, policy)):
        return []  # on every other node it would be the same
    verdict = _bereft(job, sight, policy, around, dead) or _hung(job, sight, policy, dead)
    return [verdict] if verdict else []


def _in_queue(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> Verdict | None:
    """Return what is to be done about a job that Slurm has put back into its queue; None when nothing is."""
    if job.state is not JobState.PENDING or job.restarts <= job.attempt.restart or job.phase is Phase.SUCCEEDED:
        return None
    if job.fruitless >= policy.most_fruitless and not job.reason.startswith(HELD):
        return _hold(job, f"Slurm is to start it again ({job.reason or 'no reason given'})")
    if job.reason not in {"BeginTime", "", LAUNCH_FAILED}:
        return None
    # Requeued because of what went wrong, not by its user, and made to wait for the hold's end.
    held = f"Slurm put it back into the queue and holds it ({job.reason or 'no reason given'})"
    ran = not job.phase.ended
    if job.rescued or (ran and job.heard and job.reason == LAUNCH_FAILED):
        return _restart(job, IncidentKind.REQUEUE_HELD, (held,), exclude=_suspects(job, policy))
    # Slurm does that at once when a batch host registers that has lost the job's script: it booted anew.
    back = began_anew(job, sight)
    if back and ran:
        reasons = (f"{', '.join(back)} rebooted under it", held)
        exclude = tuple(sorted({*back, *_suspects(job, policy)}))
        return _restart(
            job, IncidentKind.NODE_REBOOTED, reasons, exclude=exclude, blame=back[0], since_s=job.unheard_s
        )
    return None


def _bereft(
    job: JobSnapshot, sight: Snapshot, policy: WatchPolicy, around: Around, dead: tuple[NodeName, ...]
) -> Verdict | None:
    """Return the verdict on a job that lost a node, or its launcher, and cannot help itself, or does not."""
    given_up = set(around.given_up)
    back = rebooted(job, sight, policy)
    leaf = next((around.given_up[name] for name in dead if around.given_up.get(name)), "") or _gone_leaf(
        dead, sight
    )
    whole_leaf = {name for name, node in sight.nodes.items() if leaf and node.leaf == leaf}
    # A spare that is lost is no loss to the ranks.
    used = {*job.rank_nodes, job.batch_host}
    beyond = tuple(name for name in back if name in used and beyond_help(job, name, sight, policy))
    kind, why = None, ""
    if job.phase is Phase.STRANDED and (dead or _is_word_of_now(job, sight, policy)):
        kind, why = IncidentKind.JOB_STRANDED, "its launcher has no rung left inside the allocation"
    elif beyond and job.phase is not Phase.RECOVERING:
        kind, why = (
            IncidentKind.NODE_REBOOTED,
            f"its ranks on {beyond[0]} are gone, and its launcher does nothing about it",
        )
    elif is_lost(job, sight, policy, given_up):
        kind, why = IncidentKind.LAUNCHER_LOST, f"its launcher is not heard for {job.beat_age_s:.1f} s"
    elif lost := waits_for(job, policy, given_up):
        kind, why = IncidentKind.JOB_STRANDED, f"its launcher waits for {', '.join(lost)}"
    if kind is None:
        return None
    reasons = (f"{', '.join(back)} rebooted under it",) if back else ()
    # A launcher that is stranded has said whom it misses: that is one incident.
    blame = (*dead, *back, *(job.suspects if kind is IncidentKind.JOB_STRANDED else ()))
    held = _launcher_brake(job, sight, policy) if kind is IncidentKind.LAUNCHER_LOST and not (dead or back) else ()
    blame = tuple(sorted(blame, key=lambda name: name not in job.rank_nodes))  # a spare strands nobody
    return _restart(
        job,
        IncidentKind.NODE_REBOOTED if back and not dead else kind,
        (*reasons, why),
        held=held,
        exclude=tuple(sorted({*dead, *back, *whole_leaf, *_suspects(job, policy)})),
        blame=next(iter(blame), None),
        leaf=leaf,
        since_s=job.beat_age_s if kind is IncidentKind.LAUNCHER_LOST else 0.0,
    )


def _launcher_brake(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> tuple[str, ...]:
    """Return why so many launchers, lost at once on hosts that answer, are not believed; empty when they are.

    At once: they fell silent within half of the time that makes one lost. Jobs that Slurm may not start again do
    not count: they stay as they are.
    """
    apart_s = policy.launcher_lost_s / 2
    live = [one for one in sight.jobs if one.live and one.heard and one.requeueable]
    lost = [one for one in live if abs(one.silent_s - job.silent_s) <= apart_s and answers(one.batch_host, sight)]
    count, most = len(lost), max(policy.most_lost, len(live) // 10)
    if count <= most:
        return ()
    return (f"brake: {count} launchers silent at once on hosts that answer are more than the {most} believed",)


def _is_word_of_now(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy) -> bool:
    """Whether the launcher spoke since we were away, or in doubt (what it missed may be back), or will not."""
    since_doubt = sight.sure_s is None or job.unheard_s < sight.sure_s
    return (job.heard and since_doubt and not job.deaf_s) or job.silent_s >= policy.launcher_lost_s


def _unsettled(job: JobSnapshot, sight: Snapshot, around: Around) -> bool:
    """Whether a node of the job neither answers nor is given up: a requeue would hang on it."""
    return any(
        name not in around.given_up
        and not answers(name, sight)
        and not (name in sight.nodes and sight.nodes[name].down)
        for name in job.nodes
    )


def _gone_leaf(dead: tuple[NodeName, ...], sight: Snapshot) -> str:
    """Return the leaf of which nobody is left, should Slurm have given its nodes up before us; else empty."""
    leaf = sight.nodes[dead[0]].leaf if dead and dead[0] in sight.nodes else ""
    below = [node for node in sight.nodes.values() if leaf and node.leaf == leaf]
    return leaf if len(below) > 1 and all(node.down or node.slurmd.away for node in below) else ""


def _downed(job: JobSnapshot, sight: Snapshot) -> tuple[NodeName, ...]:
    return tuple(name for name in job.rank_nodes if name in sight.nodes and sight.nodes[name].down)


def _suspects(job: JobSnapshot, policy: WatchPolicy) -> tuple[NodeName, ...]:
    return tuple(sorted(missed(job, policy) | set(job.suspects)))


def _hung(job: JobSnapshot, sight: Snapshot, policy: WatchPolicy, dead: tuple[NodeName, ...]) -> Verdict | None:
    age, limit = job.progress_age_s, job.step_timeout_s
    heard = job.beat_age_s < policy.tense_beat_s and not missed(job, policy)
    if job.phase is not Phase.RUNNING or not heard or dead or age is None or limit <= 0:
        return None
    if sight.thawed_s is not None:
        age = min(age, sight.thawed_s)  # what stood still with the storage has its time anew
    if age < limit + policy.hang_grace_s:
        return None
    why = f"no step for {age:.1f} s (limit {limit:g} s), though its launcher and every node answer"
    if job.fruitless >= policy.most_fruitless:
        return _hold(job, why)
    exclude = _suspects(job, policy) or _elsewhere(job, sight)
    return _restart(job, IncidentKind.RANKS_HUNG, (why,), exclude=exclude, since_s=age)


def _elsewhere(job: JobSnapshot, sight: Snapshot) -> tuple[NodeName, ...]:
    """Return the job's nodes if it has room elsewhere: which of them hangs is not known."""
    free = [node for name, node in sight.nodes.items() if node.idle and name not in job.nodes]
    return job.nodes if len(free) >= len(job.nodes) else ()


def _hold(job: JobSnapshot, why: str) -> Verdict:
    return Verdict(
        kind=IncidentKind.APPLICATION_FAILED,
        remedy=Remedy.HOLD,
        reasons=(
            f"{job.fruitless} starts in a row failed by themselves, without a new step: the application",
            why,
        ),
        attempt=job.attempt,
    )


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
