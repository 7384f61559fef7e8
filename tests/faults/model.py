"""Everything that may happen to a cache, in any order, beside a model of it: a dict of each version's files.

What the model says: a sample is delivered as it was packed whenever one whole copy of its shard lies at a member
that runs, or on the reader's own node, or its file is at the source as it was packed. Else it is refused by name.
Other bytes are never delivered. What leaves by an eviction that was not forced can be had afterwards all the same.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from typing_extensions import override

from deeplink.agent.agent import Agent, AgentSettings
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import CatalogError, PlacementError, SampleUnavailableError
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.cache.replicate.fill import ask_to_evict, fill
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.config import Config
from deeplink.core.types import ShardId, Version
from deeplink.rpc.listeners import PortBusyError
from tests.faults.disks import flip
from tests.faults.processes import Nodes
from tests.waiting import until

MEMBERS = 3
KEYS = 24
PROOF_KEPT_S = 4000.0
"""Longer than members believe what they have found out about other copies."""


class JumpingClock(Clock):
    """The machine's clock, but for the time that a test skips."""

    def __init__(self) -> None:
        self._clock, self.skipped_s = SystemClock(), 0.0

    @override
    def monotonic(self) -> float:
        return self._clock.monotonic() + self.skipped_s

    @override
    def unix(self) -> float:
        return self._clock.unix() + self.skipped_s

    @override
    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


