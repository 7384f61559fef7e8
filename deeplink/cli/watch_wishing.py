"""`deeplink watch`: where a job that starts again should run, and what is needed to submit one anew."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from deeplink.cli.plan_surveying import surveyed
from deeplink.clock import SystemClock
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.view.look import me
from deeplink.scheduler.watch.observer import COMMAND_S
from deeplink.scheduler.watch.requeue_placement import QUESTION_S, RequeueHints, other_user, state_folder
from deeplink.scheduler.watch.resubmit import Resubmitter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.config import Config


def wishes_of(config: Config) -> RequeueHints:
    """Return what makes wishes for jobs of all users whose records can be read here."""
    return RequeueHints(
        run=_quick,
        state_of=partial(state_folder, config.state),
        ground=lambda jobs: surveyed(config, jobs, _quick, agreement=lambda: "", trial_s=QUESTION_S),
        clock=SystemClock(),
        owner_of=other_user,
    )


def heirs_of(config: Config) -> Resubmitter:
    """Return what submits our own jobs anew that agreed to it."""
    return Resubmitter(slurm=Slurm(run=_bounded), state=config.state, user=me(), clock=SystemClock())


def _bounded(argv: Sequence[str], /, *, timeout_s: float = COMMAND_S) -> str:
    return command.run(argv, timeout_s=min(timeout_s, COMMAND_S))


def _quick(argv: Sequence[str], /, *, timeout_s: float = QUESTION_S) -> str:
    return command.run(argv, timeout_s=min(timeout_s, QUESTION_S))
