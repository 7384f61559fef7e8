"""Plans a packing: which sample goes into which shard, and what an earlier version has already.

Beside an index lies a packed file with the change marks of its files (docs/format.md), which appending reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import struct
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from deeplink.cache.errors import CatalogError, DatasetMissingError, IndexFormatError
from deeplink.cache.format import block
from deeplink.cache.format.names import Names
from deeplink.cache.pack.building import Piece
from deeplink.core.publish import published_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.cache.catalog import Catalog, PackRecord
    from deeplink.cache.format.index import Index
    from deeplink.cache.format.index_format import IndexContent
    from deeplink.cache.source.source import Listing, Source
    from deeplink.core.config import Config
    from deeplink.core.types import ShardId, Version

log = logging.getLogger(__name__)

SHARDS_PER_MEMBER = 4
"""Shards wanted per member, at least: fewer would leave some members without, since a hash deals them out."""
MOST_SAMPLES = 1 << 20
_LEAST_BYTES = 64 << 10
"""Shards are not made smaller than this for the sake of their number: each is a file and a call."""
RUN = 1 << 16
_MAGIC = b"DLMARKS1"
_HEAD = struct.Struct("<8sQ")
_RUN_HEAD = struct.Struct("<IIQ")
_PLACE = struct.Struct("<QQII")
_PLAIN = 0
_UNITS = (1_000_000_000, 1_000_000, 1_000, 1)
_LEVEL = 6
_SIZE = 8


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to be: rows `start` to `stop` of the sorted listing, and their bytes."""

    start: int
    stop: int
    payload: int

    @property
    def rows(self) -> slice:
        """The rows as a slice of the listing's columns."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """All shards to be, the most bytes of samples in one, and the digest of everything they follow from."""

    shards: tuple[ShardPlan, ...]
    shard_bytes: int
    digest: str


def shard_size(total: int, most: int, members: int) -> int:
    """Return how many bytes of samples go into a shard, so that `members` get about four to eight each.

    A power of two below `most`, so that a dataset that grows a little, or goes to a few members more, keeps it.

    >>> shard_size(100 << 20, 256 << 20, 4) == 4 << 20
    True
    """
    if members <= 1:
        return most
    wanted = max(total // (members * SHARDS_PER_MEMBER), _LEAST_BYTES)
    return min(most, 1 << (wanted.bit_length() - 1))


def make_plan(source: str, listing: Listing, shard_bytes: int) -> PackPlan:
    """Return the shards for a listing, each at most `shard_bytes` of samples unless one sample alone is more.

    Packing a plan of the same digest gives the same shards, as long as the files are what they were.
    """
    ends = np.cumsum(listing.sizes, dtype=np.int64)
    shards = tuple(cut(ends, 0, len(listing), shard_bytes))
    return PackPlan(shards, shard_bytes, _digest(source, listing, shard_bytes))


def cut(ends: np.ndarray, start: int, stop: int, shard_bytes: int) -> Iterator[ShardPlan]:
    """Yield the shards for rows `start` to `stop`, each as full as may be."""
    while start < stop:
        before = int(ends[start - 1]) if start else 0
        # Empty files take no bytes: their number is bounded too, since a shard is made as a whole.
        most = min(int(np.searchsorted(ends, before + shard_bytes, side="right")), start + MOST_SAMPLES, stop)
        end = max(most, start + 1)
        yield ShardPlan(start, end, int(ends[end - 1]) - before)
        start = end


def _digest(source: str, listing: Listing, shard_bytes: int) -> str:
    whole = hashlib.sha256(f"deeplink plan {block.FORMAT} {shard_bytes}\n{source}\n".encode())
    for run in listing.keys.terminated():
        whole.update(run)
    whole.update(np.ascontiguousarray(listing.sizes, "<i8").data)
    whole.update(np.ascontiguousarray(listing.marks, "<u8").data)
    return whole.hexdigest()[:40]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The files of the version before, as they were when they were packed."""

    keys: Names  # sorted
    sizes: np.ndarray  # int64, bytes
    marks: np.ndarray | None  # uint64; None where they were not kept, so that every file counts as changed
    counts: Sequence[int]  # how many of them each shard holds, one after another


