"""The queue as people want to see it: one question to Slurm for all jobs, whoever asks, and never one per job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.parse import JOB_FIELDS, SlurmTextError, names_of, parse_jobs
from deeplink.scheduler.slurm.separator import fresh_separator

if TYPE_CHECKING:
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.types import NodeName

_MORE = ("Partition", "TimeUsed", "TimeLimit", "StartTime", "SubmitTime", "STDOUT", "ReqNodes")
_DURATION = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """One job with what people ask besides. None: Slurm does not say.

    Attributes:
        used_s: how long it has run.
        limit_s: how long it may; infinite where there is no limit.
        start_unix: when it began, or is expected to.
        output: where its output goes, as Slurm tells it: patterns may be left in it.
        required: the nodes that it must have.
    """

    job: JobRow
    partition: str = ""
    used_s: float | None = None
    limit_s: float | None = None
    start_unix: float | None = None
    submit_unix: float | None = None
    output: str = ""
    required: tuple[NodeName, ...] = ()


def queue(slurm: Slurm, *, user: str = "") -> list[Queued]:
    """Return every job Slurm remembers, of all users or of one; raises what `Slurm.jobs` raises."""
    separator = fresh_separator()
    layout = ",".join(f"{name}:{separator}" for name in (*JOB_FIELDS, *_MORE))
    argv = ["squeue", "-h", "-a", "-r", "--states=all", "-O", layout]
    return parse_queue(slurm.run([*argv, "-u", user] if user else argv), separator)


def parse_queue(text: str, separator: str) -> list[Queued]:
    """Read `squeue -h -O` with `separator` behind every field.

    Raises:
        SlurmTextError: the text has another number of fields.
        UnknownStateError: a job is in a state without a name here.
    """
    fields = text.split(separator)
    width = len(JOB_FIELDS) + len(_MORE)
    if fields.pop().strip() or len(fields) % width:
        raise SlurmTextError("squeue", text)
    found = []
    for start in range(0, len(fields), width):
        plain = fields[start : start + len(JOB_FIELDS)]
        plain[0] = plain[0].lstrip("\n")
        more = fields[start + len(JOB_FIELDS) : start + width]
        partition, used, limit, began, submitted, output, required = more
        (row,) = parse_jobs("".join(f"{field}{separator}" for field in plain), separator)
        found.append(
            Queued(
                job=row,
                partition=partition,
                used_s=duration_s(used),
                limit_s=duration_s(limit),
                start_unix=_unix(began),
                submit_unix=_unix(submitted),
                output="" if output in {"(null)", "N/A"} else output,
                required=names_of("" if required in {"(null)", "N/A"} else required.strip(), "squeue"),
            )
        )
    return found


def duration_s(text: str) -> float | None:
    """Read a duration as squeue prints it; None where it is none.

    >>> duration_s("1-02:03:04"), duration_s("3:04"), duration_s("UNLIMITED"), duration_s("NOT_SET")
    (93784.0, 184.0, inf, None)
    """
    if text in {"UNLIMITED", "365-00:00:00"}:  # of a running job it prints a year
        return float("inf")
    found = _DURATION.fullmatch(text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()  # Slurm's times are of this host's own zone
    except ValueError:  # N/A, or SLURM_TIME_FORMAT asks for something else
        return None
