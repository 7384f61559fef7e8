"""Makes an index anew of shards alone: each says what it holds."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deeplink.cache import described
from deeplink.cache.catalog import PackRecord
from deeplink.cache.client import MemberClient
from deeplink.cache.errors import (
    DatasetMissingError,
    IndexFormatError,
    MemberError,
    ShardCorruptError,
    SourceError,
)
from deeplink.cache.index import IndexContent, ShardEntry
from deeplink.cache.indexing.index_format import is_ascending
from deeplink.cache.indexing.rebuild_errors import (
    KeyInTwoShardsError,
    RebuiltDiffersError,
    ShardsNotFoundError,
    ShardsUnknownError,
)
from deeplink.cache.layout import checked_shard_id
from deeplink.cache.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.described import ShardDescription
    from deeplink.clock import Clock
    from deeplink.types import Member, ShardId, Version


class _Place(Protocol):
    """Where shards are."""

    name: str
    problems: list[str]

    def ids(self) -> list[ShardId]: ...

    def describe(self, shard: ShardId) -> ShardDescription | None: ...


class _FolderPlace:
    """A folder with files of shards."""

    def __init__(self, root: Path) -> None:
        self.name, self._store = str(root), Store(root, make=False)
        self.problems: list[str] = []

    def ids(self) -> list[ShardId]:
        return self._store.ids()

    def describe(self, shard: ShardId) -> ShardDescription | None:
        try:
            return described.describe(self._store.path(shard), shard)
        except FileNotFoundError:
            return None
        except (ShardCorruptError, OSError) as problem:
            self.problems.append(str(problem))
            return None


class _MemberPlace:
    """An agent that holds shards."""

    def __init__(self, client: MemberClient) -> None:
        self.name, self._client = str(client.member.name), client
        self.problems: list[str] = []
        self._held: set[ShardId] = set()
        try:
            self._held = set(client.held())
        except MemberError as problem:
            self.problems.append(str(problem))

    def ids(self) -> list[ShardId]:
        return sorted(self._held)

    def describe(self, shard: ShardId) -> ShardDescription | None:
        if shard not in self._held:
            return None
        try:
            return self._client.describe(shard)
        except (MemberError, ShardCorruptError) as problem:
            self.problems.append(str(problem))
            return None


class ShardFinder:
    """Finds what shards say of themselves: in folders, then at members. Use `with`.

    Args:
        folders: with files of shards, such as a node's store.
        members: agents to ask, each once.
        token: what calls to them carry.
    """

    def __init__(self, folders: Sequence[Path], members: Sequence[Member] = (), token: str = "") -> None:
        self._folders, self._members, self._token = folders, members, token
        self._places: list[_Place] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._places = [_FolderPlace(folder) for folder in self._folders]
        for member in self._members:
            client = self._open.enter_context(MemberClient(member, self._token))
            self._places.append(_MemberPlace(client))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def every(self) -> list[ShardId]:
        """Return all shards there are, sorted by name."""
        return sorted({shard for place in self._places for shard in place.ids()})

    def describe(
        self, shards: Sequence[ShardId], progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> list[ShardDescription]:
        """Return what each of `shards` says of itself, in their order.

        Args:
            shards: which.
            progress: called after each, with how many are done and how many there are.

        Raises:
            ShardsNotFoundError: some are nowhere, or damaged wherever they are; or there are none at all.
        """
        found: list[ShardDescription] = []
        missing: list[ShardId] = []
        for done, shard in enumerate(shards, 1):
            descriptions = (place.describe(shard) for place in self._places)
            description = next((one for one in descriptions if one is not None), None)
            if description is None:
                missing.append(shard)
            else:
                found.append(description)
            progress(done, len(shards))
        if missing or not found:
            asked = [f"{place.name} ({'; '.join(place.problems[:3]) or 'not there'})" for place in self._places]
            raise ShardsNotFoundError(missing, len(shards), asked)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReindexRequest:
    """What is to be made anew.

    Attributes:
        name: the dataset.
        version: the version that was lost or damaged; None where it is not known.
        shards: of these, in their order; none: of those it had.
        every: of all shards that are found, in the order of their keys.
        source: where the small files are; what is on record when empty.
        home: where the shards are kept besides; what is on record when None.
        as_new: publish it as a version of its own.
    """

    name: str
    version: Version | None
    shards: Sequence[ShardId] = ()
    every: bool = False
    source: str = ""
    home: str | None = None
    as_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """An index that was made anew: `restored` if it is, byte for byte, the one that was lost."""

    name: str
    version: Version
    restored: bool
    samples: int
    bytes: int
    shards: int


def rebuild(
    catalog: Catalog,
    wanted: ReindexRequest,
    finder: ShardFinder,
    clock: Clock,
    *,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    dry_run: bool = False,
) -> Rebuilt:
    """Make an index of shards, and put it back where it is the one that was lost.

    Args:
        catalog: where it belongs.
        wanted: what to make.
        finder: where to look for shards; entered.
        clock: where time comes from.
        progress: called after each shard, with how many are done and how many there are.
        dry_run: change nothing.

    Raises:
        ShardsUnknownError: of which shards is not known.
        SourceError: where the small files are is not known.
        ShardsNotFoundError: a shard was not found whole.
        KeyInTwoShardsError: the shards are of several versions.
        RebuiltDiffersError: what they make is not `wanted.version`, and not to be published as new.
        CatalogError: the catalog cannot be written.
    """
    source, home = _origin(catalog, wanted)
    content = joined(_described(catalog, wanted, finder, progress), source, home)
    lost = None if wanted.as_new else wanted.version
    if dry_run:
        found = catalog.preview(wanted.name, content)
    elif lost:
        found = catalog.restore(wanted.name, lost, content)
    else:
        found = catalog.publish(wanted.name, content, _record(content, clock))
    if lost and found != lost:
        raise RebuiltDiffersError(wanted.name, lost, found)
    return Rebuilt(
        name=wanted.name,
        version=found,
        restored=found == wanted.version,
        samples=len(content.keys),
        bytes=int(content.length.sum()),
        shards=len(content.shards),
    )


def _described(
    catalog: Catalog, wanted: ReindexRequest, finder: ShardFinder, progress: Callable[[int, int], None]
) -> Sequence[ShardDescription]:
    if wanted.every:
        return in_order_of_keys(finder.describe(finder.every(), progress))
    return finder.describe(wanted.shards or _lost_shards(catalog, wanted), progress)


def _lost_shards(catalog: Catalog, wanted: ReindexRequest) -> list[ShardId]:
    """Return the shards of a version in their order: as its record says, else as its damaged index still does."""
    if wanted.version:
        record = catalog.record(wanted.name, wanted.version)
        if record is not None and record.shard_ids:
            return [checked_shard_id(shard) for shard in record.shard_ids]
        with suppress(IndexFormatError, DatasetMissingError):
            return [entry.id for entry in catalog.open(wanted.name, wanted.version).shards]
    raise ShardsUnknownError(wanted.name, wanted.version or "")


def _origin(catalog: Catalog, wanted: ReindexRequest) -> tuple[str, str]:
    """Return source and home of a version, as they were said or as they are on record."""
    source, home = "", ""
    if wanted.version:
        record = catalog.record(wanted.name, wanted.version)
        if record is not None:
            source, home = record.source, record.home
        else:
            with suppress(IndexFormatError, DatasetMissingError):
                index = catalog.open(wanted.name, wanted.version)
                source, home = index.source, index.home
    if not (wanted.source or source):
        raise SourceError("?", f"where the files of {wanted.name!r} are is not on record", "Say it with --source.")
    return wanted.source or source, home if wanted.home is None else wanted.home


def in_order_of_keys(descriptions: Sequence[ShardDescription]) -> list[ShardDescription]:
    """Return descriptions in the order of their first keys, which is the order they are packed in."""
    return sorted(descriptions, key=lambda one: one.keys[0].as_py().encode())


def joined(descriptions: Sequence[ShardDescription], source: str, home: str = "") -> IndexContent:
    """Return the content of an index of shards, numbered as they come.

    Raises:
        KeyInTwoShardsError: two of them hold a sample of one name.
    """
    counts = [len(one) for one in descriptions]
    keys = pa.concat_arrays([one.keys for one in descriptions])
    columns = {
        name: np.concatenate([one.columns[name] for one in descriptions])
        for name in ("blocks", "offsets", "lengths", "checksums")
    }
    columns["shard"] = np.repeat(np.arange(len(descriptions), dtype=np.uint32), counts)
    if not is_ascending(keys):  # shards of several packings lie across each other
        order = pc.sort_indices(keys)
        keys = keys.take(order)
        columns = {name: column[order.to_numpy()] for name, column in columns.items()}
        _refuse_twice(keys, columns["shard"], descriptions)
    entries = [
        ShardEntry(id=one.id, bytes=one.bytes, samples=len(one), blocks=len(one.block_offsets))
        for one in descriptions
    ]
    return IndexContent(
        source=source,
        home=home,
        shards=entries,
        block_offsets=[one.block_offsets for one in descriptions],
        keys=keys,
        shard=columns["shard"],
        block=columns["blocks"],
        offset=columns["offsets"],
        length=columns["lengths"],
        checksum=columns["checksums"],
    )


def _refuse_twice(keys: pa.LargeStringArray, shard: np.ndarray, descriptions: Sequence[ShardDescription]) -> None:
    twice = np.flatnonzero(pc.equal(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False))
    if len(twice):
        at = int(twice[0])
        ids = (descriptions[int(shard[at])].id, descriptions[int(shard[at + 1])].id)
        raise KeyInTwoShardsError(len(twice), keys[at].as_py(), ids)


def _record(content: IndexContent, clock: Clock) -> PackRecord:
    # Without a plan: the next packing of the source finds nothing to compare itself with, and reads all of it.
    return PackRecord(
        source=content.source,
        plan="",
        files=len(content.keys),
        bytes=int(content.length.sum()),
        shards=len(content.shards),
        packed_unix=clock.unix(),
    )