@dataclass(frozen=True, slots=True)
class Appended:
    """The plan of the new version, and which shard of the old one each shard that stays is."""

    plan: PackPlan
    kept: dict[int, int]


def append(base: str, listing: Listing, packed: Packed, shard_bytes: int) -> Appended:
    """Return the plan of a version that shares with the one before it what did not change."""
    ends = np.cumsum(listing.sizes, dtype=np.int64)
    bounds = np.cumsum([0, *packed.counts]).tolist()
    shards: list[ShardPlan] = []
    kept: dict[int, int] = {}
    row = 0
    for old, (start, stop) in enumerate(itertools.pairwise(bounds)):
        first = bisect_left(listing.keys, packed.keys[start].encode(), key=str.encode)
        behind = bisect_left(listing.keys, packed.keys[stop - 1].encode() + b"\0", key=str.encode)
        if _is_same(listing, slice(first, behind), packed, slice(start, stop)):
            # All between two shards that stay is packed again as one run.
            shards += cut(ends, row, first, shard_bytes)
            kept[len(shards)] = old
            shards.append(ShardPlan(first, behind, int(listing.sizes[first:behind].sum())))
            row = behind
    shards += cut(ends, row, len(listing), shard_bytes)
    starts = np.array([shard.start for shard in shards], "<i8").tobytes()
    digest = hashlib.sha256(f"deeplink append {base}\n".encode() + starts).hexdigest()[:40]
    return Appended(PackPlan(tuple(shards), shard_bytes, digest), kept)


def _is_same(listing: Listing, now: slice, packed: Packed, before: slice) -> bool:
    if packed.marks is None or not listing.marked or now.stop - now.start != before.stop - before.start:
        return False
    names, were = listing.keys[now], packed.keys[before]
    return (
        bool((listing.sizes[now] == packed.sizes[before]).all())
        and bool((listing.marks[now] == packed.marks[before]).all())
        and bool((names.lengths == were.lengths).all())
        and names.joined() == were.joined()
    )


