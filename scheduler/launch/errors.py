"""Errors of starting agents and ranks. Imports next to nothing: every rank does, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import listed

if TYPE_CHECKING:
    from collections.abc import Collection

    from deeplink.core.types import NodeName


class LaunchError(DeepLinkError):
    """Agents or ranks cannot be started, or not as asked."""

    def __init__(self, problem: str, remedy: str = "", *, exit_code: int = 2) -> None:
        super().__init__(problem, remedy=remedy)
        self.exit_code = exit_code


class NodesLostError(DeepLinkError):
    """Too few node agents came up, and Slurm does not hear of the other nodes either: the ranks have no fault."""

    exit_code = 75

    def __init__(self, missing: Collection[NodeName], waited_s: float) -> None:
        self.missing = tuple(sorted(missing))
        names = listed(self.missing)
        super().__init__(
            f"no node agent on {names} after {waited_s:.0f} s, and Slurm gets no answer from it either"
        )


class NoSlurmdError(DeepLinkError):
    """Nodes refuse connections to slurmd: nothing can be started there."""

    def __init__(self, nodes: Collection[NodeName]) -> None:
        super().__init__(f"slurmd refuses connections on {listed(sorted(nodes))}")
        self.nodes = frozenset(nodes)
