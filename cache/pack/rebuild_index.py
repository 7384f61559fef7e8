"""Makes a lost index again from its shards."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deeplink.cache.catalog import PackRecord
from deeplink.cache.errors import (
    CatalogError,
    DatasetMissingError,
    IndexFormatError,
    MemberError,
    ShardCorruptError,
    SourceError,
)
from deeplink.cache.format.block import checked_shard_id
from deeplink.cache.format.index_format import IndexContent, ShardEntry, is_ascending
from deeplink.cache.source.opening import open_source
from deeplink.cache.store import described
from deeplink.cache.store.store import Store
from deeplink.cache.transfer.client import MemberClient
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from deeplink.cache.catalog import Catalog
    from deeplink.cache.store.described import ShardDescription
    from deeplink.core.clock import Clock
    from deeplink.core.types import Member, ShardId, Version


@dataclass(slots=True)
class _Place:
    """A folder with files of shards, or an agent that holds shards."""

    name: str
    ids: Collection[ShardId]
    ask: Callable[[ShardId], ShardDescription]
    problems: list[str] = field(default_factory=list)

    def describe(self, shard: ShardId) -> ShardDescription | None:
        if shard in self.ids:
            try:
                return self.ask(shard)
            except FileNotFoundError:
                pass
            except (MemberError, ShardCorruptError, OSError) as problem:
                self.problems.append(str(problem))
        return None


def _describe(store: Store, shard: ShardId) -> ShardDescription:
    return described.describe(store.path(shard), shard)


class ShardFinder:
    """Finds what shards say of themselves: in folders, then at members. Use `with`."""

    def __init__(self, folders: Sequence[Path], members: Sequence[Member] = (), token: str = "") -> None:
        self._folders, self._members, self._token = folders, members, token
        self._places: list[_Place] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for folder in self._folders:
            store = Store(folder, make=False)
            self._places.append(_Place(str(folder), store.ids(), partial(_describe, store)))
        for member in self._members:
            client = self._open.enter_context(MemberClient(member, self._token))
            try:
                self._places.append(_Place(str(member.name), client.held(), client.describe))
            except MemberError as problem:
                self._places.append(_Place(str(member.name), (), client.describe, [str(problem)]))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def every(self) -> list[ShardId]:
        """Return all shards there are, sorted by name."""
        return sorted({shard for place in self._places for shard in place.ids})

    def describe(
        self, shards: Sequence[ShardId], progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> list[ShardDescription]:
        """Return what each of `shards` says of itself, in their order."""
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
            what = f"{len(missing)} of {len(shards)} shards were not found ({listed(missing, 3)})"
            raise CatalogError(
                f"{what if shards else 'no shard was found'}; asked: {'; '.join(asked) or 'no folder, no agent'}",
                "Name more folders with --from or more agents with --members.",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReindexRequest:
    """An index that is to be made again."""

    name: str  # of the dataset
    version: Version | None  # that was lost or damaged; None where it is not known
    shards: Sequence[ShardId] = ()  # of these, in their order; none: of those it had
    every: bool = False  # of all shards that are found, in the order of their keys
    source: str = ""  # where the small files are; empty: what is on record
    home: str | None = None  # where the shards are kept besides; None: what is on record
    as_new: bool = False  # publish it as a version of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """An index that was made again: `restored` if it is, byte for byte, the one that was lost."""

    name: str
    version: Version
    restored: bool
    samples: int
    bytes: int
    shards: int


def rebuild_index(
    catalog: Catalog,
    wanted: ReindexRequest,
    finder: ShardFinder,
    clock: Clock,
    *,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    dry_run: bool = False,
) -> Rebuilt:
    """Make an index of shards, and put it back where it is the one that was lost."""
    source, home, access = _origin(catalog, wanted)
    content = joined(_described(catalog, wanted, finder, progress), source, home, access)
    lost = None if wanted.as_new else wanted.version
    if not access and (not lost or catalog.preview(wanted.name, content) != lost):
        content = replace(content, access=_access_now(source))
    if dry_run:
        found = catalog.preview(wanted.name, content)
    elif lost:
        found = catalog.restore(wanted.name, lost, content)
    else:
        found = catalog.publish(wanted.name, content, _record(content, clock))
    if lost and found != lost:
        raise CatalogError(
            f"what the shards of {wanted.name!r} make is version {found}, not {lost}",
            "--as-new publishes it as a version of its own; it may hold samples the lost one left out.",
        )
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
    raise CatalogError(
        f"of which shards version {wanted.version or '(none)'} of {wanted.name!r} was made is not on record",
        "Name them with --shard, or take all there are with --all; --source says where the files are.",
        exit_code=2,
    )


def _origin(catalog: Catalog, wanted: ReindexRequest) -> tuple[str, str, str]:
    """Return source, home and access of a version, as they were said or as they are on record."""
    source, home, access = "", "", ""
    if wanted.version:
        record = catalog.record(wanted.name, wanted.version)
        if record is not None:
            source, home, access = record.source, record.home, record.access
        else:
            with suppress(IndexFormatError, DatasetMissingError):
                index = catalog.open(wanted.name, wanted.version)
                source, home, access = index.source, index.home, index.access
    if not (wanted.source or source):
        raise SourceError("?", f"where the files of {wanted.name!r} are is not on record", "Say it with --source.")
    return wanted.source or source, home if wanted.home is None else wanted.home, access


def _access_now(source: str) -> str:
    """Return who may read a source, as a packing would record it; empty where it cannot be listed."""
    try:
        return open_source(source).listing().access
    except (DeepLinkError, OSError):
        return ""


def in_order_of_keys(descriptions: Sequence[ShardDescription]) -> list[ShardDescription]:
    """Return descriptions in the order of their first keys, which is the order they are packed in."""
    return sorted(descriptions, key=lambda one: one.keys[0].as_py().encode())


def joined(
    descriptions: Sequence[ShardDescription], source: str, home: str = "", access: str = ""
) -> IndexContent:
    """Return the content of an index of shards, numbered as they come."""
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
        access=access,
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
        first, second = (descriptions[int(shard[row])].id for row in (at, at + 1))
        raise CatalogError(
            f"{len(twice):,} keys are in two shards, such as {keys[at].as_py()!r} in {first} and {second}",
            "They are of different versions: name the shards of one version with --shard.",
        )


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
