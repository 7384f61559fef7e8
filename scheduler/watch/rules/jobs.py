"""Which jobs cannot help themselves, and what would. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.watch.records import Kind, Phase
from deeplink.scheduler.watch.rules.seen import answers, is_lost, live, missed
from deeplink.scheduler.watch.verdict import Remedy, Verdict

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.watch.evidence import JobSight, Policy, Sight
    from deeplink.types import NodeName


def about_job(
    job: JobSight, sight: Sight, policy: Policy, given_up: AbstractSet[NodeName | None]
) -> list[Verdict]:
    """Return what is wrong with a job, when these nodes are given up; empty when it is well or helps itself."""
    if _held(job):
        held = f"Slurm put it back into the queue and holds it ({job.reason or 'no reason given'})"
        return [_restart(job, Kind.REQUEUE_HELD, (held,), exclude=_suspects(job, policy))]
    if not live(job) or _unsettled(job, sight, given_up):
        return []
    dead = tuple(name for name in job.nodes if name in given_up) or _downed(job, sight)
    exclude = tuple(sorted({*dead, *_suspects(job, policy)}))
    blame = dead[0] if dead else None
    if job.phase is Phase.STRANDED:
        why = ("its launcher has no rung left inside the allocation",)
        return [_restart(job, Kind.JOB_STRANDED, why, exclude=exclude, blame=blame)]
    if is_lost(job, sight, policy, given_up):
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
        name not in given_up and not answers(name, sight) and not (name in sight.nodes and sight.nodes[name].down)
        for name in job.nodes
    )


def _downed(job: JobSight, sight: Sight) -> tuple[NodeName, ...]:
    return tuple(name for name in job.rank_nodes if name in sight.nodes and sight.nodes[name].down)


def _suspects(job: JobSight, policy: Policy) -> tuple[NodeName, ...]:
    return tuple(sorted(missed(job, policy) | set(job.suspects)))


def _hung(job: JobSight, policy: Policy) -> tuple[str, ...]:
    age, limit = job.progress_age_s, job.step_timeout_s
    heard = job.beat_age_s < policy.tense_beat_s and not missed(job, policy)
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
