"""What Slurm's commands say when slurmctld does not answer, or not yet as it will: it may be asked again; pure.

Measured with 22.05.8: a controller that is down is "Unable to contact slurm controller (connect failure)", a
frozen one "Socket timed out on send/recv operation". One that has just come up takes running jobs for pending for
some seconds, which srun tells of the job that it runs in; and what a step that ends there has had counts as taken
until its end is told, though the next one is to overlap: seen 1.3 s after a start, while the end took 2.7 s.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError

if TYPE_CHECKING:
    from deeplink.errors import DeepLinkError

_SILENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv operation|in standby mode"
    r"|Communication connection failure|Communication shutdown failure|Zero Bytes were transmitted or received"
)
_STEP = re.compile(r"srun: error: Unable to (?:confirm allocation|create step) for job \d+: (?P<why>.*)")
_COMING_UP = "Job is pending execution"
TAKEN = "Memory required by task is not available"
"""Of a step before that is not over, or of a node that has never had so much: that alone time can tell."""


def is_silence(said: str) -> bool:
    """Whether a command that failed with these words got no answer.

    >>> is_silence("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    True
    >>> is_silence("slurm_requeue error: Invalid job id specified")
    False
    """
    return _SILENT.search(said) is not None


def is_unanswered(problem: DeepLinkError) -> bool:
    """Whether a command got no answer, by the error it was raised with: it may be sent again.

    It may have been heard all the same: as it takes a job back, Slurm ends the very scontrol by which that asked.
    """
    if isinstance(problem, CommandError):
        return problem.code < 0 or is_silence(problem.stderr)
    return isinstance(problem, CommandTimeoutError)


def unstarted_step(line: str) -> str:
    """Return why srun got no step, where it may get one later; empty for any other line of srun's.

    >>> unstarted_step("srun: error: Unable to confirm allocation for job 7: Job is pending execution")
    'Job is pending execution'
    >>> unstarted_step("srun: error: Unable to create step for job 7: Job/step already completing or completed")
    ''
    """
    found = _STEP.match(line)
    if found is None:
        return ""
    why = found["why"].strip()
    return why if why in {_COMING_UP, TAKEN} or is_silence(why) else ""