class PackJob:
    """A planned packing. `before` is the newest version so far, None where there is none.

    Shard `number` is shard `old[number]` of an earlier version, `index`, for all in `old`.
    """

    def __init__(
        self,
        source: str,
        listing: Listing,
        plan: PackPlan,
        before: Version | None,
        *,
        index: Index | None = None,
        old: Mapping[int, int] | None = None,
    ) -> None:
        self.source, self.listing, self.plan, self.before = source, listing, plan, before
        self._index, self._old = index, old or {}
        self._marks: Path | None = None
        self._checksums = np.zeros(len(listing), np.uint64)

    def put_aside(self, folder: Path) -> None:
        """Keep the change marks in a file below `folder` from here on, and no longer in `listing`."""
        self._marks = folder / "marks"
        self.listing.marks.astype("<u8", copy=False).tofile(self._marks)
        self.listing = dataclasses.replace(self.listing, marks=np.empty(0, np.uint64))

    def first_mark(self, number: int) -> int:
        """Return the change mark of a shard's first file, after `put_aside`; 0 where not every file has one."""
        if self._marks is None or not self.listing.marked:
            return 0
        return int(np.fromfile(self._marks, "<u8", 1, offset=8 * self.plan.shards[number].start)[0])

    def _rows(self, shards: range | None) -> slice:
        """Return the rows of a run of shards; None for all."""
        chosen = self.plan.shards if shards is None else self.plan.shards[shards.start : shards.stop]
        return slice(chosen[0].start, chosen[-1].stop)

    def keep_marks(self, index: Path, shards: range | None = None) -> None:
        """Keep the change marks beside the index that was made, of all shards or of a run of them.

        Without them every file counts as changed.
        """
        try:
            if self._marks is not None and self.listing.marked and len(self.listing):
                with published_file(marks_of(index), durable=False) as draft:
                    write_marks(draft, np.memmap(self._marks, "<u8", mode="r")[self._rows(shards)])
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
        return dataclasses.replace(piece, checksums=column)

    def content(self, pieces: Mapping[int, Piece], home: str, shards: range | None = None) -> IndexContent:
        """Return what the index of the new version, or of a run of its shards, is made of.

        All of `pieces` were `kept`.
        """
        from deeplink.cache.format.index_format import IndexContent, ShardEntry  # noqa: PLC0415 - pyarrow: no agent needs it to start

        numbers, rows = shards or range(len(self.plan.shards)), self._rows(shards)
        sizes = self.listing.sizes[rows]
        columns = {name: np.empty(len(sizes), np.uint32) for name in ("shard", "block", "offset")}
        for number in numbers:
            shard = self.plan.shards[number]
            mine = slice(shard.start - rows.start, shard.stop - rows.start)
            columns["shard"][mine] = number - numbers.start
            columns["block"][mine], columns["offset"][mine], _ = block.arrange(sizes[mine])
        ordered = [pieces[number] for number in numbers]
        return IndexContent(
            source=self.source,
            home=home,
            access=self.listing.access,
            shards=[
                ShardEntry(
                    id=piece.id, bytes=piece.bytes, samples=len(piece.checksums), blocks=len(piece.block_offsets)
                )
                for piece in ordered
            ],
            block_offsets=[piece.block_offsets for piece in ordered],
            keys=self.listing.keys[rows].arrow,
            **columns,
            length=sizes.view(np.uint64),
            checksum=self._checksums[rows],
        )


def planned_job(
    origin: Source,
    catalog: Catalog,
    name: str,
    config: Config,
    *,
    list_source: Callable[[], Listing],
    members: int,
    append: bool,
) -> PackJob:
    """List the source and decide what goes into which shard."""
    before = catalog.newest(name) if catalog.recorded(name) else None
    index = _readable(catalog, name, before) if before else None
    record = catalog.record(name, before) if before else None
    if append:
        _check_base(name, origin, index)
    listing = list_source()
    if append and index is not None:
        return _appended(origin, listing, index, config.shard_bytes)
    plan = _planned(origin.url, listing, config.shard_bytes, members, record)
    old: dict[int, int] = {}
    if index is not None and record is not None and record.plan == plan.digest and listing.marked:
        counts = [entry.samples for entry in index.shards]
        if counts == [shard.stop - shard.start for shard in plan.shards]:
            old = {number: number for number in range(len(counts))}
    return PackJob(origin.url, listing, plan, before, index=index, old=old)


def cannot_append(name: str, problem: str) -> CatalogError:
    """Return why a version cannot be made from the one before it."""
    message = f"dataset {name!r} cannot be appended to: {problem}"
    return CatalogError(message, "Pack it without --append.", exit_code=2)


def _check_base(name: str, origin: Source, index: Index | None) -> None:
    if index is None:
        raise cannot_append(name, "it has no version yet")
    if index.source != origin.url:
        raise cannot_append(name, f"its newest version is of {index.source}, not of {origin.url}")
    if len(index.shard) > 1 and bool((index.shard[1:] < index.shard[:-1]).any()):
        raise cannot_append(name, "its shards do not hold runs of the sorted keys")


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
    return PackJob(origin.url, listing, found.plan, index.version, index=index, old=found.kept)


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
    """Return the change marks of a version's files, uint64 per row; None where they were not kept whole."""
    path = marks_of(index.path)
    try:
        return read_marks(path, len(index), rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        log.warning("%s is not used: %s", path, problem)
        return None


def write_marks(path: Path, marks: np.ndarray) -> None:
    """Write a file of marks, uint64; takes a few MiB of memory besides them."""
    count = len(marks)
    with path.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, count))
        for number, start in enumerate(range(0, count, RUN)):
            unit, content = _packed(np.asarray(marks[start : start + RUN], np.uint64))
            place = _PLACE.pack(count, number, len(content), unit)
            file.write(_RUN_HEAD.pack(len(content), unit, block.checksum(place + content)) + content)


