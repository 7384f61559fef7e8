"""Asks nodes for their shards, drops them, removes datasets, and checks that they hold what was packed."""

from __future__ import annotations

import enum
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import membership
from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import DatasetMissingError, HomeError, IndexFormatError, MemberError, ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.membership import configured_members, members_token, node_name, other_members
from deeplink.cache.pack.parts import unmerged
from deeplink.cache.read.batch import Batch, Copying
from deeplink.cache.read.mapped import ShardFile
from deeplink.cache.replicate import residency
from deeplink.cache.replicate.fetching import rows_of
from deeplink.cache.replicate.fill import ask_to_evict, evict
from deeplink.cache.replicate.shard_recovery import KnownShards, ReplicaLookup, stat_member
from deeplink.cache.source.home import FolderHome, home_beside, open_home
from deeplink.cache.source.opening import source_cap
from deeplink.cache.store.store import Store
from deeplink.cache.transfer.fleet import MemberPool
from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, listed
from deeplink.core.types import NodeName, ShardId
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.cache.replicate.residency import VersionResidency
    from deeplink.cache.transfer.frames import Transport
    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.types import Member, SampleKey, Version
    from deeplink.fs.library import DatasetPath

    Dropped = Mapping[NodeName, Sequence[cache_pb2.EvictedShard]]

log = logging.getLogger(__name__)

AT_HOME = NodeName("packed home")
_ASKED_AT_ONCE = 16
_BATCH_BYTES, _BATCH_SAMPLES = 16 << 20, 4096


@dataclass(frozen=True, slots=True)
class PackTarget:
    """The stores that a command is about: of members, or this node's."""

    config: Config  # the store is this node's own, or where shards wait on their way
    members: tuple[Member, ...]  # none: this node's store alone
    token: str
    stores: str  # what they are, in words


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """One shard on one node: bytes of its file, and whether the node has verified it."""

    bytes: int
    verified: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """Shards of each node."""

    here: NodeName
    nodes: Mapping[NodeName, Mapping[ShardId, HeldCopy] | None]  # None: it did not answer
    problems: Mapping[NodeName, str]  # of those that did not
    members: tuple[Member, ...]  # the nodes that have an agent, as configured
    token: str  # that agents ask for

    def holders(self, shard: ShardId) -> list[NodeName]:
        """Return the nodes that hold a shard, sorted."""
        return sorted(node for node, held in self.nodes.items() if held and shard in held)

    def owners(self, shard: ShardId, replicas: int) -> tuple[NodeName, ...]:
        """Return the nodes that a shard belongs on, the first one first; this node where there are no members."""
        names = [member.name for member in self.members] or [self.here]
        return membership.ranked(shard, names, membership.standing(self.members))[:replicas]

    def residency(self, index: Index, replicas: int) -> VersionResidency:
        """Return how much of a version is where, if there are to be so many copies as far as members go."""
        verified = {
            node: None if held is None else {shard: one.verified for shard, one in held.items()}
            for node, held in self.nodes.items()
        }
        copies = min(replicas, max(len(self.members), 1))
        return residency.residency(index, verified, replicas=copies, known=membership.standing(self.members))


def holdings(config: Config, clock: Clock) -> Holdings:
    """Return what this node's store holds, and what the members say they hold."""
    here, others = node_name(config), other_members(config)
    token = members_token(config, others)
    nodes: dict[NodeName, Mapping[ShardId, HeldCopy] | None] = {}
    problems: dict[NodeName, str] = {}
    members = configured_members(config)
    own = _own(config)
    if own or not members or len(others) < len(members):
        nodes[here] = own
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        answers = pool.map(lambda member: _asked(member, token, clock), others)
        for member, answer in zip(others, answers, strict=True):
            if isinstance(answer, MemberError):
                nodes[member.name], problems[member.name] = None, str(answer)
            else:
                nodes[member.name] = answer
    return Holdings(here, nodes, problems, members, token)


def _own(config: Config) -> dict[ShardId, HeldCopy]:
    store = Store(config.store, make=False)
    if not config.store.is_dir():
        return {}
    status = store.status()
    return {
        shard: HeldCopy(size, store.is_verified(shard))
        for shard, size in zip(status.ids, status.sizes, strict=True)
    }


def _asked(member: Member, token: str, clock: Clock) -> dict[ShardId, HeldCopy] | MemberError:
    try:
        reply = stat_member(member, token, clock)
    except MemberError as problem:
        return problem
    return {ShardId(shard.id): HeldCopy(shard.bytes, shard.verified) for shard in reply.shards}


def note_residency(catalog: Path, name: str, index: Index, found: VersionResidency) -> None:
    """Keep what members have said they verified of a version."""
    _note(catalog, name, index, {node.node: node.verified_bytes for node in found.nodes if node.answered})


