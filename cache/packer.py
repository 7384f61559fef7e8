"""Packs a source: list once, plan, then shard by shard read, write, seal, place; publish at the very end.

What was sealed and placed is noted as it goes (`staging`), so a packer that was killed goes on from there, and
nothing can be seen of a dataset until all of it is placed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog, PackRecord, checked_name
from deeplink.cache.errors import AppendError
from deeplink.cache.holding.local_budget import keep_to_budget
from deeplink.cache.membership import node_name
from deeplink.cache.packing.distributed_pack import (
    DistributedPack,
    Gone,
    PackTask,
    ReadProgress,
    ShardMade,
    ShardShare,
)
from deeplink.cache.packing.jobs import planned_job
from deeplink.cache.packing.placing import Placer
from deeplink.cache.packing.shard_pipeline import PipelineContext, ShardPipeline
from deeplink.cache.packing.staging import staging
from deeplink.cache.source import open_source
from deeplink.cache.sources.folder import refuse_within
from deeplink.cache.sources.home import open_home
from deeplink.cache.sources.reading import FileReader
from deeplink.cache.store import Store
from deeplink.clock import Clock, SystemClock
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    import numpy as np

    from deeplink.cache.names import Names
    from deeplink.cache.packing.jobs import PackJob
    from deeplink.cache.packing.plan import PackPlan
    from deeplink.cache.packing.staging import Piece, Staging
    from deeplink.cache.sources.origin import Listing
    from deeplink.config import Config
    from deeplink.types import Member, NodeName, Version


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

    total_files: int
    total_bytes: int
    total_shards: int
    listener: Callable[[PackProgress], None]
    files: int = 0
    bytes: int = 0
    shards: int = 0
    read_files: int = 0

    def add(self, files: int, size: int, *, shards: int = 0) -> None:
        self.files += files
        self.bytes += size
        self.shards += shards
        self.listener(
            PackProgress(
                files=self.files,
                bytes=self.bytes,
                shards=self.shards,
                total_files=self.total_files,
                total_bytes=self.total_bytes,
                total_shards=self.total_shards,
            )
        )

    def was_read(self, files: int, size: int) -> None:
        self.read_files += files
        self.add(files, size)


def plan_pack(
    source: str, name: str, *, config: Config, members: int = 0, append: bool = False
) -> tuple[Listing, PackPlan, int]:
    """Return what `pack` onto so many members would do; writes nothing.

    Returns:
        What the source holds, the shards to be, and how many of them are there already.

    Raises:
        SourceError, SourceFileError, BadKeyError, KeyCollisionError: the source cannot be packed.
        DatasetNameError: `name` cannot be a dataset's.
        AppendError: there is nothing to append to.
        CatalogError: the catalog cannot be read.
    """
    checked_name(name)
    job = planned_job(open_source(source), Catalog(config.catalog), name, config, members=members, append=append)
    return job.listing, job.plan, sum(job.known(number) is not None for number in range(len(job.plan.shards)))


def check_pack(source: str, name: str, *, config: Config, append: bool = False, home: str = "") -> None:
    """Find what can be known to be wrong with a packing before anything is started for it; takes next to no time.

    Raises:
        SourceError: the source is not there, of an unknown kind, or holds the catalog, the store or the home.
        DatasetNameError: `name` cannot be a dataset's.
        AppendError: there is nothing to append to.
        HomeError: the home cannot be asked.
        CatalogError: the catalog cannot be written.
    """
    checked_name(name)
    origin, catalog = open_source(source), Catalog(config.catalog)
    origin.check()
    refuse_within(origin, {"catalog": str(config.catalog), "store": str(config.store), "home": home})
    catalog.check_writable(name)
    if append and not catalog.versions(name):
        raise AppendError(name, "it has no version yet")
    if home:
        open_home(home).has(ShardId("0" * 40), 0)


def pack(
    source: str,
    name: str,
    *,
    config: Config,
    members: Sequence[Member] = (),
    token: str = "",
    progress: Callable[[PackProgress], None] = lambda _: None,
    clock: Clock | None = None,
    append: bool = False,
    home: str = "",
) -> PackResult:
    """Pack a source as the newest version of dataset `name`, and place `config.replicas` copies of each shard.

    Shards have at most `config.shard_bytes` of samples, and less where several members are to share few (see
    `plan.shard_size`). While no file changes they stay as they are, unless they are larger than that or too few.
    Members pack their share themselves (see `distributed_pack`); what none of them can pack, this process packs.

    Args:
        source: a local folder or an fsspec URL.
        name: what to call the dataset.
        config: catalog, store, replicas, shard size and this node's name.
        members: the agents to place shards on; none: this node's store alone.
        token: what calls to members carry.
        progress: called as files are read, in this thread.
        clock: where time comes from.
        append: share with the newest version what has not changed since (see `appending`).
        home: a folder or URL to keep each shard and the index in besides; empty for none.

    Raises:
        SourceError, SourceFileError, SourceChangedError: the source cannot be packed as it is.
        BadKeyError, KeyCollisionError: names in it cannot be keys.
        DatasetNameError: `name` cannot be a dataset's.
        AppendError: there is nothing to append to, or it is of another source.
        StoreFullError, StoreError, ShardWriteError: shards cannot be written here.
        PlacementError: no member takes a shard.
        HomeError: the home cannot be used.
        PackRunningError: the same is being packed by another process.
        CatalogError: the catalog cannot be written.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    checked_name(name)
    origin, catalog, store = open_source(source), Catalog(config.catalog), Store(config.store)
    kept_at = open_home(home) if home else None
    catalog.check_writable(name)
    job = planned_job(origin, catalog, name, config, members=len(members), append=append)
    tally = _Tally(len(job.listing), int(job.listing.sizes.sum()), len(job.plan.shards), progress)
    with (
        Placer(store, node_name(config), members, token, replicas=config.replicas) as placer,
        staging(store.root, job.plan.digest, clock.unix()) as stage,
        FileReader(origin, clock) as reader,
        ShardPipeline(origin, reader, PipelineContext(store, stage, placer, kept_at), tally.was_read) as line,
    ):
        try:
            job.put_aside(stage.folder)
        except OSError as problem:
            store.raise_as_store_error(problem, 8 * len(job.listing))
        if not members:
            placer.needed.update(job.shared())
            keep_to_budget(store, config, clock, staying=placer.needed)
        work = _Work(job, line, stage, placer, tally)
        todo = work.reused()
        if members and todo:
            task = PackTask(origin.url, job.plan.digest, tuple(members), config.replicas, home)
            todo = work.spread(todo, DistributedPack(task, token, clock))
        work.build(todo)
        record = _record(job, tally, clock)
        version = catalog.publish(name, job.content(work.pieces, home), record)
        job.keep_marks(catalog.path(name, version))
        if kept_at is not None:
            kept_at.put_index(name, version, catalog.path(name, version))
        placed = {piece.id: placer.holders(piece.id, piece.bytes) for piece in work.pieces.values()}
    return PackResult(
        name=name,
        version=version,
        files=record.files,
        bytes=record.bytes,
        shards=record.shards,
        seconds=clock.monotonic() - began,
        placed=placed,
        read_files=tally.read_files,
        unchanged=version == job.before,
        short=sum(len(holders) < placer.wanted for holders in placed.values()),
    )


