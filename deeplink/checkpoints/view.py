"""The knowledge of a rank that decides: the shared folder's checkpoints, and those that nodes say they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.checkpoints.entries import CheckpointName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.fetching import Holding, There


class RunView:
    """The knowledge of a run when it is claimed.

    Attributes:
        claims: all known, the newest last.
        shared: what lies in the shared folder, whole or not, newest first; as last seen where it does not answer.
        problem: why the shared folder could not be looked at; empty where it could.
        unread: name, place and reason of what nodes' disks do not let be read.
    """

    def __init__(
        self, claims: Sequence[Claim], shared: Sequence[CheckpointName], holdings: Sequence[Holding], problem: str
    ) -> None:
        self.claims, self.shared, self.problem = claims, shared, problem
        self.unread = [unread for holding in holdings for unread in holding.unread]
        self._holdings = holdings

    def lose_shared(self, problem: str) -> None:
        """Note that the shared folder cannot be read; what it is known to have is kept."""
        self.problem = problem

    @property
    def nodes(self) -> int:
        """The number of nodes that said what they have."""
        return len(self._holdings)

    @property
    def is_readable(self) -> bool:
        """Whether the shared folder answered."""
        return not self.problem

    def entries(self) -> list[CheckpointName]:
        """Return every checkpoint that anybody has something of, newest first."""
        names = {there.name for holding in self._holdings for there in holding.whole}
        names |= {name for holding in self._holdings for name, _, _ in (*holding.torn, *self.unread)}
        return sorted({*self.shared, *filter(None, map(CheckpointName.parse, names))}, reverse=True)

    def places(self, name: str) -> list[There]:
        """Return where something of a checkpoint lies on nodes."""
        return [there for holding in self._holdings for there in holding.whole if there.name == name]

    def torn(self, name: str) -> list[tuple[str, str, str]]:
        """Return the places where it is not what was saved, with reasons."""
        return [torn for holding in self._holdings for torn in holding.torn if torn[0] == name]

    def is_lost_above(self, newest: CheckpointName | None, claim: Claim) -> bool:
        """Tell whether the shared folder has something newer than `newest` that counts, and cannot be read."""
        above = (entry for entry in self.shared if newest is None or entry > newest)
        return not self.is_readable and any(entry.counts(claim) for entry in above)

    def unread_above(self, newest: CheckpointName | None, claim: Claim) -> list[str]:
        """Return what nodes cannot read that may be newer than `newest` and count under `claim`."""
        found = []
        for name, where, why in self.unread:
            entry = CheckpointName.parse(name)
            if entry is None or (entry.counts(claim) and (newest is None or entry > newest)):
                found.append(f"{where}: {why}")
        return found
