"""The cluster as `deeplink plan` and the watchdog see it for waiting jobs, and the prefetch of their data."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.ops.submit import TRIAL_S, agreed, machines_of, residency_of, sources_of
from deeplink.scheduler.placement.hint.ask import options_for
from deeplink.scheduler.placement.hint.decide import MachineSpeeds, Trial, trial_of, tried
from deeplink.scheduler.placement.hint.decision import Why
from deeplink.scheduler.placement.hint.making import survey, without
from deeplink.scheduler.placement.hint.planner import MOST_LOG
from deeplink.scheduler.placement.hint.reconcile import SurveyedCluster
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.nodeset import fold, unfold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.scheduler.placement.hint.decide import Weighed
    from deeplink.scheduler.placement.hint.decision import Ask, Decision
    from deeplink.scheduler.placement.hint.reconcile import Mine

MOST_AT_ONCE = 4
"""Jobs for which nodes bring data at the same time: each is a process here."""


def surveyed(
    config: Config,
    jobs: Sequence[Mine],
    run: command.Runner = command.run,
    *,
    agreement: Callable[[], str] | None = None,
    trial_s: float = TRIAL_S,
) -> SurveyedCluster:
    """Return the cluster as it is now, for these jobs; one question to Slurm, and two for each hint by name."""
    now, site = survey(sources_of(config, run))
    data = {job.ask.data for job in jobs if job.ask.data}
    machines = machines_of(config) if any(job.ask.profile for job in jobs) else MachineSpeeds()
    settle = partial(_settled, agreement or partial(agreed, config), trial_s)
    return SurveyedCluster(now, site, settle, {names: residency_of(names, config)[0] for names in data}, machines)


def _settled(
    agreement: Callable[[], str], trial_s: float, ask: Ask, weighed: Weighed, kept: frozenset[NodeName]
) -> Decision:
    """Hold a hint for a waiting job against what Slurm would do with another one that asks the same."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_"))}
    env |= {"SLURM_TIME_FORMAT": "standard"} | {
        name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ
    }

    def trial(options: tuple[str, ...]) -> Trial:
        asked = options_for(ask, kept)
        argv = ("sbatch", "--test-only", *options, *asked, "--output=/dev/null", "--wrap=true")
        return trial_of(command.finish(argv, timeout_s=trial_s, env=env).stderr, unfold)

    def stands(hint: Weighed) -> Weighed:
        problem = agreement()
        return without(hint, Why.NOT_LOOKED_AFTER, problem) if problem else hint

    return tried(weighed, trial, stands)


class BackgroundPrefetch:
    """Starts `deeplink prefetch` in the background, when nodes were named for a job with data."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._members, self._say = config.members, say
        self._log = config.state / "plan" / "prefetch.log"
        self._running: list[int] = []

    def __call__(self, job: int, data: tuple[str, ...], nodes: Sequence[NodeName]) -> None:
        """Have nodes bring a job's data."""
        if not self._members:
            return
        self._running = [number for number in self._running if not command.has_ended(number)]
        if len(self._running) >= MOST_AT_ONCE:
            self._say(f"job {job}: its nodes are not warmed: {MOST_AT_ONCE} jobs' nodes are at it")
            return
        argv = (sys.executable, "-P", "-m", "deeplink", "prefetch", "--nodes", fold(nodes), "--", *data)
        try:
            if not self._running and self._log.exists() and self._log.stat().st_size > MOST_LOG:
                os.truncate(self._log, 0)
            self._running.append(command.detach(argv, self._log))
        except (DeepLinkError, OSError) as problem:
            self._say(f"job {job}: its nodes are not warmed: {problem}")
            return
        self._say(f"job {job}: {fold(nodes)} bring {', '.join(data)} (process {self._running[-1]}, {self._log})")