def note_placed(catalog: Path, name: str, index: Index, placed: Mapping[ShardId, Iterable[NodeName]]) -> None:
    """Keep which nodes hold each shard of a version that was just packed, and verified as it came."""
    sizes: dict[NodeName, int] = {}
    for entry in index.shards:
        for node in placed.get(entry.id, ()):
            sizes[node] = sizes.get(node, 0) + entry.bytes
    _note(catalog, name, index, sizes)


def note_dropped(catalog: Catalog, name: str, dropped: Dropped) -> None:
    """Keep what is left where, of each of the dataset's versions that something is known of."""
    for version in catalog.versions(name):
        # Of one without an index nothing is kept.
        with suppress(DatasetMissingError, IndexFormatError, residency.UnknownHoldingError):
            index = catalog.open(name, version)
            before = residency.held(catalog.root, f"{name}@{version}", unix=SystemClock().unix()).bytes
            size = {entry.id: entry.bytes for entry in index.shards}
            gone = {
                node: sum(size.get(ShardId(one.id), 0) for one in shards if outcome_of(one) == "gone")
                for node, shards in dropped.items()
            }
            left = {node: max(0, before[node] - count) for node, count in gone.items() if node in before}
            _note(catalog.root, name, index, left)


def _note(catalog: Path, name: str, index: Index, sizes: Mapping[NodeName, int]) -> None:
    total = sum(entry.bytes for entry in index.shards)
    try:
        residency.note(catalog, name, index.version, sizes, total=total, unix=SystemClock().unix())
    except OSError as problem:
        # Who may not write to the catalog may read and warm; a job's nodes are then chosen without knowing it.
        log.info("where %s lies could not be noted: %s", name, problem)


def shards_to_drop(catalog: Catalog, place: DatasetPath, *, force: bool) -> tuple[list[ShardId], dict[str, int]]:
    """Return a dataset's shards that may go, and how many each other dataset has a share in, which stay.

    Of one version those go that no other version has. What a part has that waits to be merged stays, too.
    """
    parts = {} if force else unmerged(catalog)
    versions = catalog.versions(place.name)
    if not versions:
        raise catalog.missing(place.name)
    held = {version: {entry.id for entry in catalog.open(place.name, version).shards} for version in versions}
    wanted = set().union(*held.values())
    if place.version:
        chosen = catalog.resolved(place.name, place.version)
        wanted = held[chosen].difference(*(shards for version, shards in held.items() if version != chosen))
    staying: dict[str, set[str]] = {name: set(shards) for name, shards in parts.items()}
    for other in [] if force else catalog.names(lost=True):
        if other != place.name:
            staying.setdefault(other, set()).update(shards_of(catalog, other))
    shared = {name: found for name, shards in staying.items() if (found := wanted & shards)}
    return sorted(wanted.difference(*shared.values())), {other: len(found) for other, found in shared.items()}


def shards_of(catalog: Catalog, name: str, *, but: str = "") -> set[str]:
    """Return the shards of a dataset's versions but one; of one whose index is damaged, those on its record."""
    found: set[str] = set()
    for version in catalog.recorded(name):
        if version == but:
            continue
        record = catalog.record(name, version)
        if record is not None and record.shard_ids:
            found.update(record.shard_ids)
            continue
        with suppress(DatasetMissingError, IndexFormatError):
            found.update(entry.id for entry in catalog.open(name, version).shards)
    return found


def drop(
    shards: Sequence[ShardId], to: PackTarget, *, dry_run: bool, force: bool = False, last_copies: bool = False
) -> tuple[Dropped, list[str]]:
    """Have members, or without any this node, drop shards; return what became of each, and the problems.

    Those that a job needs stay unless by `force`; those that could not be had again, unless `last_copies`.
    """
    how = {"dry_run": dry_run, "force": force, "last_copies": last_copies}
    found: dict[NodeName, Sequence[cache_pb2.EvictedShard]] = {}
    if not to.members:
        config, clock, store = to.config, SystemClock(), Store(to.config.store, make=False)
        known = KnownShards(Catalog(config.catalog), clock)
        recovery = ReplicaLookup(node_name(config), "", known, source_cap(config, clock), clock)
        found[node_name(config)] = evict(store, shards, recovery, clock, **how).shards
    problems: list[str] = []
    # One after another: what one member drops the next one must not count on.
    for member in to.members:
        try:
            found[member.name] = ask_to_evict(member, to.token, shards, **how)
        except MemberError as problem:
            problems.append(str(problem))
    return found, problems


def outcome_of(shard: cache_pb2.EvictedShard) -> str:
    """Return the outcome as output has it."""
    return cache_pb2.EvictOutcome.Name(shard.outcome).removeprefix("EVICT_OUTCOME_").lower()


