"""Nodes of a job for tests: each with an agent's Keep service over loopback, and folders of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.agent import checkpoint_replicas
from deeplink.agent.agent import AgentSettings
from deeplink.core.clock import SystemClock
from deeplink.core.config import Config
from deeplink.core.types import Member, NodeName, format_members
from deeplink.rpc import grpc_server
from deeplink.rpc.tokens import new_token, write_token
from deeplink.scheduler.node.servicer import Bulletin
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

    from deeplink.core.types import Attempt


@dataclass
class Nodes:
    """Nodes n0, n1, ..., two on each leaf; `kill` ends the agent of one, and takes its disk."""

    root: Path
    count: int = 4
    config: Config = field(default_factory=Config)
    token: str = field(default_factory=new_token)
    servers: dict[str, grpc_server.BoundServer] = field(default_factory=dict)
    bulletins: dict[str, Bulletin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_token(self.root / "token", self.token)
        for number in range(self.count):
            self.start(f"n{number}")

    def store(self, node: str) -> Path:
        """Return the folder of a node's agent."""
        return self.root / node / "store"

    def local(self, node: str) -> Path:
        """Return the folder of a node's own checkpoints."""
        return self.root / node / "run"

    def copies(self, node: str) -> list[str]:
        """Return what a node keeps for others, `from-n0/step-...`."""
        found = self.store(node).glob("checkpoints/*/from-*/step-*")
        return sorted(f"{path.parent.name}/{path.name}" for path in found)

    def start(self, node: str) -> None:
        """Start a node's agent, again where it has ended."""
        bulletin = self.bulletins.setdefault(node, Bulletin())
        settings = AgentSettings(
            node=NodeName(node), bind="", token=self.token, store=self.store(node), config=self.config
        )

        def register(server: grpc.Server) -> list[str]:
            return [checkpoint_replicas.served(settings, server, bulletin.learn, SystemClock())]

        plain = grpc_server.PlainClients(node=node, token=self.token)
        server = grpc_server.bound_server("127.0.0.1:0", self.token, register, plain=plain)
        server.server.start()
        self.servers[node] = server

    def stop(self, node: str) -> None:
        """End a node's agent; its disk stays."""
        self.servers.pop(node).server.stop(None).wait(LIMIT_S)

    def close(self) -> None:
        """End all."""
        for node in list(self.servers):
            self.stop(node)

    def members(self, *nodes: str) -> tuple[Member, ...]:
        """Return these nodes as members; two on each leaf."""
        return tuple(
            Member(NodeName(node), f"127.0.0.1:{self.servers[node].port}", 1, f"leaf{int(node[1:]) // 2}")
            for node in nodes
        )

    def env(
        self, attempt: Attempt, node: str, nodes: list[str], *, spares: tuple[str, ...] = ()
    ) -> dict[str, str]:
        """Return what a rank of an attempt finds in its environment, one rank to a node."""
        everyone = self.members(*nodes, *spares)
        here = next(member for member in everyone if member.name == node)
        return {
            "DEEPLINK_ATTEMPT": str(attempt),
            "DEEPLINK_NODE": node,
            "DEEPLINK_AGENT": here.address,
            "DEEPLINK_TOKEN_FILE": str(self.root / "token"),
            "DEEPLINK_MEMBERS": format_members(everyone),
            "RANK": str(nodes.index(node)),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(nodes.index(node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
        }
