"""What a packing is to do: the listing, the plan, and what of it an earlier version has already."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block
from deeplink.cache.errors import AppendError, DatasetMissingError, IndexFormatError
from deeplink.cache.index import IndexContent, ShardEntry
from deeplink.cache.names import Names
from deeplink.cache.packing.appending import Packed, append
from deeplink.cache.packing.mark_file import read_marks, write_marks
from deeplink.cache.packing.plan import SHARDS_PER_MEMBER, make_plan, shard_size
from deeplink.cache.packing.staging import Piece
from deeplink.publish import published_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.cache.catalog import Catalog, PackRecord
    from deeplink.cache.index import Index
    from deeplink.cache.packing.plan import PackPlan
    from deeplink.cache.sources.origin import Listing, Source
    from deeplink.config import Config
    from deeplink.types import ShardId, Version

log = logging.getLogger(__name__)


class PackJob:
    """A packing that is planned.

    Attributes:
        source: the root of the files.
        listing: what it holds.
        plan: the shards to be.
        before: the newest version so far; None where there is none.
    """

    def __init__(self, source: str, listing: Listing, plan: PackPlan, before: Version | None) -> None:
        self.source, self.listing, self.plan, self.before = source, listing, plan, before
        self._index: Index | None = None
        self._old: Mapping[int, int] = {}
        self._marks: Path | None = None
        self._checksums = np.zeros(len(listing), np.uint64)

    def share(self, index: Index, old: Mapping[int, int]) -> None:
        """Take shard `number` from shard `old[number]` of an earlier version, for all in `old`."""
        self._index, self._old = index, old

    def put_aside(self, folder: Path) -> None:
        """Keep the change marks in a file below `folder` from here on, and no longer in `listing`.

        Raises:
            OSError: it cannot be written.
        """
        self._marks = folder / "marks"
        self.listing.marks.astype("<u8", copy=False).tofile(self._marks)
        self.listing = dataclasses.replace(self.listing, marks=np.empty(0, np.uint64))

    def first_mark(self, number: int) -> int:
        """Return the change mark of a shard's first file, after `put_aside`; 0 where not every file has one."""
        if self._marks is None or not self.listing.marked:
            return 0
        return int(np.fromfile(self._marks, "<u8", 1, offset=8 * self.plan.shards[number].start)[0])

    def keep_marks(self, index: Path) -> None:
        """Keep the change marks beside the index of the version that was made, for who appends to it.

        Without them every file counts as changed.
        """
        try:
            if self._marks is not None and self.listing.marked and len(self.listing):
                with published_file(marks_of(index), durable=False) as draft:
                    write_marks(draft, np.memmap(self._marks, "<u8", mode="r"))
        except OSError as problem:
            # Only time is lost, that of a later `--append`.
            log.warning("the change marks beside %s are not kept: %s", index, problem)

    def known(self, number: int) -> Piece | None:
        """Return the piece of a shard that an earlier version has; None where it has none."""
        if self._index is None or number not in self._old:
            return None
        old = self._old[number]
        entry, rows = self._index.shards[old], self.plan.shards[number]
        first = int(np.searchsorted(self._index.shard, old))
        checksums = np.asarray(self._index.checksums[first : first + rows.stop - rows.start])
        return Piece(entry.id, entry.bytes, np.asarray(self._index.block_offsets(old), np.uint64), checksums)

    def shared(self) -> set[ShardId]:
        """Return the shards that an earlier version has already."""
        return {self._index.shards[old].id for old in self._old.values()} if self._index is not None else set()

    def kept(self, number: int, piece: Piece) -> Piece:
        """Return the same piece with its checksums in the one column of all: they are held once."""
        column = self._checksums[self.plan.shards[number].rows]
        column[:] = piece.checksums
        return Piece(piece.id, piece.bytes, piece.block_offsets, column)

    def content(self, pieces: Mapping[int, Piece], home: str) -> IndexContent:
        """Return what the index of the new version is made of; all of `pieces` were `kept`."""
        columns = {name: np.empty(len(self.listing), np.uint32) for name in ("shard", "block", "offset")}
        for number, shard in enumerate(self.plan.shards):
            columns["shard"][shard.rows] = number
            columns["block"][shard.rows], columns["offset"][shard.rows], _ = block.arrange(
                self.listing.sizes[shard.rows]
            )
        ordered = [pieces[number] for number in range(len(self.plan.shards))]
        return IndexContent(
            source=self.source,
            home=home,
            shards=[
                ShardEntry(
                    id=piece.id, bytes=piece.bytes, samples=len(piece.checksums), blocks=len(piece.block_offsets)
                )
                for piece in ordered
            ],
            block_offsets=[piece.block_offsets for piece in ordered],
            keys=self.listing.keys.arrow,
            **columns,
            length=self.listing.sizes.view(np.uint64),
            checksum=self._checksums,
        )


