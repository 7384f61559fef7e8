"""Removes a dataset: from the catalog first, so that no one opens it any more, then its shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.pack.parts import unmerged
from deeplink.cache.source.home import FolderHome, home_beside
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, listed
from deeplink.core.types import ShardId
from deeplink.ops.inventory import drop, note_dropped, outcome_of, shards_of, shards_to_drop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.core.types import NodeName, Version
    from deeplink.fs.library import DatasetPath
    from deeplink.ops.inventory import Dropped
    from deeplink.ops.pack_target import PackTarget


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
        done, problems = drop(shards, to.config, to.members, to.token, last_copies=True, dry_run=False)
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
    planned, problems = drop(shards, to.config, to.members, to.token, last_copies=True, dry_run=True)
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
