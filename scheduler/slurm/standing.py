"""How a job stands: how long it may still run, and whether it is being preempted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.parse import SlurmTextError, rows_of
from deeplink.scheduler.slurm.separator import fresh_separator
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow

FIELDS = ("JobID", "TimeLeft", "PreemptTime", "StartTime")
"""Columns of `squeue -O` in the order that `parse_standing` wants."""
_LEFT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRow:
    """How a job stands.

    Attributes:
        left_s: until its time limit, seconds; 0 once it is over, None where there is none.
        preempting: it has been told to make room, and may still run for its partition's GraceTime.
    """

    job: JobRow
    left_s: float | None
    preempting: bool


def standing(slurm: Slurm, job: int) -> StandingRow:
    """Return how a job stands.

    Raises:
        JobVanishedError: Slurm does not know it (any more).
        DeepLinkError: as every method of `Slurm`.
    """
    row = slurm.job(job)
    separator = fresh_separator()
    layout = ",".join(f"{field}:{separator}" for field in FIELDS)
    said = slurm.run(["squeue", "-h", "-j", str(job), "--states=all", "-O", layout])
    return parse_standing(row, said, separator)


def parse_standing(job: JobRow, text: str, separator: str) -> StandingRow:
    """Read `squeue -h -O` of one job with `separator` behind every field of FIELDS.

    Raises:
        SlurmTextError: the text is something else.
    """
    # The id of an array selects all its tasks.
    rows = [row for row in rows_of(text, separator, len(FIELDS)) if row[0].strip() == str(job.id)]
    if not rows:
        raise SlurmTextError("squeue", text)
    left, preempted, started = (word.strip() for word in rows[0][1:])
    # The time of an earlier preemption stays in the record; both are written alike, so they compare as text.
    preempting = job.state is JobState.RUNNING and preempted[:1].isdigit() and preempted > started
    return StandingRow(job=job, left_s=_seconds(left, text), preempting=preempting)


def _seconds(left: str, text: str) -> float | None:
    found = _LEFT.fullmatch(left)
    if found:
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    if left == "INVALID":
        return 0.0  # the limit is over: squeue has no word for less than nothing
    if left in {"UNLIMITED", "NOT_SET"}:
        return None
    raise SlurmTextError("squeue", text)
