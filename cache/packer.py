"""Packs a source: list once, plan, then shard by shard read, write, seal, place; publish at the very end.

What was sealed and placed is noted as it goes (`staging`): a packer that was killed goes on from there.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.catalog import Catalog, PackRecord, checked_name
from deeplink.cache.errors import CatalogError, DatasetMissingError, HomeError, IndexFormatError, SourceError
from deeplink.cache.membership import node_name
from deeplink.cache.pack.distributed_pack import DistributedPack, ShardShare
from deeplink.cache.pack.parts import publish_part, removed_if_outdated, shared_listing
from deeplink.cache.pack.plan import cannot_append, planned_job
from deeplink.cache.pack.shard_pipeline import Placer, ShardPipeline, staging
from deeplink.cache.replicate.budget import keep_to_budget
from deeplink.cache.source.home import open_home, readmit
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.selection import Selection
from deeplink.cache.store.store import Store
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.types import Version, format_members
from deeplink.v1 import cache_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    import numpy as np

    from deeplink.cache.format.names import Names
    from deeplink.cache.pack.building import Piece
    from deeplink.cache.pack.parts import Part
    from deeplink.cache.pack.plan import PackJob, PackPlan
    from deeplink.cache.source.home import PackedHome
    from deeplink.cache.source.source import Listing, Source
    from deeplink.core.config import Config
    from deeplink.core.types import Member, NodeName, ShardId

log = logging.getLogger(__name__)

USUAL = Selection()
"""What is packed unless something else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far a packing is; `files` and `bytes` count those of reused shards too."""

    files: int = 0
    bytes: int = 0
    shards: int = 0
    total_files: int
    total_bytes: int
    total_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a packing came to."""

    name: str  # of the dataset
    version: Version  # what its name points at now; empty where only a part was packed
    files: int
    bytes: int  # of samples
    shards: int
    seconds: float
    placed: Mapping[ShardId, tuple[NodeName, ...]]  # per shard the nodes that hold a copy
    read_files: int  # from the source; fewer than `files` where sealed shards were reused
    unchanged: bool  # the version was the newest one already
    short: int  # shards with fewer copies than wanted
    left_out: Mapping[str, int]  # per glob the files and folders of the source that it left out
    skipped: Mapping[str, str]  # files that cannot be packed and were skipped, and why; the first 10,000
    skipped_count: int
    home: str = ""  # where the shards are kept besides; empty for nowhere
    home_bytes: int = 0  # of the shards that are there
    home_lacks: int = 0  # shards that are not, of a home that was wanted
    home_problem: str = ""  # why


@dataclass(slots=True)
class _Tally:
    """Counts what is done and reports it."""

    done: PackProgress
    listener: Callable[[PackProgress], None]
    read_files: int = 0

    def add(self, files: int, size: int, *, shards: int = 0) -> None:
        done = self.done
        self.done = replace(done, files=done.files + files, bytes=done.bytes + size, shards=done.shards + shards)
        self.listener(self.done)

    def was_read(self, files: int, size: int) -> None:
        self.read_files += files
        self.add(files, size)


def plan_pack(
    source: str,
    name: str,
    *,
    config: Config,
    wanted: Selection = USUAL,
    members: int = 0,
    append: bool = False,
) -> tuple[Listing, PackPlan, int]:
    """Return what `pack` onto so many members would do; writes nothing."""
    checked_name(name)
    catalog = Catalog(config.catalog)
    origin = open_source(source)
    list_source = partial(origin.listing, wanted)
    job = planned_job(origin, catalog, name, config, list_source=list_source, members=members, append=append)
    return job.listing, job.plan, sum(job.known(number) is not None for number in range(len(job.plan.shards)))


def _refuse_within(source: Source, places: Mapping[str, str]) -> None:
    """Return if none of some folders lies in a source: what is written there would be packed the next time."""
    for what, place in places.items():
        folder = place.removeprefix("file://")
        if not (source.local and folder) or "://" in folder:
            continue
        if Path(folder).resolve().is_relative_to(Path(source.url).resolve()):
            problem = f"the {what} {place} lies in it, and would be packed too"
            raise SourceError(source.url, problem, f"Let the {what} lie elsewhere, or pack a folder without it.")


