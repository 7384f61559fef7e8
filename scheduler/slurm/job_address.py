"""Names one job, and only that one, for Slurm's commands; pure.

The raw id is no such name: the task of an array that started last has the array's own id as its raw id, and a
command that changes a job by it acts on all tasks (measured with 22.05).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from deeplink.errors import DeepLinkError

_ONE = re.compile(r"(?P<job>[1-9][0-9]*)(?:_[0-9]+|(?P<component>\+[0-9]+))?", re.ASCII)


class JobAddressError(DeepLinkError):
    """A text is not the name of one job."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text!r} does not name one job",
            remedy="Name a job (12), a task of an array (12_3) or a component (12+1).",
        )
        self.text = text


OF_A_WHOLE = "it is a component of a heterogeneous job, and Slurm requeues only all of them at once"


class ComponentError(DeepLinkError):
    """Slurm requeues a heterogeneous job only as a whole."""

    def __init__(self, address: JobAddress, verb: str) -> None:
        super().__init__(
            f"job {address} is not requeued: {OF_A_WHOLE}",
            remedy=f"If all of them may end: `scontrol {verb} {address.whole}`.",
        )
        self.address, self.verb = address, verb


@dataclass(frozen=True, slots=True)
class JobAddress:
    """One job as a command that changes it must name it: `12`, `12_3` (task of an array), `12+1` (component).

    Made from what Slurm wrote of the job (`of_label`), never from a raw id. Nor from the environment: sbatch hands
    the variables of an array's task on to the jobs that it submits.
    """

    _text: str

    def __post_init__(self) -> None:
        """Refuse what names several jobs.

        Raises:
            JobAddressError: it is no name of one job.
        """
        if not _ONE.fullmatch(self._text):
            raise JobAddressError(self._text)

    @classmethod
    def of_label(cls, label: str) -> Self:
        """Return the address of the job that Slurm calls so (squeue's `%i`, JobArrayID).

        >>> str(JobAddress.of_label("12_3"))
        '12_3'

        Raises:
            JobAddressError: it is several jobs, `12_[4-7]`.
        """
        return cls(label)

    @property
    def is_component(self) -> bool:
        """Whether it is a part of a heterogeneous job."""
        return "+" in self._text

    @property
    def whole(self) -> str:
        """The id of the array or of the heterogeneous job that it is a part of; else its own."""
        return re.split(r"[_+]", self._text, maxsplit=1)[0]

    def alone(self, verb: str) -> Self:
        """Return the address, for a command that Slurm has for no component (measured with 22.05).

        Raises:
            ComponentError: it is one.
        """
        if self.is_component:
            raise ComponentError(self, verb)
        return self

    @override
    def __str__(self) -> str:
        return self._text
