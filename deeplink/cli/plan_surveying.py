"""What `deeplink plan` sees of the cluster: as `deeplink sbatch` does, with where the waiting jobs' data lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.cli.sbatch_placing import residency_of, sources_of
from deeplink.errors import DeepLinkError
from deeplink.scheduler.planner.ground import Survey
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.wish.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.config import Config
    from deeplink.scheduler.planner.round import Mine
    from deeplink.types import NodeName


def surveyed(config: Config, jobs: Sequence[Mine]) -> Survey:
    """Return the cluster as it is now, for these jobs; one question to Slurm.

    Raises:
        CommandError, CommandTimeoutError, CommandMissingError, SurveyTextError, UnknownStateError: see `survey`.
    """
    now, site = survey(sources_of(config, command.run))
    data = {job.ask.data for job in jobs if job.ask.data}
    return Survey(now, site, {names: residency_of(names, config)[0] for names in data})


def prefetcher(
    config: Config, say: Callable[[str], None]
) -> Callable[[int, tuple[str, ...], Sequence[NodeName]], None]:
    """Return what starts `deeplink prefetch` in the background, when nodes were wished for a job with data."""
    import sys

    from deeplink.scheduler.planner.lock import folder_of

    def wished(job: int, data: tuple[str, ...], nodes: Sequence[NodeName]) -> None:
        if not config.members:
            return
        log = folder_of(config.state) / "prefetch.log"
        argv = (sys.executable, "-m", "deeplink", "prefetch", "--nodes", fold(nodes), *data)
        try:
            number = command.detach(argv, log)
        except (DeepLinkError, OSError) as problem:
            say(f"job {job}: its nodes are not warmed: {problem}")
            return
        say(f"job {job}: {fold(nodes)} bring {', '.join(data)} (process {number}, {log})")

    return wished
