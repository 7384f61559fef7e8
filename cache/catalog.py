"""The catalog: a folder on shared storage, in it a folder per dataset, in it an index per version and `latest`.

<catalog>/<name>/<version>.arrow    the index, never changed
<catalog>/<name>/<version>.json     the record of how it was packed
<catalog>/<name>/latest             the newest version, as text
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from deeplink.cache.errors import CatalogError, DatasetMissingError, DatasetNameError, IndexFormatError
from deeplink.cache.index import Index, IndexContent, write_index
from deeplink.cache.layout import DIGEST_DIGITS
from deeplink.publish import DRAFT_PREFIX, fsync_path, write_text
from deeplink.types import Version

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRecord:
    """How a version was packed.

    Attributes:
        source: where the small files are.
        plan: digest of what was listed there (names, sizes, change marks) and of the settings that shape shards.
        files: number of samples.
        bytes: their bytes.
        shards: number of shards.
        packed_unix: when, seconds since 1970.
        shard_bytes: most bytes of samples in a shard; 0 where that was not noted.
    """

    source: str
    plan: str
    files: int
    bytes: int
    shards: int
    packed_unix: float
    shard_bytes: int = 0


def checked_name(name: str) -> str:
    """Return `name` if a dataset can be called so.

    Raises:
        DatasetNameError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise DatasetNameError(name)
    return name


class Catalog:
    """The datasets below one folder. Readers and writers on any node may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _folder(self, name: str) -> Path:
        return self.root / checked_name(name)

    def names(self) -> list[str]:
        """Return the names of all datasets that have a version, sorted."""
        return sorted(path.parent.name for path in self.root.glob("*/latest") if _NAME.fullmatch(path.parent.name))

    def versions(self, name: str) -> list[Version]:
        """Return the versions of a dataset, the newest last; empty when there is none.

        Raises:
            DatasetNameError: no dataset can be called so.
        """
        found = [path for path in self._folder(name).glob("*.arrow") if _VERSION.fullmatch(path.stem)]
        return [
            Version(path.stem) for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.stem))
        ]

    def latest(self, name: str) -> Version:
        """Return the version a name points at.

        Raises:
            DatasetMissingError: there is no such dataset.
            DatasetNameError: no dataset can be called so.
            IndexFormatError: the pointer is damaged.
            CatalogError: it cannot be read.
        """
        pointer = self._folder(name) / "latest"
        try:
            text = pointer.read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            raise DatasetMissingError(name, "", self.root) from None
        except UnicodeDecodeError as problem:
            raise IndexFormatError(pointer, str(problem)) from problem
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem
        if not _VERSION.fullmatch(text):
            raise IndexFormatError(pointer, "it holds no version")
        return Version(text)

    def open(self, name: str, version: Version | None = None) -> Index:
        """Return the index of a version, the newest when none is named.

        Raises:
            DatasetMissingError: there is no such dataset or version.
            DatasetNameError: no dataset can be called so.
            IndexFormatError: the index is damaged or of another format.
        """
        chosen = version or self.latest(name)
        path = self._folder(name) / f"{chosen}.arrow"
        if not _VERSION.fullmatch(chosen) or not path.is_file():
            raise DatasetMissingError(name, chosen, self.root)
        try:
            return Index(path, chosen)
        except OSError as problem:
            raise CatalogError(self.root, f"{path}: {problem.strerror or problem}") from problem

    def record(self, name: str, version: Version) -> PackRecord | None:
        """Return how a version was packed; None where that is not known."""
        try:
            text = (self._folder(name) / f"{version}.json").read_text(encoding="utf-8")
            return PackRecord(**json.loads(text))
        except (OSError, ValueError, TypeError):
            return None

    def check_writable(self, name: str) -> None:
        """Try whether a version could be published, so that who cannot learns it before the work; leaves nothing.

        Raises:
            DatasetNameError: no dataset can be called so.
            CatalogError: it cannot be written.
        """
        folder = self._folder(name)
        there = next(path for path in (folder, *folder.parents) if path.exists())
        draft = there / f"{DRAFT_PREFIX}{uuid.uuid4().hex}"
        try:
            draft.touch()  # not access(2): root squashing, quotas and read-only mounts are beyond it
            draft.unlink()
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem

    def publish(self, name: str, content: IndexContent, record: PackRecord) -> Version:
        """Make a version and let the name point at it; readers see all of it or nothing.

        Raises:
            DatasetNameError: no dataset can be called so.
            CatalogError: it cannot be written; the name points where it did.
        """
        folder = self._folder(name)
        try:
            return self._publish(folder, content, record)
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem

    def _publish(self, folder: Path, content: IndexContent, record: PackRecord) -> Version:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{DRAFT_PREFIX}{uuid.uuid4().hex}"
        try:
            # Not `published_file`: the name is known once the file is written.
            version = write_index(draft, content)
            fsync_path(draft)
            draft.replace(folder / f"{version}.arrow")
            fsync_path(folder)
        finally:
            draft.unlink(missing_ok=True)
        write_text(folder / f"{version}.json", json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")
        write_text(folder / "latest", f"{version}\n")
        return version
