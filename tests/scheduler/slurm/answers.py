"""What squeue says, in the form in which it is asked: each field with the separator behind it that was named."""

from __future__ import annotations

import re
from collections.abc import Sequence


def answer(argv: Sequence[str], *fields: object) -> str:
    """Answer with these fields of one job."""
    (separator,) = set(re.findall("~[0-9a-f]{16}~", " ".join(argv)))
    return "".join(f"{field}{separator}" for field in fields)


def job_answer(
    argv: Sequence[str],
    job: int,
    *,
    state: str = "RUNNING",
    reason: str = "None",
    restarts: int = 0,
    requeueable: bool = True,
    nodes: str = "n[0-1]",
    host: str = "n0",
    user: str = "ada",
) -> str:
    """Answer with a user's job `resnet`, in the columns of JOB_FIELDS."""
    return answer(argv, job, job, state, reason, restarts, int(requeueable), user, nodes, host, "resnet")
