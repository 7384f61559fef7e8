"""What `deeplink plan` sees of the cluster: as `deeplink sbatch` does, with where the waiting jobs' data lies."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from deeplink.cli.sbatch_placing import machines_of, residency_of, sources_of
from deeplink.errors import DeepLinkError
from deeplink.scheduler.planner.background import MOST_LOG
from deeplink.scheduler.planner.ground import Survey
from deeplink.scheduler.planner.lock import folder_of
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.wish.scale import Machines
from deeplink.scheduler.wish.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.config import Config
    from deeplink.scheduler.planner.round import Mine
    from deeplink.types import NodeName


MOST_AT_ONCE = 4
"""Jobs for which nodes bring data at the same time: each is a process here."""


def surveyed(config: Config, jobs: Sequence[Mine], run: command.Runner = command.run) -> Survey:
    """Return the cluster as it is now, for these jobs; one question to Slurm.

    Raises:
        CommandError, CommandTimeoutError, CommandMissingError, SurveyTextError, UnknownStateError: see `survey`.
    """
    now, site = survey(sources_of(config, run))
    data = {job.ask.data for job in jobs if job.ask.data}
    machines = machines_of(config) if any(job.ask.profile for job in jobs) else Machines()
    return Survey(now, site, {names: residency_of(names, config)[0] for names in data}, machines)


class Prefetcher:
    """Starts `deeplink prefetch` in the background, when nodes were wished for a job with data.

    Args:
        config: the settings; without standing agents nothing is started.
        say: told what was started, or why it was not.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._members, self._say = config.members, say
        self._log = folder_of(config.state) / "prefetch.log"
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