def check_pack(
    source: str | Source,
    name: str,
    *,
    config: Config,
    append: bool = False,
    home: str = "",
    replace: bool = False,
) -> None:
    """Find what is wrong with a packing before anything is started for it.

    Unless `replace`, that the dataset's newest version is of another source is wrong, too.
    """
    checked_name(name)
    origin = open_source(source) if isinstance(source, str) else source
    catalog = Catalog(config.catalog)
    origin.check()
    _refuse_within(origin, {"catalog": str(config.catalog), "store": str(config.store), "home": home})
    catalog.check_writable(name)
    if append and not catalog.versions(name):
        raise cannot_append(name, "it has no version yet")
    if not replace and (packed := _packed_source(catalog, name)) not in {"", origin.url}:
        raise CatalogError(
            f"dataset {name!r} is packed from {packed}; its name would move to {origin.url}",
            "Take another name, or let it move: --replace. Its versions stay readable as NAME@VERSION.",
            exit_code=2,
        )
    if home:
        open_home(home).check_writable()


def _packed_source(catalog: Catalog, name: str) -> str:
    """Return where the newest version of a dataset was packed from; empty where that is not known."""
    try:
        return catalog.open(name).source
    except (DatasetMissingError, IndexFormatError):
        return ""


def pack(  # noqa: PLR0913 - what a packing is made of
    source: str | Source,
    name: str,
    *,
    config: Config,
    wanted: Selection = USUAL,
    members: Sequence[Member] = (),
    token: str = "",
    progress: Callable[[PackProgress], None] = lambda _: None,
    clock: Clock | None = None,
    append: bool = False,
    home: str = "",
    part: Part | None = None,
) -> PackResult:
    """Pack a source as the newest version of dataset `name`, and place `config.replicas` copies of each shard.

    Shards have at most `config.shard_bytes` of samples, and less where several members are to share few (see
    `plan.shard_size`). While no file changes they stay as they are, unless they are larger than that or too few.
    Members pack their share themselves (see `distributed_pack`); what none of them can pack, this process packs.
    A `home` that cannot be used, or takes no more, ends no pack: the result says what it lacks, and why.
    Of a `part` only the shards are made; `parts.merge_parts` publishes the version once all parts are there.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    checked_name(name)
    origin = open_source(source) if isinstance(source, str) else source
    catalog, store = Catalog(config.catalog), Store(config.store)
    home = open_home(home).url if home else ""  # absolute: members and readers run elsewhere
    catalog.check_writable(name)
    listed_unix = clock.unix()
    key = part.listing_key(origin.url, wanted) if part is not None else ""
    list_source = partial(origin.listing, wanted)
    job = planned_job(
        origin,
        catalog,
        name,
        config,
        list_source=partial(shared_listing, catalog, name, key, list_source, clock) if key else list_source,
        members=len(members),
        append=append,
    )
    kept_at = open_home(home, job.listing.access) if home else None
    numbers = part.shards(len(job.plan.shards)) if part is not None else range(len(job.plan.shards))
    mine = [job.plan.shards[number] for number in numbers]
    planned = PackProgress(
        total_files=sum(shard.stop - shard.start for shard in mine),
        total_bytes=sum(shard.payload for shard in mine),
        total_shards=len(mine),
    )
    tally = _Tally(planned, progress)
    with (
        removed_if_outdated(catalog, name, key) if key else nullcontext(),
        Placer(store, node_name(config), members, token, replicas=config.replicas) as placer,
        staging(store.root, f"{job.plan.digest}{part or ''}", clock.unix()) as stage,
        ShardPipeline(origin, store, stage, placer, home=kept_at, clock=clock, done=tally.was_read) as line,
    ):
        try:
            job.put_aside(stage.folder)
        except OSError as problem:
            store.raise_as_store_error(problem, 8 * len(job.listing))
        if not members:
            placer.needed.update(job.shared())
            keep_to_budget(store, config, clock, staying=placer.needed)
        work = _Work(job, line, tally)
        todo = work.reused(numbers)
        if members and todo and origin.elsewhere:
            task = cache_pb2.PackTask(
                source=origin.url,
                plan=job.plan.digest,
                members=format_members(tuple(members)),
                replicas=config.replicas,
                home=home,
                access=job.listing.access,
            )
            able = [member for member in members if placer.answers(member.name)]
            todo = work.spread(todo, task, token, clock, able)
        work.build(todo)
        is_whole = not (wanted.include or job.listing.left_out or job.listing.bad_count)
        lacking, why = _lacking(kept_at, work.pieces)
        at_home = {piece.id: piece.bytes for piece in work.pieces.values() if piece.id not in lacking}
        if kept_at is not None:
            readmit(kept_at, catalog, name, at_home)
        record = PackRecord(
            source=job.source,
            plan=job.plan.digest,
            shard_bytes=job.plan.shard_bytes,
            files=len(job.listing),
            bytes=sum(shard.payload for shard in job.plan.shards),
            shards=len(job.plan.shards),
            packed_unix=clock.unix(),
            listed_unix=(job.listing.listed_unix or listed_unix) if is_whole else 0.0,
            home=home if at_home else "",
            access=job.listing.access,
        )
        placed = {piece.id: placer.holders(piece.id, piece.bytes) for piece in work.pieces.values()}
        if part is not None:
            publish_part(catalog, name, part, job, work.pieces, record=record, placed=placed, listing=key)
            version = Version("")
        else:
            version = catalog.publish(name, job.content(work.pieces, record.home), record)
            job.keep_marks(catalog.path(name, version))
            if kept_at is not None and not lacking:
                try:
                    kept_at.put_index(name, version, catalog.path(name, version))
                except HomeError as problem:
                    why = str(problem)
    return PackResult(
        name=name,
        version=version,
        files=planned.total_files,
        bytes=planned.total_bytes,
        shards=planned.total_shards,
        seconds=clock.monotonic() - began,
        placed=placed,
        read_files=tally.read_files,
        unchanged=version == job.before,
        short=sum(len(holders) < placer.wanted for holders in placed.values()),
        left_out=job.listing.left_out,
        skipped=job.listing.bad,
        skipped_count=job.listing.bad_count,
        home=home if at_home else "",
        home_bytes=sum(at_home.values()),
        home_lacks=len(lacking) if home else 0,
        home_problem=line.home_problem or why,  # that of a member is in its log
    )


def _lacking(home: PackedHome | None, pieces: Mapping[int, Piece]) -> tuple[set[ShardId], str]:
    """Return the shards that a home has not, and what is in the way; without a home all of them."""
    everything = {piece.id: piece.bytes for piece in pieces.values()}
    if home is None:
        return set(everything), ""
    try:
        lacking = set(home.lacking(list(everything.items())))
    except HomeError as problem:
        return set(everything), str(problem)
    return lacking, "a member could not write there" if lacking else ""


@dataclass(slots=True)
class _Work:
    """Makes the shards of a job, reused, by members or here."""

    job: PackJob
    line: ShardPipeline
    tally: _Tally
    pieces: dict[int, Piece] = field(default_factory=dict)

    def _rows(self, number: int) -> tuple[Names, np.ndarray]:
        rows = self.job.plan.shards[number].rows
        return self.job.listing.keys[rows], self.job.listing.sizes[rows]

    def _settle(self, number: int, piece: Piece) -> None:
        self.pieces[number] = self.job.kept(number, piece)
        self.tally.add(0, 0, shards=1)

    def reused(self, numbers: range) -> list[int]:
        """Give shards that were packed before the copies they lack; return the numbers of the others."""
        todo = []
        for number in numbers:
            wanted = self.job.plan.shards[number]
            count = wanted.stop - wanted.start
            piece = self.job.known(number)
            if piece is None and self.job.listing.marked:
                piece = self.line.stage.noted(number, count)
            if piece is not None and self.line.keep(number, piece):
                self.tally.add(count, wanted.payload)
                self._settle(number, piece)
            else:
                todo.append(number)
        return todo

    def _made(self, number: int, piece: Piece, holders: Sequence[NodeName]) -> None:
        self.line.placer.saw(piece.id, piece.bytes, holders)
        self.line.stage.note(number, piece)
        self._settle(number, piece)

    def spread(
        self, numbers: list[int], task: cache_pb2.PackTask, token: str, clock: Clock, members: Sequence[Member]
    ) -> list[int]:
        """Have members pack these shards; return the numbers of those that are left to do here."""
        DistributedPack(
            task,
            token,
            clock,
            was_read=self.tally.was_read,
            made=self._made,
            refused=lambda number: self.build([number]),  # the file's fault or that node's: found out here
            gone=self.line.placer.silent,
        ).run(members, numbers, self._asked)
        self._complete([number for number in numbers if number in self.pieces])
        return [number for number in numbers if number not in self.pieces]

    def _complete(self, numbers: Sequence[int]) -> None:
        """Give shards the copies they lack, once each: a member found gone meanwhile makes others lack one."""
        is_placed = self.line.placer.is_placed
        left = {number: self.pieces[number] for number in numbers}
        while short := {number: piece for number, piece in left.items() if not is_placed(piece.id, piece.bytes)}:
            for number, piece in short.items():
                self.line.keep(number, piece)
                del left[number]

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
