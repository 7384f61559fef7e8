"""How much of a version each node holds, as a small JSON beside its index: for who chooses nodes for a job.

Written by whoever has just learnt it (pack, warm, verify, evict), read by `deeplink sbatch`, which must not pay
for opening an index or asking every agent. So nothing heavy is imported here.

<catalog>/<name>/<version>.held
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
class Held:
    """How much of a version each node holds.

    Attributes:
        bytes: verified, by node; nodes that did not answer are not in it.
        total: bytes of the version.
        unix: when that was so, seconds since 1970.
    """

    bytes: Mapping[NodeName, int]
    total: int
    unix: float


def note(catalog: Path, name: str, version: str, held: Held) -> None:
    """Keep a summary beside the index of its version; one that is there gives way.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    document = {"format": FORMAT, "unix": held.unix, "total": held.total, "bytes": dict(held.bytes)}
    write_unsynced(catalog / name / f"{version}{SUFFIX}", json.dumps(document, sort_keys=True).encode())


def held(catalog: Path, dataset: str, *, unix: float, old_s: float = OLD_S) -> Held:
    """Return what was noted of a dataset: NAME, its newest version, or NAME@VERSION by its first digits.

    Args:
        catalog: the folder of the indexes.
        dataset: which.
        unix: now.
        old_s: what was noted longer ago counts as unknown.

    Raises:
        UnknownHoldingError: there is no such dataset, nothing was noted, or it is damaged or too old.
    """
    name, _, digits = dataset.removeprefix("deeplink://").partition("@")
    if not _NAME.fullmatch(name) or (digits and not _DIGITS.fullmatch(digits)):
        raise UnknownHoldingError(dataset, "it is not NAME or NAME@VERSION")
    path = _path(catalog / name, digits, dataset)
    try:
        with path.open("rb") as file:
            found = _parsed(json.loads(file.read(_MOST_BYTES)))
    except FileNotFoundError:
        raise UnknownHoldingError(dataset, "nobody has looked yet") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise UnknownHoldingError(dataset, f"{path} cannot be read ({problem})") from problem
    age = unix - found.unix
    if age > old_s:
        raise UnknownHoldingError(dataset, f"it was looked at {age / 86_400:.0f} days ago")
    return found


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


def _parsed(document: Mapping[str, Any]) -> Held:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}")
    sizes = {NodeName(str(node)): int(size) for node, size in document["bytes"].items()}
    total, unix = int(document["total"]), float(document["unix"])
    if total < 0 or any(size < 0 for size in sizes.values()) or not math.isfinite(unix):
        raise ValueError("numbers that cannot be")
    return Held(sizes, total, unix)