class CopyState(enum.Enum):
    """Result of checking one copy of a shard."""

    WHOLE = "whole"  # every sample was read, and is what was packed
    PRESENT = "present"  # of the right size; nothing was read
    WRONG = "wrong"  # of the wrong size, or samples are not what was packed, or cannot be read


@dataclass(frozen=True, slots=True)
class Copy:
    """A shard on one node."""

    node: NodeName
    state: CopyState
    wrong: tuple[SampleKey, ...] = ()  # not what was packed, or unreadable
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Result of checking all copies of a shard."""

    shard: ShardId
    samples: int  # of the version in it
    bytes: int  # of those samples
    copies: tuple[Copy, ...]

    @property
    def is_right(self) -> bool:
        """Whether there is a copy, and nothing wrong with any."""
        return bool(self.copies) and all(copy.state is not CopyState.WRONG for copy in self.copies)


class VersionVerification:
    """Reads every sample of a version from every node that holds it, and compares it with what was packed."""

    def __init__(self, index: Index, config: Config, held: Holdings, transport: Transport, clock: Clock) -> None:
        self._index, self._config, self._held = index, config, held
        self._transport, self._clock = transport, clock
        self._members = {member.name: member for member in held.members}

    def total(self) -> int:
        """Return how many samples there are to be read, in all copies."""
        return sum(entry.samples * len(self._held.holders(entry.id)) for entry in self._index.shards)

    def reports(self, *, quick: bool, progress: Callable[[int, int], None]) -> Iterator[ShardReport]:
        """Yield what is found out about one shard after another."""
        for number, entry in enumerate(self._index.shards):
            rows = rows_of(self._index, number)
            copies = []
            for node in self._held.holders(entry.id):
                held = (self._held.nodes[node] or {})[entry.id]
                if held.bytes != entry.bytes:
                    problem = f"its file has {held.bytes:,} bytes, and should have {entry.bytes:,}"
                    copies.append(Copy(node, CopyState.WRONG, (), problem))
                elif quick:
                    copies.append(Copy(node, CopyState.PRESENT))
                else:
                    copies.append(self._read(node, number, rows, progress))
            if self._index.home:
                copies += self._at_home(entry.id, entry.bytes, quick=quick)
            yield ShardReport(entry.id, len(rows), int(self._index.lengths[rows].sum()), tuple(copies))

    def _at_home(self, shard: ShardId, size: int, *, quick: bool) -> list[Copy]:
        """Return the copy in the packed home; none where it was not put there."""
        home = open_home(self._index.home)
        try:
            if not home.has(shard, size):
                return []
            if quick:
                return [Copy(AT_HOME, CopyState.PRESENT)]
            home.verify(shard)
        except (HomeError, ShardCorruptError) as problem:
            return [Copy(AT_HOME, CopyState.WRONG, (), str(problem))]
        return [Copy(AT_HOME, CopyState.WHOLE)]

    def _read(self, node: NodeName, number: int, rows: np.ndarray, progress: Callable[[int, int], None]) -> Copy:
        wrong: list[int] = []
        problems: list[str] = []
        for part in batches(self._index.lengths[rows], _BATCH_BYTES, _BATCH_SAMPLES):
            some = rows[part]
            found = self._wrong_here(number, some) if node == self._held.here else self._wrong_there(node, some)
            wrong += [int(some[position]) for position in found]
            problems += found.values()
            progress(len(some), int(self._index.lengths[some].sum()))
        if not wrong:
            return Copy(node, CopyState.WHOLE)
        return Copy(node, CopyState.WRONG, tuple(self._index.key(row) for row in wrong), problems[0])

    def _wrong_here(self, number: int, rows: np.ndarray) -> dict[int, str]:
        """Return the positions in `rows` that this node's copy has wrong, and what is wrong."""
        entry = self._index.shards[number]
        batch = Batch.empty(self._index.lengths[rows])
        work = Copying(self._index, rows, batch)
        everything = np.arange(len(rows))
        try:
            path = Store(self._config.store, make=False).path(entry.id)
            work.add(number, ShardFile(path, entry.id, mapped=False, expected=entry.bytes), everything, cold=True)
            problems = work.copy()
        except (ShardCorruptError, OSError) as problem:
            problems = [(number, problem)]
        if problems:
            return dict.fromkeys(everything.tolist(), str(problems[0][1]))
        wanted = self._index.checksums[rows].tolist()
        sums = [block.checksum(sample) for sample in batch.views()]
        return {p: "the bytes have changed" for p, (a, b) in enumerate(zip(sums, wanted, strict=True)) if a != b}

    def _wrong_there(self, node: NodeName, rows: np.ndarray) -> dict[int, str]:
        """Return the positions in `rows` that a member's copy has wrong, and what is wrong."""
        # One for each batch: it would not ask again for a shard that it was sent wrong bytes of.
        deadline_s = self._config.read_deadline_ms / 1000
        member = MemberPool(
            self._index, [self._members[node]], self._transport, self._clock, deadline_s=deadline_s
        )
        outcome = member.fill(rows, np.arange(len(rows)), Batch.empty(self._index.lengths[rows]))
        return {p: "; ".join(outcome.problems[p]) or "it is not served" for p in outcome.missing.tolist()}


