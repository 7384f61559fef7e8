"""What `deeplink plan` sees of the cluster: as `deeplink sbatch` does, with where the waiting jobs' data lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.cli.sbatch_placing import residency_of, sources_of
from deeplink.scheduler.planner.ground import Survey
from deeplink.scheduler.slurm import command
from deeplink.scheduler.wish.survey import survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.config import Config
    from deeplink.scheduler.planner.round import Mine


def surveyed(config: Config, jobs: Sequence[Mine]) -> Survey:
    """Return the cluster as it is now, for these jobs; one question to Slurm.

    Raises:
        CommandError, CommandTimeoutError, CommandMissingError, SurveyTextError, UnknownStateError: see `survey`.
    """
    now, site = survey(sources_of(config, command.run))
    data = {job.ask.data for job in jobs if job.ask.data}
    return Survey(now, site, {names: residency_of(names, config)[0] for names in data})
