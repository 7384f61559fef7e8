"""Real agents' cache services over loopback, and folders of small files, for the tests of the cache."""

from __future__ import annotations

import dataclasses
import io
import random
import tarfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.membership import Tier
from deeplink.cache.pack.distributed_pack import PackingServicer
from deeplink.cache.serve.server import CacheServicer, plain_clients, register
from deeplink.cache.store.store import Store
from deeplink.core.config import Config
from deeplink.core.types import Member, NodeName, format_members
from deeplink.rpc import grpc_server, tokens

if TYPE_CHECKING:
    from collections.abc import Mapping


def small_files(count: int = 60, *, seed: int = 0) -> dict[str, bytes]:
    """Return `count` files in three classes below two roots, of all kinds of sizes, one of them empty."""
    rng = random.Random(seed)  # noqa: S311 - test data
    files = {}
    for i in range(count):
        size = 0 if i == 0 else rng.choice([1, 100, 4080, 4096, 5000, 40_000])
        files[f"{'train' if i % 4 else 'test'}/{'abc'[i % 3]}/{i:05d}.bin"] = rng.randbytes(size)
    return files


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files below `root` and return it."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def make_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a tar that holds the files and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def config_below(root: Path, **settings: object) -> Config:
    """Return a configuration whose folders are below `root`; small shards, so that there are several."""
    base = Config(catalog=root / "catalog", store=root / "store", node="head", shard_bytes=200_000)
    return dataclasses.replace(base, **settings)  # type: ignore[arg-type]


@dataclass
class Agents:
    """Members n0, n1 ... serving stores below `root`."""

    root: Path
    token: str = field(default_factory=tokens.new_token)
    stores: dict[NodeName, Store] = field(default_factory=dict)
    servers: dict[NodeName, grpc_server.BoundServer] = field(default_factory=dict)
    members: tuple[Member, ...] = ()

    @property
    def token_file(self) -> Path:
        """The 0600 file with the token."""
        path = self.root / "token"
        if not path.exists():
            tokens.write_token(path, self.token)
        return path

    @property
    def tier(self) -> Tier:
        """All that run, and their token."""
        return Tier(self.members, self.token)

    def start(self, name: str, *, port: int = 0) -> Member:
        """Start one member; it serves when this returns."""
        node = NodeName(name)
        store = self.stores.setdefault(node, Store(self.root / name))
        serving, packing = CacheServicer(store, node), PackingServicer(store, node, self.token)
        calls = {**serving.calls, **packing.calls}
        plain, bind = plain_clients(serving, self.token), f"127.0.0.1:{port}"
        bound = grpc_server.bound_server(bind, self.token, partial(register, calls=calls), plain=plain)
        bound.server.start()
        self.servers[node] = bound
        member = Member(node, f"127.0.0.1:{bound.port}")
        self.members = (*(other for other in self.members if other.name != node), member)
        return member

    def stop(self, name: str) -> None:
        """Stop one member: its port refuses from now on."""
        self.servers.pop(NodeName(name)).server.stop(None).wait()

    def restart(self, member: Member) -> None:
        """Stop a member, and start it again at the port it had."""
        self.stop(member.name)
        self.start(member.name, port=int(member.address.rpartition(":")[2]))

    def stop_all(self) -> None:
        """Stop all members."""
        for name in list(self.servers):
            self.stop(name)

    def config(self, **settings: object) -> Config:
        """Return the configuration of a node that is no member; members have the time of a busy machine.

        What they do not give is not brought to that node meanwhile: tests count what came from where.
        """
        here = {"members": format_members(self.members), "token_file": self.token_file, "read_deadline_ms": 20_000}
        return config_below(self.root / "head", **{**here, "fill_on_miss": False, **settings})
