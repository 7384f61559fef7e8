"""Which job is meant: the forms of Slurm's job ids; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.scheduler.slurm.parse import JobRow

_FORM = re.compile(
    r"(?P<job>[1-9][0-9]{0,18})"
    r"(?:_(?P<tasks>[0-9]{1,9}|\*|\[[0-9]{1,9}(?:[-,:0-9]{0,4000})(?:%[0-9]{1,9})?\])|\+(?P<part>[0-9]{1,9}))?"
    r"(?:\.(?P<step>[0-9]{1,9}|batch|extern|interactive))?",
    re.ASCII,
)
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
_MOST_TASKS = 4_000_001
"""Slurm's own bound on MaxArraySize."""


class JobNameError(DeepLinkError):
    """A word names no job, several where one is wanted, or a part that the job has not."""

    exit_code = 2


def no_job(word: str, problem: str = "it is no job id") -> JobNameError:
    """Return the error of a word that names no job."""
    remedy = "Jobs are named by number: 12, 12_3 (task of an array), 12_[1-4], 12+0 (part of a het job)."
    return JobNameError(f"{word!r}: {problem}", remedy=remedy)


def unknown_job(word: str, state: Path, *, asked: bool) -> JobNameError:
    """Return the error of a job that neither Slurm knows (if it was `asked` and answered) nor the state folder."""
    slurm = "Slurm knows no such job" if asked else "Slurm does not answer"
    return JobNameError(
        f"job {word}: {slurm}, and {state / 'jobs'} holds nothing of it",
        remedy="Slurm forgets a job some minutes after its end (MinJobAge); `sacct -j` may still have it. "
        "Records of other users' jobs are in their own homes.",
        exit_code=1,
    )


@dataclass(frozen=True, slots=True)
class JobName:
    """A job as people name it."""

    job: int  # the number before everything else
    tasks: str = ""  # `3`, `[1-4]` or `*` of an array; empty without
    part: int | None = None  # of a heterogeneous job; None without
    step: str = ""  # empty without

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read a job id.

        >>> JobName.parse("12_[1-4,7]"), str(JobName.parse("12+0"))
        (JobName(job=12, tasks='[1-4,7]', part=None, step=''), '12+0')
        """
        found = _FORM.fullmatch(word)
        if not found:
            raise no_job(word)
        name = cls(
            int(found["job"]),
            found["tasks"] or "",
            int(found["part"]) if found["part"] is not None else None,
            found["step"] or "",
        )
        name._spans(word)
        return name

    @override
    def __str__(self) -> str:
        tasks = f"_{self.tasks}" if self.tasks else ""
        part = f"+{self.part}" if self.part is not None else ""
        return f"{self.job}{tasks}{part}" + (f".{self.step}" if self.step else "")

    @property
    def single(self) -> bool:
        """Whether at most one job can be meant, and no step of it."""
        return (not self.tasks or self.tasks.isdigit()) and not self.step

    def _spans(self, word: str = "") -> list[range]:
        spans = []
        if self.tasks in {"", "*"}:
            return []
        for item in self.tasks.strip("[]").partition("%")[0].split(","):
            found = _SPAN.fullmatch(item)
            if not found or int(found[1]) >= _MOST_TASKS or int(found[2] or 0) >= _MOST_TASKS:
                raise no_job(word or str(self), f"{item!r} is no range of tasks")
            spans.append(range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1)))
        return spans

    def means(self, row: JobRow) -> bool:
        """Whether a job of Slurm's is meant: by its own number, or by its label."""
        if self.tasks == "" and self.part is None and row.id == self.job:
            return True
        found = _FORM.fullmatch(row.label)
        if not found or int(found["job"]) != self.job:
            return False
        if self.part is not None:
            return found["part"] is not None and int(found["part"]) == self.part
        if self.tasks in {"", "*"}:
            return True
        task = found["tasks"] or ""
        return task.isdigit() and any(int(task) in span for span in self._spans())


def matching(name: JobName, rows: Iterable[JobRow]) -> list[JobRow]:
    """Return the jobs of Slurm's that are meant; the one that is called so goes before others."""
    meant = [row for row in rows if name.means(row)]
    exact = [row for row in meant if row.label == str(name)]
    return exact or meant


def the_one(word: str, rows: Iterable[JobRow]) -> JobRow | None:
    """Return the one job that is meant; None where Slurm knows none."""
    name = JobName.parse(word)
    if name.step:
        raise no_job(word, "a job is wanted, and this is a step of one")
    found = matching(name, rows)
    running = [row for row in found if not row.state.final]
    if len(found) > 1 and len(running) == 1 and not name.tasks:
        return running[0]
    if len(found) > 1:
        labels = [row.label for row in found]
        many = f"{word} is {len(labels)} jobs: {listed(labels, 5)}"
        raise JobNameError(many, remedy=f"Name one, such as {labels[0]}.")
    return found[0] if found else None
