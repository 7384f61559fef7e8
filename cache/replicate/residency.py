"""How much of a version is where, by what members have verified; noted beside its index, for the scheduler."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.membership import RendezvousOrder
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_unsynced
from deeplink.core.types import DATASET_NAME, NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.cache.membership import MemberAttributes
    from deeplink.core.types import ShardId

SUFFIX = ".held"
FORMAT = 1
OLD_S = 30 * 86_400.0
"""A store drops what was not read for `unused_days`, 30 by default: what was held before may be gone by then."""
_MOST_BYTES = 16 << 20
_DIGITS = re.compile(r"[0-9a-f]{1,128}")
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True)
class NodeResidency:
    """What one member holds of a version."""

    node: NodeName
    answered: bool
    owned: int  # shards it is to hold
    owned_verified: int
    present: int  # shards of the version it holds
    verified: int
    bytes: int  # of the shards that are present
    verified_bytes: int


@dataclass(frozen=True, slots=True)
class VersionResidency:
    """How much of a version is cached."""

    shards: int
    bytes: int
    cached_shards: int  # of which some member has a verified copy
    cached_bytes: int
    whole_shards: int  # of which `copies` members have a verified copy
    copies: int  # how many there are to be of each
    nodes: tuple[NodeResidency, ...]  # in the order of their names

    @property
    def percent(self) -> float:
        """Share of the version's bytes that is cached, in per cent; never rounded up to 100."""
        if self.cached_shards == self.shards:
            return 100.0
        return min(100.0 * self.cached_bytes / self.bytes, 99.9) if self.bytes else 0.0


def residency(
    index: Index,
    stats: Mapping[NodeName, Mapping[ShardId, bool] | None],
    *,
    replicas: int,
    known: MemberAttributes | None = None,
) -> VersionResidency:
    """Return how much of a version is where."""
    size = {entry.id: entry.bytes for entry in index.shards}
    copies = min(replicas, len(stats))
    present: dict[NodeName, set[ShardId]] = {node: size.keys() & (held or {}) for node, held in stats.items()}
    verified = {
        node: {shard for shard in shards if (stats[node] or {})[shard]} for node, shards in present.items()
    }
    owned: dict[NodeName, set[ShardId]] = {node: set() for node in stats}
    order = RendezvousOrder(stats, known)
    for shard in size:
        for node in order.owners(shard, copies):
            owned[node].add(shard)
    nodes = [
        NodeResidency(
            node=node,
            answered=stats[node] is not None,
            owned=len(owned[node]),
            owned_verified=len(owned[node] & verified[node]),
            present=len(present[node]),
            verified=len(verified[node]),
            bytes=sum(map(size.__getitem__, present[node])),
            verified_bytes=sum(map(size.__getitem__, verified[node])),
        )
        for node in sorted(stats)
    ]
    count = Counter(itertools.chain.from_iterable(verified.values()))
    return VersionResidency(
        shards=len(size),
        bytes=sum(size.values()),
        cached_shards=len(count),
        cached_bytes=sum(map(size.__getitem__, count)),
        whole_shards=sum(count[shard] >= copies for shard in size),
        copies=copies,
        nodes=tuple(nodes),
    )


class UnknownHoldingError(DeepLinkError):
    """It is not known which nodes hold a dataset."""

    def __init__(self, dataset: str, problem: str) -> None:
        super().__init__(
            f"where {dataset} lies is not known: {problem}",
            remedy=f"`deeplink warm {dataset} --dry-run` looks, and notes it.",
        )


@dataclass(frozen=True, slots=True)
class HeldSummary:
    """How much of a version each node holds."""

    bytes: Mapping[NodeName, int]  # verified; without nodes of which nothing is known
    total: int  # bytes of the version


def note(
    catalog: Path, name: str, version: str, sizes: Mapping[NodeName, int], *, total: int, unix: float
) -> None:
    """Keep beside the index what these nodes hold; of others what was noted before stays.

    Of two notes at the same time one may be lost: then a node counts as it was before.
    """
    path = catalog / name / f"{version}{SUFFIX}"
    nodes: dict[str, dict[str, float]] = {}
    with suppress(*_UNREADABLE):
        _, before = _read(path)
        nodes = {node: {"bytes": size, "unix": when} for node, (size, when) in before.items()}
    nodes |= {node: {"bytes": size, "unix": unix} for node, size in sizes.items()}
    document = {"format": FORMAT, "total": total, "nodes": nodes}
    write_unsynced(path, json.dumps(document, sort_keys=True).encode())


def held(catalog: Path, dataset: str, *, unix: float, old_s: float = OLD_S) -> HeldSummary:
    """Return what was noted of a dataset: NAME, its newest version, or NAME@VERSION by its first digits."""
    name, _, digits = dataset.removeprefix("deeplink://").partition("@")
    if not DATASET_NAME.fullmatch(name) or (digits and not _DIGITS.fullmatch(digits)):
        raise UnknownHoldingError(dataset, "it is not NAME or NAME@VERSION")
    path = _path(catalog / name, digits, dataset)
    try:
        total, nodes = _read(path)
    except FileNotFoundError:
        raise UnknownHoldingError(dataset, "no command has looked yet") from None
    except _UNREADABLE as problem:
        raise UnknownHoldingError(dataset, f"{path} cannot be read ({problem})") from problem
    newest = max((when for _, when in nodes.values()), default=0.0)
    if nodes and unix - newest > old_s:
        raise UnknownHoldingError(dataset, f"it was looked at {(unix - newest) / 86_400:.0f} days ago")
    return HeldSummary({node: size for node, (size, when) in nodes.items() if unix - when <= old_s}, total)


def _path(folder: Path, digits: str, dataset: str) -> Path:
    try:
        if not digits:
            version = (folder / "latest").read_text(encoding="ascii").strip()
            if not _DIGITS.fullmatch(version):
                raise UnknownHoldingError(dataset, f"{folder / 'latest'} names no version")
            return folder / f"{version}{SUFFIX}"
        versions = [path for path in folder.glob(f"{digits}*.arrow") if _DIGITS.fullmatch(path.stem)]
    except FileNotFoundError:
        raise UnknownHoldingError(dataset, f"there is no such dataset in {folder.parent}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UnknownHoldingError(dataset, str(problem)) from problem
    if len(versions) != 1:
        raise UnknownHoldingError(dataset, f"{len(versions)} versions begin so")
    return versions[0].with_suffix(SUFFIX)


def _read(path: Path) -> tuple[int, dict[NodeName, tuple[int, float]]]:
    """Return the bytes of the version, and for each node how many it held when."""
    with path.open("rb") as file:
        document = json.loads(file.read(_MOST_BYTES))
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}")
    total = int(document["total"])
    nodes = {
        NodeName(str(node)): (int(said["bytes"]), float(said["unix"])) for node, said in document["nodes"].items()
    }
    if total < 0 or any(size < 0 or not math.isfinite(when) for size, when in nodes.values()):
        raise ValueError("numbers that cannot be")
    return total, nodes
