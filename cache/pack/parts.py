"""A version packed in parts: each packer makes a run of its shards, and a merge joins what they made of the index.

Every part plans the whole version; they fit together where those plans are the same. The tasks of an array of jobs
list the source once (`shared_listing`).
A part's index lies in the catalog, in the dataset's folder `.parts`, until it is merged:
`<plan>-<part>-of-<parts>.arrow`. What a merge makes is, byte for byte, what one packer would have made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from typing_extensions import override

from deeplink.cache.catalog import PARTS, PackRecord
from deeplink.cache.errors import CatalogError, HomeError, IndexFormatError, SourceError
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import IndexContent, write_index
from deeplink.cache.format.names import Names
from deeplink.cache.pack.plan import kept_marks, marks_of, write_marks
from deeplink.cache.source.home import open_home, readmit
from deeplink.cache.source.source import Listing
from deeplink.core.codec import from_row
from deeplink.core.descriptors import opened, try_lock
from deeplink.core.publish import DRAFT_PREFIX, published_file, write_text
from deeplink.core.text import listed
from deeplink.core.types import NodeName, ShardId, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.pack.building import Piece
    from deeplink.cache.pack.plan import PackJob
    from deeplink.cache.source.selection import Selection
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 20
"""Rows that are copied at once."""
_COLUMNS = {"shard": "u4", "block": "u4", "offset": "u4", "length": "u8", "checksum": "u8"}


@dataclass(frozen=True, slots=True)
class Part:
    """One of `parts` equal runs of a version's shards; `number` counts from 1.

    Parts of one `array` of jobs list the source once; each other part lists it itself.
    """

    number: int
    parts: int
    array: str = ""

    @override
    def __str__(self) -> str:
        return f"-{self.number}-of-{self.parts}"

    def shards(self, count: int) -> range:
        """Return which of a version's `count` shards are this part's; none where there are more parts.

        >>> [list(Part(number, 3).shards(5)) for number in (1, 2, 3)]
        [[0], [1, 2], [3, 4]]
        """
        return range(count * (self.number - 1) // self.parts, count * self.number // self.parts)

    def listing_key(self, source: str, wanted: Selection) -> str:
        """Return what the parts of an array have their listing of a source under; empty outside of an array."""
        said = f"{self.array}\n{source}\n{wanted!r}".encode()
        return hashlib.sha256(said).hexdigest()[:40] if self.array else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What is known of a part besides its index."""

    number: int
    parts: int
    version: str  # digest of its index
    placed: dict[str, tuple[str, ...]]  # per shard the nodes that hold a copy
    listing: str = ""  # key of the listing that it was made from; empty: its own


@contextmanager
def removed_if_outdated(catalog: Catalog, name: str, key: str) -> Iterator[None]:
    """Remove the listing of this key where a source is not as it says: a task that is requeued lists again."""
    try:
        yield
    except SourceError as problem:
        if not problem.may_pass:
            _remove_listings(catalog.root / name / PARTS, {key}, "npz")
        raise


def _remove_listings(folder: Path, keys: Collection[str], kind: str) -> None:
    for path in folder.glob(f"{LISTING}*.{kind}"):
        if path.stem.removeprefix(LISTING) in keys:
            path.unlink(missing_ok=True)


