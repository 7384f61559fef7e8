"""Ends the job of a run whose launcher runs on another node than the batch script did.

Where the script's host is dead, nothing else does: with `--no-kill` the job would hold its nodes until its time
limit. Where it lives, the process that holds the launcher's place there ends with the run's exit code, and the
script goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.launch.agent_monitor import CONNECT_S
from deeplink.scheduler.launch.launcher_role import SPOKEN_S
from deeplink.scheduler.liveness.probe import TcpProber, slurmd_port
from deeplink.scheduler.recovery.evidence import TAG, ProbeResult
from deeplink.scheduler.recovery.recovery_steps import comment_of, with_our_comment
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import is_unanswered
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from deeplink.scheduler.launch.launcher_role import RoleClaims
    from deeplink.scheduler.liveness.probe import Prober
    from deeplink.scheduler.slurm.parse import JobRow

log = logging.getLogger(__name__)

HEARD_WAIT_S = 20.0  # for the script's host, where it lives: shared folders may show a new file late
ANSWER_S, AGAIN_S = 3600.0, 1.0  # for how long Slurm is asked again: nobody else ends the job


def end_job(
    job: int,
    restart: int,
    code: int,
    claims: RoleClaims,
    *,
    slurm: Slurm | None = None,
    clock: Clock | None = None,
    prober: Prober | None = None,
) -> None:
    """End the job with the run's exit code, unless its script does, or Slurm has it in its queue again."""
    slurm, clock = slurm or Slurm(), clock or SystemClock()
    try:
        claims.leave_end(code)
    except OSError as problem:
        log.warning("how the run ended cannot be left for its script: %s", problem)
    deadline = clock.monotonic() + ANSWER_S
    while True:
        try:
            row = slurm.job(job)
            is_ours = row.restarts == restart and row.state is JobState.RUNNING
            if is_ours and not _goes_on(row, claims, slurm, clock, prober or TcpProber(clock)):
                _end(row, code, slurm)
        except DeepLinkError as problem:
            if not is_unanswered(problem) or clock.monotonic() >= deadline:
                log.warning("job %d cannot be ended: %s", job, problem)
                return
        else:
            return
        clock.sleep(AGAIN_S)


def _goes_on(row: JobRow, claims: RoleClaims, slurm: Slurm, clock: Clock, prober: Prober) -> bool:
    """Whether the batch script has heard of the run's end: waits for it while its host answers."""
    deadline = clock.monotonic() + HEARD_WAIT_S
    hosts = slurm.nodes([row.batch_host]) if row.batch_host in row.nodes and row.batch_host else []
    default = slurmd_port(slurm) if any(one.port is None for one in hosts) else 0
    targets = {one.name: (one.address, one.port or default) for one in hosts}
    while ProbeResult.ANSWERS in prober.probe(targets, CONNECT_S).values() and clock.monotonic() < deadline:
        try:
            if claims.is_heard():
                return True
        except OSError as problem:
            log.info("%s", problem)
        clock.sleep(SPOKEN_S)
    return False


def _end(row: JobRow, code: int, slurm: Slurm) -> None:
    try:
        slurm.complete(row.id, code)
    except DeepLinkError as problem:
        if is_unanswered(problem):
            raise
        log.warning("job %s cannot be given its exit code, and is cancelled: %s", row.label, problem)
        said = comment_of(f"{TAG}its batch host died; the run ended with exit code {code}")
        slurm.comment_job(row.address, with_our_comment(slurm.comment(row.id), said))
        slurm.cancel(row.address)
