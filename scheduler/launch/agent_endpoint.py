"""The address and ports of a node's agent, kept when the agent is restarted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.types import NodeName

SEATS_VARIABLE = "DEEPLINK_AGENT_SEATS"
"""In the environment of agents that are started once more: one text for all of them, each finds its own in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndpoint:
    """What ranks know of their node's agent.

    Attributes:
        port: it listens there.
        folder: node-local, of its token; ranks hold their locks there, too.
    """

    port: int
    folder: Path


def packed_seats(before: Mapping[NodeName, NodeFacts]) -> str:
    """Return the seats of these agents, for `seat_in`."""
    return json.dumps(
        {node: [int(one.address.rpartition(":")[2]), one.token_file] for node, one in before.items()},
        separators=(",", ":"),
    )


def seat_in(env: Mapping[str, str], node: str) -> AgentEndpoint | None:
    """Return the seat that this node's agent is to take; None where there is none, or it cannot be read."""
    try:
        port, token_file = json.loads(env[SEATS_VARIABLE])[node]
        seat = AgentEndpoint(port=int(port), folder=Path(token_file).parent)
    except (KeyError, ValueError, TypeError):
        return None
    return seat if 0 < seat.port < 1 << 16 and token_file and seat.folder.is_absolute() else None
