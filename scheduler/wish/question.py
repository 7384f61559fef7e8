"""The one question that a survey of the cluster is, asked while what reads the answer is still being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.slurm import command
from deeplink.scheduler.wish.columns import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence


class EarlyQuestion:
    """Runs Slurm's commands; the question itself was asked when this was made.

    Raises:
        CommandMissingError: there is no sinfo (when it is called, not when it is made).
    """

    def __init__(self) -> None:
        self._early: command.Process[bytes] | None = None
        try:
            self._early = command.begun(ARGUMENTS)
        except command.CommandMissingError:
            return  # it is said by who wants the answer

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = command.COMMAND_TIMEOUT_S) -> str:
        """Return what `command.run` returns, raise what it raises."""
        if tuple(argv) != ARGUMENTS or self._early is None:
            return command.run(argv, timeout_s=timeout_s)
        early, self._early = self._early, None
        return command.answer_of(command.ended(early, argv, timeout_s=timeout_s))