def _record(job: PackJob, tally: _Tally, clock: Clock) -> PackRecord:
    return PackRecord(
        source=job.source,
        plan=job.plan.digest,
        shard_bytes=job.plan.shard_bytes,
        files=tally.total_files,
        bytes=tally.total_bytes,
        shards=tally.total_shards,
        packed_unix=clock.unix(),
    )


@dataclass(slots=True)
class _Work:
    """Makes the shards of a job, by whom it can."""

    job: PackJob
    line: ShardPipeline
    stage: Staging
    placer: Placer
    tally: _Tally
    pieces: dict[int, Piece] = field(default_factory=dict)

    def _rows(self, number: int) -> tuple[Names, np.ndarray]:
        rows = self.job.plan.shards[number].rows
        return self.job.listing.keys[rows], self.job.listing.sizes[rows]

    def _settle(self, number: int, piece: Piece) -> None:
        self.pieces[number] = self.job.kept(number, piece)
        self.tally.add(0, 0, shards=1)

    def reused(self) -> list[int]:
        """Give all shards that were packed before the copies they lack; return the numbers of the others."""
        todo = []
        for number, wanted in enumerate(self.job.plan.shards):
            count = wanted.stop - wanted.start
            piece = self.job.known(number)
            if piece is None and self.job.listing.marked:
                piece = self.stage.noted(number, count)
            if piece is not None and self.line.keep(number, piece):
                self.tally.add(count, wanted.payload)
                self._settle(number, piece)
            else:
                todo.append(number)
        return todo

    def spread(self, numbers: list[int], spread: DistributedPack) -> list[int]:
        """Have members pack these shards; return the numbers of those that are left to do here."""
        able = [member for member in spread.task.members if self.placer.answers(member.name)]
        with spread.among(able, numbers, self._asked) as events:
            for event in events:
                if isinstance(event, ReadProgress):
                    self.tally.was_read(event.files, event.bytes)
                elif isinstance(event, ShardMade):
                    self.placer.saw(event.piece.id, event.piece.bytes, event.holders)
                    self.stage.note(event.number, event.piece)
                    self._settle(event.number, event.piece)
                elif isinstance(event, Gone):
                    self.placer.silent(event.member, event.problem)
                else:
                    # Whether the file is at fault or that node's way to it, this process finds out.
                    self.build([event.number])
        self._complete([number for number in numbers if number in self.pieces])
        return [number for number in numbers if number not in self.pieces]

    def _complete(self, numbers: Sequence[int]) -> None:
        """Give shards the copies they lack; a member that is found gone by it makes others lack one."""
        tried: set[int] = set()
        while short := [n for n in numbers if n not in tried and not self._is_placed(n)]:
            tried.update(short)
            for number in short:
                self.line.keep(number, self.pieces[number])

    def _is_placed(self, number: int) -> bool:
        return self.placer.is_placed(self.pieces[number].id, self.pieces[number].bytes)

    def _asked(self, number: int) -> ShardShare:
        names, sizes = self._rows(number)
        return ShardShare(number, names, sizes, self.job.first_mark(number))

    def build(self, numbers: Sequence[int]) -> None:
        """Make these shards here."""
        under_way: deque[tuple[int, Future[Piece]]] = deque()
        for number in numbers:
            under_way.append((number, self.line.build(number, *self._rows(number))))
            while len(under_way) > 1 or (under_way and under_way[0][1].done()):
                done, finished = under_way.popleft()
                self._settle(done, finished.result())
        for done, finished in under_way:
            self._settle(done, finished.result())
