"""Polls the job's status in Slurm from a thread, so that a slow slurmctld blocks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.latest_answer import LastAnswer

if TYPE_CHECKING:
    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import Backend

AGAIN_S = 1.0
"""Slurm is asked no sooner again, whoever wants to know."""
OVER_S = 1.0
"""With so little time left the limit has been reached."""
OFTEN_S, SELDOM_S = 5.0, 300.0
"""Between two questions: a quarter of the time that is left, within these bounds. The limit may be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What Slurm says of the job.

    Attributes:
        ours: what runs under the job's number is this run of it, and not a later one elsewhere.
        runs: it has not been cancelled, requeued or ended.
        left_s: until its time limit, seconds; None where there is none.
        preempting: somebody else is to get its nodes.
        requeueable: it may be started again.
        word: its state and reason, for people.
    """

    ours: bool
    runs: bool
    left_s: float | None = None
    preempting: bool = False
    requeueable: bool = False
    word: str = ""

    @property
    def explains(self) -> bool:
        """Whether it says why something of ours was ended."""
        return (
            not (self.ours and self.runs) or self.preempting or (self.left_s is not None and self.left_s <= OVER_S)
        )


class StatusPoller:
    """Where Slurm is asked. The supervising thread alone uses it.

    Args:
        backend: the allocation.
        clock: for every duration.
    """

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._clock = clock
        self._last = LastAnswer(backend.standing, clock, "deeplink-standing")

    def tick(self) -> None:
        """Ask, if it is time to."""
        left = self.left_s()
        pause = SELDOM_S if left is None else min(SELDOM_S, max(OFTEN_S, left / 4))
        if self._last.value is None:
            pause = OFTEN_S  # nobody has said yet whether there is a limit
        if self._clock.monotonic() - self._last.asked >= pause:
            self._last.ask()

    def press(self, moment: float) -> None:
        """Ask, and again after a while, until there is an answer to a question asked at `moment` or later."""
        if self._last.answered < moment and self._clock.monotonic() - self._last.asked >= AGAIN_S:
            self._last.ask()

    def since(self, moment: float) -> JobStatus | None:
        """Return the answer to a question asked at `moment` or later; None while there is none."""
        return self._last.value if self._last.answered >= moment else None

    def left_s(self) -> float | None:
        """Return the seconds until the time limit as of now; None where there is none, or nobody says."""
        if self._last.value is None or self._last.value.left_s is None:
            return None
        return self._last.value.left_s - (self._clock.monotonic() - self._last.answered)

    @property
    def requeueable(self) -> bool:
        """Whether Slurm said that it may start the job again."""
        return self._last.value is not None and self._last.value.requeueable
