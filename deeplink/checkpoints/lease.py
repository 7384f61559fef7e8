"""How long a rank may go on that hears of nobody: pure, time is passed in.

A rank on a node that was cut off goes on computing, and writes when the link comes back. Fencing keeps what it
publishes from counting; the lease ends it, so that its GPU is free and its logs are quiet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH_S = 60.0
"""A frozen file system or a restarted agent is shorter; Slurm's own patience with a node (300 s) is longer."""
_ASKED_PER_LEASE = 6
_ASKED_PER_S = 50
"""Ranks of a job ask the shared folder no more often than this, all of them together."""


class LeaseState(Enum):
    """Whether a rank may go on."""

    HELD = "held"
    FENCED = "fenced"
    EXPIRED = "expired"


def pause(length_s: float, world: int) -> float:
    """Return the seconds between two questions to a witness, so that a lease holds several and few ask at once.

    >>> pause(60, 8), pause(60, 1024), pause(60, 100_000)
    (10.0, 20.0, 20.0)
    """
    return min(length_s / 3, max(length_s / _ASKED_PER_LEASE, world / _ASKED_PER_S))


@dataclass(slots=True)
class Lease:
    """Renewed by each answer of any witness: the shared folder, the agents of other nodes.

    Attributes:
        length_s: how long it holds without an answer.
        renewed: when it was renewed last, by a clock that never goes back.
        witnesses: who can renew it. Without any it never expires: silence of nobody says nothing.
        fenced_by: what has taken over, once a witness has said so; for people.
        looked: when `standing` was asked last.
        answers: how often each witness answered.
    """

    length_s: float
    renewed: float
    witnesses: Sequence[str] = ()
    fenced_by: str = ""
    looked: float = float("-inf")
    answers: dict[str, int] = field(default_factory=dict)

    def renew(self, witness: str, now: float) -> None:
        """A witness answered, and knew of nobody newer."""
        self.renewed = max(self.renewed, now)
        self.answers[witness] = self.answers.get(witness, 0) + 1

    def fence(self, by: str) -> None:
        """A witness knows of a newer attempt. That is final."""
        self.fenced_by = self.fenced_by or by

    def standing(self, now: float) -> LeaseState:
        """Return whether the rank may go on at `now`; to be asked many times within a lease."""
        gap, self.looked = now - self.looked, now
        if self.length_s / 3 < gap < float("inf"):
            # Nobody was asked in that time: this process stood still itself (Slurm suspends whole jobs).
            self.renewed += gap
        if self.fenced_by:
            return LeaseState.FENCED
        if self.witnesses and now - self.renewed > self.length_s:
            return LeaseState.EXPIRED
        return LeaseState.HELD