def batches(lengths: np.ndarray, most_bytes: int, most_samples: int) -> Iterator[slice]:
    """Yield the parts of a list of samples that are read at once: of at most so many bytes, or of one sample."""
    start = 0
    while start < len(lengths):
        ends = np.cumsum(lengths[start : start + most_samples])
        count = max(int(np.searchsorted(ends, most_bytes, side="right")), 1)
        yield slice(start, start + count)
        start += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed, or would be."""

    name: str
    versions: tuple[Version, ...]
    shards: int  # copies on nodes
    bytes: int  # of these
    shared: Mapping[str, int]  # shards that stay, by the dataset that has them too
    kept: Mapping[str, str]  # by shard and node: why a copy stays all the same
    home: str  # where all shards are kept besides, and stay


def remove_dataset(catalog: Catalog, place: DatasetPath, to: PackTarget, *, dry_run: bool) -> Removed:
    """Remove a dataset, or one version of it, and its shards from the SSDs that are asked.

    Raises:
        DatasetMissingError, CatalogError: there is no such dataset or version, or it is the newest of several.
        DeepLinkError: a running job reads it, or a node does not say whether one does; nothing was removed.
    """
    chosen = catalog.resolved(place.name, place.version) if place.version else None
    shards, shared = shards_to_drop(catalog, place, force=False)
    if chosen:
        catalog.check_removable(place.name, chosen)
    versions: tuple[Version, ...] = (chosen,) if chosen else tuple(catalog.versions(place.name))
    record = catalog.record(place.name, versions[-1])
    done = _refused_if_read(place, shards, to)
    if not dry_run:
        if chosen:
            catalog.remove(place.name, chosen)
        else:
            catalog.remove_all(place.name)
        # What only this dataset could bring back goes too, but nothing that a job has begun to read since.
        done, problems = drop(shards, to, last_copies=True, dry_run=False)
        if chosen:
            note_dropped(catalog, place.name, done)
        if problems:
            raise DeepLinkError(f"removed from the catalog, but not from every node: {'; '.join(problems)}")
    copies = [(node, one) for node, held in done.items() for one in held if outcome_of(one) != "absent"]
    return Removed(
        name=place.name,
        versions=versions,
        shards=sum(outcome_of(one) == "gone" for _, one in copies),
        bytes=sum(one.bytes for _, one in copies if outcome_of(one) == "gone"),
        shared=shared,
        kept={f"{one.id} on {node}": one.problem for node, one in copies if outcome_of(one) != "gone"},
        home=record.home if record else "",
    )


def _refused_if_read(place: DatasetPath, shards: Sequence[ShardId], to: PackTarget) -> Dropped:
    """Return what would become of the shards, unless a job needs one of them or that is not known."""
    planned, problems = drop(shards, to, last_copies=True, dry_run=True)
    if problems:
        raise DeepLinkError(
            f"whether a job reads {place} is not known, so nothing is removed: {'; '.join(problems)}",
            remedy="Start those agents, or name the others by --members.",
        )
    reading: dict[NodeName, int] = {}
    for node, held in planned.items():
        if count := sum(outcome_of(one) == "needed" for one in held):
            reading[node] = count
    if reading:
        raise DeepLinkError(
            f"a running job reads {counted(sum(reading.values()), 'shard')} of {place} on {listed(reading)}: "
            "nothing is removed",
            remedy="Wait until the job ends, or cancel it.",
        )
    return planned


def orphans(catalog: Catalog, name: str, version: Version) -> tuple[str, list[str]]:
    """Return the home of a version, and its shards there that no other version in the catalog, and no part, has.

    Empty where it is not the catalog's own home: other catalogs may count on that. Raises DeepLinkError where the
    index of the version, or a part's, cannot be read.
    """
    parts = unmerged(catalog)
    index = catalog.open(name, version)
    if index.home != home_beside(catalog.root):
        return "", []
    left = {entry.id for entry in index.shards}.difference(*parts.values())
    for other in catalog.names(lost=True):
        left -= shards_of(catalog, other, but=version if other == name else "")
    return index.home, sorted(left)


def remove_at_home(url: str, name: str, version: Version, shards: list[str]) -> None:
    """Remove an index and shards from a home in a folder."""
    home = FolderHome(url)
    home.remove_index(name, version)
    for shard in shards:
        home.remove(ShardId(shard))