def publish_part(
    catalog: Catalog,
    name: str,
    part: Part,
    job: PackJob,
    pieces: Mapping[int, Piece],
    *,
    record: PackRecord,
    placed: Mapping[ShardId, Sequence[NodeName]],
    listing: str = "",
) -> None:
    """Keep a part's index, marks and records in the catalog. The record comes last: with it the part is there."""
    folder = catalog.root / name / PARTS
    stem = folder / f"{job.plan.digest}{part}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shards = part.shards(len(job.plan.shards))
        if shards:
            path = stem.with_suffix(".arrow")
            with published_file(path, mode=0o644) as draft:
                version = write_index(draft, job.content(pieces, record.home, shards))
            job.keep_marks(path, shards)
        else:
            version = Version("")
        noted = PartRecord(
            number=part.number,
            parts=part.parts,
            version=version,
            placed={shard: tuple(nodes) for shard, nodes in placed.items()},
            listing=listing,
        )
        facts = {"part": dataclasses.asdict(noted), "pack": dataclasses.asdict(record)}
        write_text(stem.with_suffix(".json"), f"{json.dumps(facts, sort_keys=True)}\n")
    except OSError as problem:
        raise CatalogError(f"catalog {catalog.root}: {problem.strerror or problem}") from problem


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge made."""

    version: Version
    record: PackRecord
    placed: Mapping[ShardId, tuple[NodeName, ...]]  # as the parts placed them
    parts: int


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path  # its record
    part: PartRecord
    pack: PackRecord


def merge_parts(catalog: Catalog, name: str) -> Merged:
    """Publish the version whose parts lie in the catalog, and remove them.

    Columns are joined in files beside the parts, which are mapped: memory besides those takes 16 bytes a sample.

    Raises:
        CatalogError: parts are missing, of different listings, or of different settings.
        IndexFormatError: a part's index is damaged.
    """
    folder = catalog.root / name / PARTS
    found = _complete(folder, name)
    record = dataclasses.replace(found[0].pack, home=next((one.pack.home for one in found if one.pack.home), ""))
    indexes = [
        Index(one.path.with_suffix(".arrow"), Version(one.part.version)) for one in found if one.part.version
    ]
    for index in indexes:
        index.verify()
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=DRAFT_PREFIX) as work:
            version = catalog.publish(name, _joined(indexes, record, Path(work)), record)
            _join_marks(indexes, catalog.path(name, version), Path(work))
        if record.home:
            shards = [entry.id for index in indexes for entry in index.shards]
            _put_at_home(record, catalog, name, version, shards)
        placed = {
            ShardId(shard): tuple(map(NodeName, nodes))
            for one in found
            for shard, nodes in one.part.placed.items()
        }
        for path in folder.glob(f"{record.plan}-*"):
            path.unlink(missing_ok=True)
        _remove_listings(folder, {one.part.listing for one in found}, "*")  # not those of arrays that run now
    except OSError as problem:
        raise CatalogError(f"catalog {catalog.root}: {problem.strerror or problem}") from problem
    return Merged(version, record, placed, len(found))


def unmerged(catalog: Catalog) -> dict[str, set[ShardId]]:
    """Return, by dataset, the shards of parts that wait to be merged: no version has them yet.

    To be asked before versions are looked at, so that a merge meanwhile hides none. Raises IndexFormatError.
    """
    found: dict[str, set[ShardId]] = {}
    for path in catalog.unmerged():
        try:
            index = Index(path, Version(""))
        except FileNotFoundError:  # merged since
            continue
        except IndexFormatError as problem:
            remedy = "Remove it and its record beside it, and pack that part again."
            raise IndexFormatError(path, f"a part that cannot be read: {problem}", remedy) from problem
        found.setdefault(path.parents[1].name, set()).update(entry.id for entry in index.shards)
    return found


def _put_at_home(
    record: PackRecord, catalog: Catalog, name: str, version: Version, shards: Sequence[ShardId]
) -> None:
    """Keep the index in the packed home, and let its shards be read as the source is; no failure ends a merge."""
    home = open_home(record.home, record.access)
    try:
        home.put_index(name, version, catalog.path(name, version))
        readmit(home, catalog, name, shards)
    except HomeError as problem:
        log.warning("the packed home lacks the index of %s: %s", name, problem)


def _complete(folder: Path, name: str) -> list[_Found]:
    """Return all parts of one packing in their order: of the one packing that all parts there are of."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            found.append(_Found(path, from_row(PartRecord, facts["part"]), from_row(PackRecord, facts["pack"])))
        except (OSError, ValueError, TypeError, KeyError) as problem:
            remedy = "Remove it, and pack that part again."
            raise CatalogError(f"{path} is no record of a part: {problem}", remedy) from problem
    if not found:
        remedy = f"`deeplink pack SOURCE {name} --part I/N` makes one."
        raise CatalogError(f"no part of {name!r} is in {folder}", remedy, exit_code=2)
    kinds = {(one.pack.plan, one.part.parts) for one in found}
    if len(kinds) > 1:
        each = sorted(f"{one.part.number}/{one.part.parts} of plan {one.pack.plan[:8]}" for one in found)
        said = listed(each, 8)
        raise CatalogError(
            f"the parts of {name!r} are of {len(kinds)} packings: {said}",
            f"SOURCE, or a setting, changed between them: remove the older from {folder}, then pack the rest.",
        )
    there = {one.part.number: one for one in found}
    missing = [str(number) for number in range(1, found[0].part.parts + 1) if number not in there]
    if missing:
        raise CatalogError(
            f"parts {listed(missing, 8)} of {found[0].part.parts} of {name!r} are missing",
            f"`deeplink pack SOURCE {name} --part {missing[0]}/{found[0].part.parts}` makes one.",
        )
    return [there[number] for number in sorted(there)]