class Members(Protocol):
    """The members n0, n1 ... of `nodes`: how they are started and ended."""

    nodes: Nodes

    def start(self, number: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def is_up(self, number: int) -> bool: ...
    def skip(self, seconds: float) -> bool:
        """Let so much time pass for them; False: it cannot be had."""
        ...


class InProcess(Members):
    """Members as agents of this very process."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._clock = JumpingClock()
        self._agents: dict[int, Agent] = {}

    @override
    def start(self, number: int) -> None:
        node = self.nodes[number]
        store = node.root / node.name
        config = self.nodes.config(node=node.name, store=store, state=node.root / "state")
        settings = AgentSettings(
            node=node.member.name,
            bind=f"127.0.0.1:{node.port}",
            token=self.nodes.token,
            store=store,
            config=config,
        )
        until(lambda: self._has_started(number, settings))

    def _has_started(self, number: int, settings: AgentSettings) -> bool:
        agent = Agent(settings, self._clock)
        try:
            agent.start(self.nodes[number].token_file)
        except PortBusyError:  # gRPC lets go of the port of the one before in a thread of its own
            return False
        self._agents[number] = agent
        return True

    @override
    def kill(self, number: int) -> None:
        self._agents.pop(number).stop()

    @override
    def is_up(self, number: int) -> bool:
        return number in self._agents

    @override
    def skip(self, seconds: float) -> bool:
        self._clock.skipped_s += seconds
        return True


class Processes(Members):
    """Members as processes, which are ended by SIGKILL."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    @override
    def start(self, number: int) -> None:
        self.nodes[number].start()
        self.nodes[number].await_ready()

    @override
    def kill(self, number: int) -> None:
        self.nodes[number].kill()

    @override
    def is_up(self, number: int) -> bool:
        return self.nodes[number].is_up

    @override
    def skip(self, seconds: float) -> bool:
        return False


def content(key: int, variant: int) -> bytes:
    """Return what the file of a number holds; another length in each variant, so that a change shows."""
    rng = random.Random(f"{key}/{variant}")  # noqa: S311 - test data
    return rng.randbytes(rng.choice([0, 10, 700, 4090, 5000]) + variant)


def name_of(key: int) -> str:
    """Return the path of the file of a number."""
    return f"{'abc'[key % 3]}/{key:03d}"


class CacheMachine(RuleBasedStateMachine):
    """What users, operators and bad luck do."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="deeplink-model-", dir="/dev/shm"))
        self.source = self.root / "source"
        self.source.mkdir()
        self.tree: dict[str, bytes] = {}
        self.versions: dict[Version, dict[str, bytes]] = {}
        self.sealed: dict[ShardId, bytes] = {}
        self.damaged: set[ShardId] = set()
        self.readers: dict[Version, Reader] = {}
        self.removed: set[Version] = set()
        self.is_source_gone = False

    def members_of(self, nodes: Nodes) -> Members:
        """Return the members of `nodes`, none of which runs."""
        raise NotImplementedError

    @initialize(replicas=st.integers(1, 2), at_member=st.booleans(), up=st.sets(st.integers(0, MEMBERS - 1)))
    def begin(self, replicas: int, at_member: bool, up: set[int]) -> None:
        nodes = Nodes.make(self.root, {}, MEMBERS)
        # Without it bits of this node's own SSD that flip after the first read are the scrub's to find.
        settings: dict[str, object] = {"replicas": replicas, "shard_bytes": 16_000, "check_every_read": True}
        if at_member:
            settings |= {"node": "n0", "store": self.root / "n0"}
        self.members = self.members_of(nodes)
        self.config: Config = nodes.config(**settings)
        for number in sorted(up | {1}):
            self.members.start(number)
        self.write_files(dict.fromkeys(range(0, KEYS, 2), 1))
        self.pack(append=False)

    @property
    def up(self) -> list[int]:
        return [number for number in range(MEMBERS) if self.members.is_up(number)]

    # What users do.

    @precondition(lambda self: not self.is_source_gone)
    @rule(files=st.dictionaries(st.integers(0, KEYS - 1), st.integers(0, 3), min_size=1, max_size=8))
    def write_files(self, files: Mapping[int, int]) -> None:
        """Files come, change, or go (0) at the source."""
        for key, variant in files.items():
            name = name_of(key)
            path = self.source / name
            if variant:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content(key, variant))
                self.tree[name] = content(key, variant)
            else:
                path.unlink(missing_ok=True)
                self.tree.pop(name, None)

    @precondition(lambda self: self.tree and not self.is_source_gone)
    @rule(append=st.booleans())
    def pack(self, append: bool) -> None:
        nodes = self.members.nodes
        try:
            done = pack(
                str(self.source),
                "digits",
                config=self.config,
                members=nodes.members,
                token=nodes.token,
                append=append,
            )
        except PlacementError:
            assert not self.up
            return
        except CatalogError as problem:
            assert "cannot be appended to" in str(problem)  # noqa: PT017 - whatever else it is, it is a bug
            assert append
            assert not self.catalogued()
            return
        known = self.versions.setdefault(done.version, dict(self.tree))
        assert known == self.tree
        self.removed.discard(done.version)
        for node in nodes.nodes:
            for shard in node.store.ids():
                if shard in done.placed:
                    self.sealed.setdefault(shard, node.store.path(shard).read_bytes())

    def catalogued(self) -> list[Version]:
        return Catalog(self.config.catalog).versions("digits")

    @precondition(lambda self: self.versions)
    @rule(seed=st.integers(0, 10_000), views=st.booleans(), anew=st.booleans())
    def read(self, seed: int, views: bool, anew: bool) -> None:
        rng = random.Random(seed)  # noqa: S311 - a choice
        version = rng.choice(sorted(self.versions))
        reader = self.reader(version, anew=anew)
        if reader is not None:
            self.check(reader, [rng.randrange(len(reader)) for _ in range(rng.randint(1, 12))], views=views)

    def reader(self, version: Version, *, anew: bool) -> Reader | None:
        """Return a reader of a version: the one that has it open, or another."""
        if (anew or version not in self.readers) and version not in self.removed:
            if version in self.readers:
                self.readers.pop(version).close()
            self.readers[version] = Reader.open("digits", version=version, config=self.config)
        return self.readers.get(version)

    def check(self, reader: Reader, rows: Sequence[int], *, views: bool = False) -> None:
        """Read rows; what can be had must come, and be right."""
        truth = self.versions[reader.version]
        sure = [row for row in rows if self.can_be_had(reader, row)]
        for chosen in (rows, sure):
            try:
                found = reader.views(chosen) if views else reader.read(chosen)
            except SampleUnavailableError:
                assert chosen is rows
                assert len(sure) < len(rows), "a sample that can be had was refused"
                continue
            for row, sample in zip(chosen, found, strict=True):
                assert sample == truth[reader.index.key(row)], reader.index.key(row)
            return

    def can_be_had(self, reader: Reader, row: int) -> bool:
        """Tell whether a whole copy is where a reader may look."""
        key = reader.index.key(row)
        path = self.source / key
        if path.is_file() and path.read_bytes() == self.versions[reader.version][key]:
            return True
        return self.has_copy(reader.index.shards[int(reader.index.shard[row])].id)

    def has_copy(self, shard: ShardId) -> bool:
        stores = [self.members.nodes[number].store.root for number in self.up]
        if self.config.store not in stores:
            stores.append(self.config.store)
        for store in stores:
            path = store / f"{shard}.mdb"
            if path.is_file() and path.read_bytes() == self.sealed[shard]:
                return True
        return False

    # What operators do.

    @precondition(lambda self: self.versions and self.up)
    @rule(seed=st.integers(0, 10_000), force=st.booleans())
    def evict(self, seed: int, force: bool) -> None:
        rng = random.Random(seed)  # noqa: S311 - a choice
        shards = sorted(self.sealed)
        chosen = rng.sample(shards, rng.randint(1, len(shards)))
        node = self.members.nodes[rng.choice(self.up)]
        proved = self.members.skip(PROOF_KEPT_S)
        before = {shard for shard in self.sealed if self.is_safe(shard)}
        ask_to_evict(node.member, self.members.nodes.token, chosen, force=force, dry_run=False)
        if not force and proved:
            lost = {shard for shard in before - self.damaged if not self.is_safe(shard)}
            assert not lost, f"{node.name} dropped what cannot be had again: {lost}"

    def is_safe(self, shard: ShardId) -> bool:
        """Tell whether all samples of a shard that versions have can be had."""
        if self.has_copy(shard):
            return True
        for version in self.versions:
            reader = self.reader(version, anew=False)
            if reader is None:
                continue
            for number, entry in enumerate(reader.index.shards):
                if entry.id == shard:
                    rows = [row for row in range(len(reader)) if int(reader.index.shard[row]) == number]
                    if not all(self.can_be_had(reader, row) for row in rows):
                        return False
        return True

    @precondition(lambda self: self.catalogued() and self.up)
    @rule(seed=st.integers(0, 10_000))
    def fill(self, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - a choice
        version = rng.choice(self.catalogued())
        index = Catalog(self.config.catalog).open("digits", version)
        node = self.members.nodes[rng.choice(self.up)]
        numbers = [number for number in range(len(index.shards)) if rng.random() < 0.5] or [0]
        nodes = self.members.nodes
        for reply in fill(node.member, nodes.token, "digits", index, numbers, members=nodes.members):
            if not reply.problem:
                assert node.store.path(ShardId(reply.id)).read_bytes() == self.sealed[ShardId(reply.id)]

    @precondition(lambda self: len(self.catalogued()) > 1)
    @rule(seed=st.integers(0, 10_000), now=st.booleans())
    def remove_version(self, seed: int, now: bool) -> None:
        catalog = Catalog(self.config.catalog)
        others = [version for version in self.catalogued() if version != catalog.latest("digits")]
        gone = random.Random(seed).choice(others)  # noqa: S311 - a choice
        self.reader(gone, anew=False)  # a job that has it open
        catalog.remove("digits", gone, now=now)
        self.removed.add(gone)

    # Bad luck.

    @precondition(lambda self: self.up)
    @rule(seed=st.integers(0, 10_000))
    def kill(self, seed: int) -> None:
        self.members.kill(random.Random(seed).choice(self.up))  # noqa: S311 - a choice

    @precondition(lambda self: len(self.up) < MEMBERS)
    @rule(seed=st.integers(0, 10_000), wiped=st.booleans())
    def join(self, seed: int, wiped: bool) -> None:
        """A member comes back, or comes for the first time; its SSD may be a new one."""
        down = [number for number in range(MEMBERS) if number not in self.up]
        number = random.Random(seed).choice(down)  # noqa: S311 - a choice
        if wiped:
            shutil.rmtree(self.root / f"n{number}", ignore_errors=True)
        self.members.start(number)

    @rule()
    def lose_or_find_source(self) -> None:
        """The file system that the small files lie on goes away, or comes back."""
        away = self.root / "away"
        old, new = (away, self.source) if self.is_source_gone else (self.source, away)
        old.rename(new)
        self.is_source_gone = not self.is_source_gone

    @precondition(lambda self: self.sealed)
    @rule(seed=st.integers(0, 10_000), how=st.sampled_from(["flipped", "cut", "emptied"]))
    def damage(self, seed: int, how: str) -> None:
        rng = random.Random(seed)  # noqa: S311 - a choice
        store = self.members.nodes[rng.randrange(MEMBERS)].store
        for shard in store.ids():
            if rng.random() < 0.5:
                continue
            self.damaged.add(shard)
            path = store.path(shard)
            try:
                if how == "flipped":
                    flip(path, *range(8192 + rng.randrange(1000), path.stat().st_size, 1000))
                else:
                    os.truncate(path, path.stat().st_size // 2 if how == "cut" else 0)
            except FileNotFoundError:  # quarantined meanwhile
                continue

    @override
    def teardown(self) -> None:
        try:
            for version in self.versions:
                reader = self.reader(version, anew=version not in self.removed)
                if reader is not None:
                    self.check(reader, list(range(len(reader))))
        finally:
            for reader in self.readers.values():
                reader.close()
            for number in self.up:
                self.members.kill(number)
            # A reader that is closed may still be bringing a shard back.
            until(self._is_gone)

    def _is_gone(self) -> bool:
        shutil.rmtree(self.root, ignore_errors=True)
        return not self.root.exists()
