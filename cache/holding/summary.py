"""How much of a version each node holds, as a small JSON beside its index: for who chooses nodes for a job.

Written by whoever has just learnt it (pack, warm, verify, evict), read by `deeplink sbatch`, which must not pay
for opening an index or asking every agent. So nothing heavy is imported here.

<catalog>/<name>/<version>.held
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.publish import write_unsynced
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUFFIX = ".held"
FORMAT = 1
OLD_S = 30 * 86_400.0
"""A store drops what nobody read for `unused_days`, 30 by default: what was held before may be gone by then."""
_MOST_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGITS = re.compile(r"[0-9a-f]{1,128}")


class UnknownHoldingError(DeepLinkError):
    """Nobody can tell where a dataset lies."""

    def __init__(self, dataset: str, problem: str) -> None:
        super().__init__(
            f"where {dataset} lies is not known: {problem}",
            remedy=f"`deeplink warm {dataset} --dry-run` looks, and notes it.",
        )
        self.dataset, self.problem = dataset, problem


@dataclass(frozen=True, slots=True)
class HeldSummary:
    """How much of a version each node holds.

    Attributes:
        bytes: verified, by node; nodes of which nobody knows are not in it.
        total: bytes of the version.
    """

    bytes: Mapping[NodeName, int]
    total: int


def note(
    catalog: Path, name: str, version: str, sizes: Mapping[NodeName, int], *, total: int, unix: float
) -> None:
    """Keep beside the index what these nodes hold; of others what was noted before stays.

    Of two who note at once one may not be heard of: then a node counts as it was before.

    Args:
        catalog: the folder of the indexes.
        name: the dataset.
        version: of it.
        sizes: bytes that nodes have verified.
        total: bytes of the version.
        unix: now, seconds since 1970.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    path = catalog / name / f"{version}{SUFFIX}"
    nodes: dict[str, dict[str, float]] = {}
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        _, before = _read(path)
        nodes = {node: {"bytes": size, "unix": when} for node, (size, when) in before.items()}
    nodes |= {node: {"bytes": size, "unix": unix} for node, size in sizes.items()}
    document = {"format": FORMAT, "total": total, "nodes": nodes}
    write_unsynced(path, json.dumps(document, sort_keys=True).encode())


def held(catalog: Path, dataset: str, *, unix: float, old_s: float = OLD_S) -> HeldSummary:
    """Return what was noted of a dataset: NAME, its newest version, or NAME@VERSION by its first digits.

    Args:
        catalog: the folder of the indexes.
        dataset: which.
        unix: now.
        old_s: what was noted longer ago is not known any more.

    Raises:
        UnknownHoldingError: there is no such dataset, nothing was noted, or it is damaged or all of it too old.
    """
    name, _, digits = dataset.removeprefix("deeplink://").partition("@")
    if not _NAME.fullmatch(name) or (digits and not _DIGITS.fullmatch(digits)):
        raise UnknownHoldingError(dataset, "it is not NAME or NAME@VERSION")
    path = _path(catalog / name, digits, dataset)
    try:
        total, nodes = _read(path)
    except FileNotFoundError:
        raise UnknownHoldingError(dataset, "nobody has looked yet") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
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
