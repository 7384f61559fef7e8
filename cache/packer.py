"""Packs a source: list once, plan, then shard by shard read, write, seal, place; publish at the very end.

What was sealed and placed is noted as it goes (`staging`), so a packer that was killed goes on from there, and
nothing can be seen of a dataset until all of it is placed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block, layout
from deeplink.cache.building import ShardBuilder
from deeplink.cache.catalog import Catalog, PackRecord, checked_name
from deeplink.cache.errors import DatasetMissingError, IndexFormatError, ShardCorruptError
from deeplink.cache.index import IndexContent, ShardEntry
from deeplink.cache.membership import node_name
from deeplink.cache.placing import Placer
from deeplink.cache.plan import SHARDS_PER_MEMBER, Plan, ShardPlan, make_plan, shard_size
from deeplink.cache.reading import FileReader
from deeplink.cache.source import Listing, Source, open_source
from deeplink.cache.staging import Piece, Staging, staging
from deeplink.cache.store import Store
from deeplink.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deeplink.config import Config
    from deeplink.types import Member, NodeName, ShardId, Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far a packing is; `files` and `bytes` count those of reused shards too."""

    files: int
    bytes: int
    shards: int
    total_files: int
    total_bytes: int
    total_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a packing came to.

    Attributes:
        name: the dataset.
        version: what its name points at now.
        files: samples in it.
        bytes: their bytes.
        shards: its shards.
        seconds: how long it took.
        placed: per shard the nodes that hold a copy.
        read_files: files read from the source; fewer than `files` where sealed shards were reused.
        unchanged: the version was the newest one already.
        short: shards with fewer copies than wanted.
    """

    name: str
    version: Version
    files: int
    bytes: int
    shards: int
    seconds: float
    placed: Mapping[ShardId, tuple[NodeName, ...]]
    read_files: int
    unchanged: bool
    short: int


@dataclass(slots=True)
class _Tally:
    """Counts what is done and tells the listener."""

    plan: Plan
    listing: Listing
    listener: Callable[[PackProgress], None]
    files: int = 0
    bytes: int = 0
    shards: int = 0
    read_files: int = 0
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.total_bytes = int(self.listing.sizes.sum())

    def add(self, files: int, size: int, *, shards: int = 0) -> None:
        self.files += files
        self.bytes += size
        self.shards += shards
        self.listener(
            PackProgress(
                files=self.files,
                bytes=self.bytes,
                shards=self.shards,
                total_files=len(self.listing),
                total_bytes=self.total_bytes,
                total_shards=len(self.plan.shards),
            )
        )

    def was_read(self, files: int, size: int) -> None:
        self.read_files += files
        self.add(files, size)


def plan_pack(source: str, name: str, *, config: Config, members: int = 0) -> tuple[Listing, Plan]:
    """Return what `pack` onto so many members would do: what the source holds, the shards to be. Writes nothing.

    Raises:
        SourceError, SourceFileError, BadKeyError, KeyCollisionError: the source cannot be packed.
        DatasetNameError: `name` cannot be a dataset's.
        CatalogError: the catalog cannot be read.
    """
    origin = open_source(source)
    listing = origin.listing()
    catalog = Catalog(config.catalog)
    record = _record_of(catalog, name, _latest(catalog, name))
    return listing, _planned(origin.url, listing, config.shard_bytes, members, record)


def _planned(source: str, listing: Listing, most: int, members: int, before: PackRecord | None) -> Plan:
    """Return the plan of the newest version if it still serves, so that nothing changes where no file did."""
    size = shard_size(int(listing.sizes.sum()), most, members)
    # Half as many shards as a new plan would have still spread well.
    if before is not None and (
        0 < before.shard_bytes < size
        or (size <= before.shard_bytes <= most and before.shards * 2 >= members * SHARDS_PER_MEMBER)
    ):
        kept = make_plan(source, listing, before.shard_bytes)
        if kept.digest == before.plan:
            return kept
    return make_plan(source, listing, size)


def check_pack(source: str, name: str, *, config: Config) -> None:
    """Find what can be known to be wrong with a packing before anything is started for it; takes next to no time.

    Raises:
        SourceError: the source is not there, or of an unknown kind.
        DatasetNameError: `name` cannot be a dataset's.
        CatalogError: the catalog cannot be written.
    """
    checked_name(name)
    open_source(source).check()
    Catalog(config.catalog).check_writable(name)


def pack(
    source: str,
    name: str,
    *,
    config: Config,
    members: Sequence[Member] = (),
    token: str = "",
    progress: Callable[[PackProgress], None] = lambda _: None,
    clock: Clock | None = None,
) -> PackResult:
    """Pack a source as the newest version of dataset `name`, and place `config.replicas` copies of each shard.

    Shards have at most `config.shard_bytes` of samples, and less where several members are to share few (see
    `plan.shard_size`). While no file changes they stay as they are, unless they are larger than that or too few.

    Args:
        source: a local folder or an fsspec URL.
        name: what to call the dataset.
        config: catalog, store, replicas, shard size and this node's name.
        members: the agents to place shards on; none: this node's store alone.
        token: what calls to members carry.
        progress: called after each block, in this thread.
        clock: where time comes from.

    Raises:
        SourceError, SourceFileError, SourceChangedError: the source cannot be packed as it is.
        BadKeyError, KeyCollisionError: names in it cannot be keys.
        DatasetNameError: `name` cannot be a dataset's.
        StoreFullError, StoreError, ShardWriteError: shards cannot be written here.
        PlacementError: no member takes a shard.
        PackRunningError: the same is being packed by another process.
        CatalogError: the catalog cannot be written.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    checked_name(name)
    origin = open_source(source)
    listing = origin.listing()
    catalog, store = Catalog(config.catalog), Store(config.store)
    catalog.check_writable(name)
    before = _latest(catalog, name)
    past = _record_of(catalog, name, before)
    plan = _planned(origin.url, listing, config.shard_bytes, len(members), past)
    tally = _Tally(plan, listing, progress)
    known = {}
    if before and past and past.plan == plan.digest and listing.marked:
        known = _published(catalog, name, before, plan)
    with (
        Placer(store, node_name(config), members, token, replicas=config.replicas) as placer,
        FileReader(origin, clock) as reader,
        staging(store.root, plan.digest, clock.unix()) as stage,
    ):
        work = _Work(origin, reader, listing, plan, store, stage, placer, tally)
        pieces = [work.shard(number, known.get(number)) for number in range(len(plan.shards))]
        record = _record(origin.url, tally, clock)
        version = catalog.publish(name, _content(origin.url, listing, plan, pieces), record)
        placed = {piece.id: placer.holders(piece.id) for piece in pieces}
    return PackResult(
        name=name,
        version=version,
        files=record.files,
        bytes=record.bytes,
        shards=record.shards,
        seconds=clock.monotonic() - began,
        placed=placed,
        read_files=tally.read_files,
        unchanged=version == before,
        short=sum(len(holders) < placer.wanted for holders in placed.values()),
    )


