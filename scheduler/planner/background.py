"""Starts a planner behind the back of a submission: one per user and cluster, which ends when nothing waits."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from deeplink.private import private_folder
from deeplink.scheduler.planner.lock import folder_of, lock_path, name_of, runs
from deeplink.scheduler.slurm.command import detach

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOST_LOG = 1 << 20
"""A longer log is begun anew; what was decided is on the jobs' own records."""
VARIABLE = "DEEPLINK_PLAN"


def log_path(state: Path, env: Mapping[str, str]) -> Path:
    """Return where a planner in the background writes what it does."""
    return folder_of(state) / f"{name_of(env)}.log"


def ensure_planner(state: Path, env: Mapping[str, str] | None = None) -> int | None:
    """Have a planner run for this user and cluster; call it after the job's record was written.

    It looks after all jobs of the user that wait, takes notice of new ones by itself, and ends a minute or two
    after the last one that needs it. Nothing is waited for here, and nothing here can fail a submission.

    Args:
        state: the user's state folder.
        env: the environment to run it in; `DEEPLINK_PLAN=off` in it means no, `prefetch` that it also has the
            wished nodes bring the jobs' data.

    Returns:
        Its process id; None where one runs already, or none can.
    """
    env = os.environ if env is None else env
    if env.get(VARIABLE, "").lower() in {"off", "0", "no", "false"} or runs(lock_path(state, env)):
        return None
    log = log_path(state, env)
    with contextlib.suppress(OSError):
        private_folder(folder_of(state))
        if log.exists() and log.stat().st_size > MOST_LOG:
            os.truncate(log, 0)
        more = ("--prefetch",) if env.get(VARIABLE) == "prefetch" else ()
        return detach((sys.executable, "-P", "-m", "deeplink", "plan", "--until-idle", *more), log, env=env)
    return None