def _joined(indexes: Sequence[Index], record: PackRecord, work: Path) -> IndexContent:
    """Return the content of all parts; its columns are mapped files in `work`."""
    total = sum(map(len, indexes))
    columns = {name: np.memmap(work / name, kind, "w+", shape=total) for name, kind in _COLUMNS.items()}
    ends = np.memmap(work / "ends", "i8", "w+", shape=total + 1)
    row = shards = size = 0
    with (work / "text").open("wb") as text:
        for index in indexes:
            for rows in _runs_of(len(index)):
                into = slice(row, row + len(rows))
                columns["shard"][into] = index.column("shard", rows) + np.uint32(shards)
                columns["block"][into] = index.column("block", rows)
                columns["offset"][into] = index.offset[rows.start : rows.stop]
                columns["length"][into] = index.column("lengths", rows)
                columns["checksum"][into] = index.column("checksums", rows)
                data, bounds = index.key_text(rows)
                text.write(data[bounds[0] : bounds[-1]].data)
                ends[row + 1 : row + len(rows) + 1] = bounds[1:] - bounds[0] + size
                size += int(bounds[-1] - bounds[0])
                row += len(rows)
            shards += len(index.shards)
    names = np.memmap(work / "text", "u1", "r", shape=size)
    keys = pa.LargeStringArray.from_buffers(total, pa.py_buffer(ends), pa.py_buffer(names))
    return IndexContent(
        source=record.source,
        home=record.home,
        access=record.access,
        shards=[entry for index in indexes for entry in index.shards],
        block_offsets=[
            np.asarray(index.block_offsets(shard), np.uint64)
            for index in indexes
            for shard in range(len(index.shards))
        ],
        keys=keys,
        **columns,
    )


def _runs_of(rows: int) -> Iterator[range]:
    for start in range(0, rows, _AT_ONCE):
        yield range(start, min(start + _AT_ONCE, rows))


def _join_marks(indexes: Sequence[Index], path: Path, work: Path) -> None:
    """Keep the parts' change marks beside the merged index, where every part has them."""
    marks = np.memmap(work / "marks", "u8", "w+", shape=sum(map(len, indexes)))
    row = 0
    for index in indexes:
        some = kept_marks(index)
        if some is None:
            return
        marks[row : row + len(index)] = some
        row += len(index)
    with published_file(marks_of(path), durable=False) as draft:
        write_marks(draft, marks)


LISTING = "listing-"
_LOOK_S = 1.0
_WAIT_S = 3600.0
"""Whoever waited so long for another task's listing lists the source itself."""
_OTHERS = 0o022
_LISTED = {"keys", "sizes", "marks"}


def shared_listing(
    catalog: Catalog, name: str, key: str, list_source: Callable[[], Listing], clock: Clock
) -> Listing:
    """Return the listing that the parts of an array share, made by `list_source` unless another has made it.

    While another one makes it, this one waits. Where that ends without one, and where the storage has no locks,
    each lists for itself.
    """
    folder = catalog.root / name / PARTS
    path = folder / f"{LISTING}{key}.npz"
    with ExitStack() as held:
        is_first = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(opened(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            is_first = try_lock(lock)
            if not is_first:
                _wait(lock, path, clock)
                held.close()
        except OSError as problem:
            log.info("the listing is not shared with other parts: %s", problem)
        if (found := _read(path)) is not None:
            return found
        began = clock.unix()
        listing = dataclasses.replace(list_source(), listed_unix=began)
        if is_first:
            _publish(path, listing)
        return listing


def _wait(lock: int, path: Path, clock: Clock) -> None:
    """Return once the listing is there, or nobody makes it, or too long has passed."""
    until = clock.monotonic() + _WAIT_S
    while not path.exists() and clock.monotonic() < until and not try_lock(lock):
        clock.sleep(_LOOK_S)


def _publish(path: Path, listing: Listing) -> None:
    facts = {name.name: getattr(listing, name.name) for name in dataclasses.fields(Listing)}
    columns = {name: facts.pop(name) for name in _LISTED}
    keys: Names = columns.pop("keys")
    columns |= {
        "text": np.frombuffer(keys.joined(), np.uint8),
        "offsets": keys.offsets - keys.offsets[0],
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }
    try:
        with published_file(path, mode=0o600, durable=False) as draft, draft.open("wb") as file:
            np.savez(file, **columns)
    except OSError as problem:
        log.info("the listing is not shared with other parts: %s", problem)


def _read(path: Path) -> Listing | None:
    """Return the listing that a process of this user left; None where there is none, or not a whole one."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            facts = os.fstat(descriptor)
            if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS:
                log.info("%s is another user's and not used", path)
                return None
            with os.fdopen(os.dup(descriptor), "rb") as file, np.load(file, allow_pickle=False) as found:
                keys = Names(memoryview(found["text"].data), found["offsets"])
                said = json.loads(found["facts"].tobytes())
                return Listing(keys=keys, sizes=found["sizes"], marks=found["marks"], **said)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        log.warning("%s is not used: %s", path, problem)
        return None
