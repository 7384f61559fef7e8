"""Records which nodes hold a dataset, next to its index, for the scheduler."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.cache.holding import summary
from deeplink.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deeplink.cache.holding.residency import VersionResidency
    from deeplink.cache.index import Index
    from deeplink.types import NodeName, ShardId

log = logging.getLogger(__name__)


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


def note_dropped(catalog: Path, name: str, index: Index, gone: Mapping[NodeName, set[ShardId]]) -> None:
    """Take what nodes have dropped off what was kept; nothing where nothing was."""
    try:
        before = summary.held(catalog, f"{name}@{index.version}", unix=SystemClock().unix())
    except summary.UnknownHoldingError:
        return
    size = {entry.id: entry.bytes for entry in index.shards}
    left = {
        node: max(0, before.bytes[node] - sum(size.get(shard, 0) for shard in shards))
        for node, shards in gone.items()
        if node in before.bytes
    }
    _note(catalog, name, index, left)


def _note(catalog: Path, name: str, index: Index, sizes: Mapping[NodeName, int]) -> None:
    total = sum(entry.bytes for entry in index.shards)
    try:
        summary.note(catalog, name, index.version, sizes, total=total, unix=SystemClock().unix())
    except OSError as problem:
        # Whoever may not write to the catalog may read and warm; a job's nodes are then chosen without knowing it.
        log.info("where %s lies could not be noted: %s", name, problem)