def planned_job(
    origin: Source, catalog: Catalog, name: str, config: Config, *, members: int, append: bool
) -> PackJob:
    """List the source and decide what goes into which shard.

    Raises:
        SourceError, SourceFileError, BadKeyError, KeyCollisionError: the source cannot be packed.
        AppendError: there is nothing to append to, or it is of another source.
        CatalogError: the catalog cannot be read.
    """
    before = _latest(catalog, name)
    index = _readable(catalog, name, before) if before else None
    record = catalog.record(name, before) if before else None
    if append:
        _check_base(name, origin, index)
    listing = origin.listing()
    if append and index is not None:
        return _appended(origin, listing, index, config.shard_bytes)
    job = PackJob(origin.url, listing, _planned(origin.url, listing, config.shard_bytes, members, record), before)
    if index is not None and record is not None and record.plan == job.plan.digest and listing.marked:
        counts = [entry.samples for entry in index.shards]
        if counts == [shard.stop - shard.start for shard in job.plan.shards]:
            job.share(index, {number: number for number in range(len(counts))})
    return job


def _check_base(name: str, origin: Source, index: Index | None) -> None:
    if index is None:
        raise AppendError(name, "it has no version yet")
    if index.source != origin.url:
        raise AppendError(name, f"its newest version is of {index.source}, not of {origin.url}")
    if len(index.shard) > 1 and bool((index.shard[1:] < index.shard[:-1]).any()):
        raise AppendError(name, "its shards do not hold runs of the sorted keys")


def _appended(origin: Source, listing: Listing, index: Index, shard_bytes: int) -> PackJob:
    text, offsets = index.key_text(range(len(index)))
    packed = Packed(
        Names(text.data, offsets),
        np.asarray(index.lengths).astype(np.int64),
        kept_marks(index),
        [entry.samples for entry in index.shards],
    )
    base = make_plan(origin.url, listing, shard_bytes).digest
    found = append(base, listing, packed, shard_bytes)
    job = PackJob(origin.url, listing, found.plan, index.version)
    job.share(index, found.kept)
    return job


def _planned(source: str, listing: Listing, most: int, members: int, before: PackRecord | None) -> PackPlan:
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


def _latest(catalog: Catalog, name: str) -> Version | None:
    try:
        return catalog.latest(name)
    except (DatasetMissingError, IndexFormatError):
        return None


def _readable(catalog: Catalog, name: str, version: Version) -> Index | None:
    """Return the index of a version; None if it is damaged."""
    try:
        index = catalog.open(name, version)
        index.verify()
    except (IndexFormatError, DatasetMissingError) as problem:
        log.warning("the published index is not used: %s", problem)
        return None
    return index


def marks_of(index: Path) -> Path:
    """Return where the change marks of a version are kept, beside its index."""
    return index.with_suffix(".marks")


def kept_marks(index: Index, rows: np.ndarray | None = None) -> np.ndarray | None:
    """Return the change marks of a version's files, uint64 per row; None where they were not kept whole.

    Args:
        index: of the version.
        rows: int64, of which rows; None for all.
    """
    path = marks_of(index.path)
    try:
        return read_marks(path, len(index), rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        log.warning("%s is not used: %s", path, problem)
        return None