def _record(source: str, tally: _Tally, clock: Clock) -> PackRecord:
    return PackRecord(
        source=source,
        plan=tally.plan.digest,
        shard_bytes=tally.plan.shard_bytes,
        files=len(tally.listing),
        bytes=tally.total_bytes,
        shards=len(tally.plan.shards),
        packed_unix=clock.unix(),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """Makes one shard after another."""

    origin: Source
    reader: FileReader
    listing: Listing
    plan: Plan
    store: Store
    stage: Staging
    placer: Placer
    tally: _Tally

    def shard(self, number: int, published: Piece | None) -> Piece:
        """Return the piece of one shard, which has its copies then; reads the source only if nobody holds it."""
        wanted = self.plan.shards[number]
        count = wanted.stop - wanted.start
        piece = published
        if piece is None and self.listing.marked:
            piece = self.stage.noted(number, count)
        if piece is not None and self._is_held(piece, number):
            self.tally.add(count, wanted.payload, shards=1)
            return piece
        built = self._built(wanted, number)
        self.tally.add(0, 0, shards=1)
        return built

    def _is_held(self, piece: Piece, number: int) -> bool:
        if self.placer.is_placed(piece.id):
            return True
        draft = self.stage.draft(number)
        try:
            if not self.placer.fetch(piece.id, draft):
                return False
            _verify(draft, piece.id)
        except ShardCorruptError as problem:
            log.warning("%s", problem)
            return False
        except OSError as problem:
            self.store.raise_as_store_error(problem, piece.bytes)
        self.placer.place(piece.id, draft)
        return True

    def _built(self, wanted: ShardPlan, number: int) -> Piece:
        draft = self.stage.draft(number)
        builder = ShardBuilder(self.origin, self.reader, self.listing, wanted, self.tally.was_read)
        try:
            piece = Piece.of(builder.build(draft))
            self.placer.place(piece.id, draft)
            self.stage.note(number, piece)
        except OSError as problem:
            self.store.raise_as_store_error(problem, wanted.payload)
        return piece


def _verify(path: Path, shard: ShardId) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout.verify(descriptor, shard)
    finally:
        os.close(descriptor)


def _latest(catalog: Catalog, name: str) -> Version | None:
    try:
        return catalog.latest(name)
    except (DatasetMissingError, IndexFormatError):
        return None


def _record_of(catalog: Catalog, name: str, version: Version | None) -> PackRecord | None:
    return catalog.record(name, version) if version else None


def _published(catalog: Catalog, name: str, version: Version, plan: Plan) -> dict[int, Piece]:
    """Return the pieces of a version that was packed by this very plan; none if its index is damaged."""
    try:
        index = catalog.open(name, version)
        index.verify()
    except (IndexFormatError, DatasetMissingError) as problem:
        log.warning("the published index is not used: %s", problem)
        return {}
    return {
        number: Piece(entry.id, entry.bytes, index.block_offsets(number), index.checksums[wanted.rows])
        for number, (entry, wanted) in enumerate(zip(index.shards, plan.shards, strict=True))
    }


def _content(source: str, listing: Listing, plan: Plan, pieces: Sequence[Piece]) -> IndexContent:
    counts = [wanted.stop - wanted.start for wanted in plan.shards]
    places = [block.arrange(listing.sizes[wanted.rows].tolist()) for wanted in plan.shards]
    return IndexContent(
        source=source,
        shards=[
            ShardEntry(id=piece.id, bytes=piece.bytes, samples=count, blocks=len(piece.block_offsets))
            for piece, count in zip(pieces, counts, strict=True)
        ],
        block_offsets=[piece.block_offsets for piece in pieces],
        keys=listing.keys,
        shard=np.repeat(np.arange(len(pieces), dtype=np.uint32), counts),
        block=np.concatenate([place[0] for place in places]),
        offset=np.concatenate([place[1] for place in places]),
        length=listing.sizes.astype(np.uint64),
        checksum=np.concatenate([piece.checksums for piece in pieces]),
    )
