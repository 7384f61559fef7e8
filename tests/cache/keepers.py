"""Members in this process that look after their stores as agents do, at a quick pace."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.replicate.keeper import Keeper, UpkeepIntervals
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from deeplink.core.types import Member, NodeName
from deeplink.rpc import grpc_server, tokens
from tests.cache.agents import config_below

if TYPE_CHECKING:
    from deeplink.core.config import Config

QUICK = UpkeepIntervals(verify_s=0.1, lost_s=0.05, budget_s=0.1, share_s=0.2, unused_s=0.1, note_s=0.1)


@dataclass
class Kept:
    """One member."""

    member: Member
    store: Store
    keeper: Keeper
    server: grpc_server.BoundServer

    def stop(self) -> None:
        """End it: its port refuses from now on."""
        self.keeper.stop()
        self.server.server.stop(None).wait()


@dataclass
class Keepers:
    """Members, whose catalog is below `root`."""

    root: Path
    pace: UpkeepIntervals = QUICK
    token: str = field(default_factory=tokens.new_token)
    running: dict[str, Kept] = field(default_factory=dict)

    def config(self, **settings: object) -> Config:
        """Return the configuration of a node that is no member; the members' own but for their stores."""
        return config_below(self.root, **settings)

    @property
    def members(self) -> tuple[Member, ...]:
        """All that run."""
        return tuple(kept.member for kept in self.running.values())

    def start(self, name: str, *, token: str | tokens.RunTokens = "", **settings: object) -> Kept:
        """Start one, of a job's if it takes tokens of a run; the others do not know of it yet."""
        token = token or self.token
        store = Store(self.root / name)
        config = self.config(**{"node": name, "state": self.root / "state", **settings})
        keeper = Keeper(NodeName(name), store, token, config, clock=SystemClock(), pace=self.pace)
        server = grpc_server.bound_server(
            "127.0.0.1:0", tokens.accepted(token), keeper.register, plain=keeper.plain_clients()
        )
        server.server.start()
        keeper.start()
        kept = Kept(Member(NodeName(name), f"127.0.0.1:{server.port}"), store, keeper, server)
        self.running[name] = kept
        return kept

    def introduce(self) -> None:
        """Tell all of all, as a launcher does."""
        for kept in self.running.values():
            kept.keeper.know(self.members)

    def stop(self, name: str) -> None:
        """Stop one."""
        self.running.pop(name).stop()

    def stop_all(self) -> None:
        """Stop all."""
        for name in list(self.running):
            self.stop(name)