def read_marks(path: Path, count: int, rows: np.ndarray | None = None) -> np.ndarray:
    """Return marks, uint64, from a file of `count`."""
    with path.open("rb") as file:
        if file.read(_HEAD.size) != _HEAD.pack(_MAGIC, count):
            raise ValueError(f"it does not begin as a file of {count:,} change marks")
        if rows is None:
            found = np.empty(count, np.uint64)
            for number, marks in _runs(file, count, range(-(-count // RUN))):
                found[number * RUN : number * RUN + len(marks)] = marks
            if file.read(1):
                raise ValueError("it goes on behind the last change mark")
            return found
        found, run = np.empty(len(rows), np.uint64), rows // RUN
        for number, marks in _runs(file, count, np.unique(run).tolist()):
            mine = run == number
            found[mine] = marks[rows[mine] % RUN]
        return found


def _runs(file: BinaryIO, count: int, wanted: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the numbers of some runs, which ascend, and their marks; the file stands behind its head."""
    at = 0
    for number in wanted:
        for _ in range(at, number):
            file.seek(_run_head(file, RUN)[0], 1)
        at = number + 1
        many = min(RUN, count - number * RUN)
        length, unit, checksum = _run_head(file, many)
        content = file.read(length)
        if block.checksum(_PLACE.pack(count, number, length, unit) + content) != checksum:
            raise ValueError(f"the change marks from {number * RUN:,} on are damaged")
        yield number, _unpacked(content, unit, many)


def _run_head(file: BinaryIO, many: int) -> tuple[int, int, int]:
    head = file.read(_RUN_HEAD.size)
    if len(head) < _RUN_HEAD.size:
        raise ValueError("it ends before its last change mark")
    length, unit, checksum = _RUN_HEAD.unpack(head)
    if length > many * _SIZE:
        raise ValueError(f"{length:,} bytes where {many:,} change marks should be")
    return length, unit, checksum


def _packed(marks: np.ndarray) -> tuple[int, bytes]:
    """Return the unit of a run of marks, and its content."""
    unit = next(unit for unit in _UNITS if not (marks % np.uint64(unit)).any())
    steps = np.diff(marks // np.uint64(unit), prepend=np.uint64(0)).view(np.int64)
    folded = ((steps << 1) ^ (steps >> 63)).astype("<i8", copy=False)
    content = zlib.compress(folded.view(np.uint8).reshape(-1, _SIZE).T.tobytes(), _LEVEL)
    if len(content) < len(marks) * _SIZE:
        return unit, content
    return _PLAIN, marks.astype("<u8", copy=False).tobytes()


def _unpacked(content: bytes, unit: int, many: int) -> np.ndarray:
    """Return so many marks; trusts nothing, for a checksum is no proof against an attacker."""
    size = many * _SIZE
    if unit != _PLAIN:
        try:
            content = zlib.decompressobj().decompress(content, size)
        except zlib.error as problem:
            raise ValueError(f"its change marks cannot be unpacked: {problem}") from None
    if len(content) != size:
        raise ValueError(f"{len(content):,} bytes of change marks where {size:,} were expected")
    if unit == _PLAIN:
        return np.frombuffer(content, "<u8")
    planes = np.frombuffer(content, np.uint8).reshape(_SIZE, many)
    folded = np.ascontiguousarray(planes.T).view("<u8").ravel().astype(np.uint64, copy=False)
    steps = (folded >> np.uint64(1)) ^ (np.uint64(0) - (folded & np.uint64(1)))
    marks: np.ndarray = np.cumsum(steps, dtype=np.uint64) * np.uint64(unit)
    return marks
