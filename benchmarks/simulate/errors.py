"""What a simulation refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Sequence


class TraceError(DeepLinkError):
    """A text is no trace of jobs, or hardly any of its rows is one."""

    exit_code = 2

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem}", remedy=remedy)
        self.where, self.problem = where, problem


class DirtyTraceError(TraceError):
    """More rows of a trace make no sense than can be left out without its meaning something else.

    Attributes:
        rows: rows read until it was too much.
        faults: what is wrong with each, with its line.
    """

    def __init__(self, where: str, rows: int, faults: Sequence[str]) -> None:
        said = "; ".join(faults[:3])
        super().__init__(
            where,
            f"{len(faults)} of {rows:,} rows cannot be read: {said}{'; ...' if len(faults) > 3 else ''}",  # noqa: PLR2004
            "Mend these lines, or give --skip a greater number.",
        )
        self.rows, self.faults = rows, tuple(faults)


class SimulationValueError(DeepLinkError):
    """Something asked of a simulation cannot be so."""

    exit_code = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy=remedy)
        self.problem = problem
