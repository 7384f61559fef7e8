"""The catalog: a folder on shared storage, in it a folder per dataset, in it an index per version and `latest`.

<catalog>/<name>/<version>.arrow    the index, never changed
<catalog>/<name>/<version>.json     the record of how it was packed
<catalog>/<name>/latest             the newest version, as text
<catalog>/<name>/.removed-*         indexes taken out, kept for a week: on network file systems who still reads one
                                    on another node would be killed if it were gone
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from deeplink.cache.errors import (
    CatalogError,
    DatasetMissingError,
    DatasetNameError,
    IndexFormatError,
    NewestUnknownError,
    NewestVersionError,
)
from deeplink.cache.index import Index, IndexContent, write_index
from deeplink.cache.layout import DIGEST_DIGITS
from deeplink.publish import DRAFT_PREFIX, fsync_path, write_text
from deeplink.types import Version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")
_REMOVED = ".removed-"
_DRAFT_KEPT_S = 86_400.0
_REMOVED_KEPT_S = 7 * 86_400.0


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
        shard_ids: names of its shards, in the order of its index, which can be made anew of them.
        home: where the shards are kept besides; empty for nowhere.
    """

    source: str
    plan: str
    files: int
    bytes: int
    shards: int
    packed_unix: float
    shard_bytes: int = 0
    shard_ids: tuple[str, ...] = ()
    home: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what was written by this or any other release: keys unknown here are left out.

        Raises:
            ValueError, TypeError: it is no record.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        said = {key: value for key, value in dict(json.loads(text)).items() if key in known}
        said["shard_ids"] = tuple(map(str, said.get("shard_ids", ())))
        return cls(**said)

    def text(self) -> str:
        """Return what `parse` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


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

    def names(self, *, lost: bool = False) -> list[str]:
        """Return the names of all datasets that have a newest version, sorted; `lost`: also where that is lost."""
        found = {path.parent.name for path in self.root.glob("*/latest")}
        if lost:
            kept = (path for path in self.root.glob("*/*") if path.suffix in {".arrow", ".json"})
            found.update(path.parent.name for path in kept if _VERSION.fullmatch(path.stem))
        return sorted(filter(_NAME.fullmatch, found))

    def versions(self, name: str) -> list[Version]:
        """Return the versions of a dataset, the newest last; empty when there is none.

        Raises:
            DatasetNameError: no dataset can be called so.
        """
        found: list[tuple[int, str]] = []
        for path in self._folder(name).glob("*.arrow"):
            if _VERSION.fullmatch(path.stem):
                with suppress(FileNotFoundError):  # removed since
                    found.append((path.stat().st_mtime_ns, path.stem))
        return [Version(stem) for _, stem in sorted(found)]

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
            raise DatasetMissingError(name, "", self.root, self.versions(name) or self.recorded(name)) from None
        except UnicodeDecodeError:
            text = ""
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem
        if not _VERSION.fullmatch(text):
            raise NewestUnknownError(name, pointer, self.versions(name))
        return Version(text)

    def open(self, name: str, version: Version | None = None) -> Index:
        """Return the index of a version, the newest when none is named.

        Raises:
            DatasetMissingError: there is no such dataset or version.
            DatasetNameError: no dataset can be called so.
            IndexFormatError: the index is damaged or of another format.
        """
        chosen = version or self.latest(name)
        path = self.path(name, chosen)
        try:
            return Index(path, chosen)
        except FileNotFoundError:
            lost = {chosen}.intersection(self.recorded(name))
            raise DatasetMissingError(name, chosen, self.root, self.versions(name), lost=[*lost]) from None
        except OSError as problem:
            raise CatalogError(self.root, f"{path}: {problem.strerror or problem}") from problem

    def path(self, name: str, version: Version) -> Path:
        """Return where the index of a version is, or would be.

        Raises:
            DatasetNameError: no dataset can be called so.
            DatasetMissingError: no version can be called so.
        """
        if not _VERSION.fullmatch(version):
            raise DatasetMissingError(name, version, self.root, self.versions(name))
        return self._folder(name) / f"{version}.arrow"

    def record(self, name: str, version: Version) -> PackRecord | None:
        """Return how a version was packed; None where that is not known."""
        try:
            return PackRecord.parse(self.path(name, version).with_suffix(".json").read_text(encoding="utf-8"))
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
        noted = dataclasses.replace(
            record, shard_ids=tuple(entry.id for entry in content.shards), home=content.home
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _draft(folder) as draft:
                # Not `published_file`: the name is known once the file is written.
                version = write_index(draft, content)
                _move_in(draft, folder / f"{version}.arrow")
            if (before := self.record(name, version)) and self._points_at(name, version):
                noted = dataclasses.replace(noted, packed_unix=before.packed_unix)  # nothing has changed since
            write_text(folder / f"{version}.json", noted.text())
            write_text(folder / "latest", f"{version}\n")
            self._sweep(folder)
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem
        return version

    def restore(self, name: str, version: Version, content: IndexContent) -> Version:
        """Put the index of a version back in place of a lost or damaged one; the name points where it did.

        Return the version that `content` is; nothing was changed where it is another than `version`.

        Raises:
            CatalogError: it cannot be written.
        """
        final = self.path(name, version)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with _draft(final.parent) as draft:
                found = write_index(draft, content)
                if found != version:
                    return found
                record = self.record(name, version)
                if record is not None:  # `versions` sorts by when they came
                    os.utime(draft, (record.packed_unix, record.packed_unix))
                _move_in(draft, final)
                self._point(name, version)
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem
        return found

    def preview(self, name: str, content: IndexContent) -> Version:
        """Return the version that `content` would be; leaves nothing.

        Raises:
            CatalogError: the catalog cannot be written.
        """
        self.check_writable(name)
        folder = self._folder(name)
        try:
            with _draft(folder if folder.is_dir() else self.root) as draft:
                return write_index(draft, content)
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem

    def recorded(self, name: str) -> list[Version]:
        """Return the versions that have an index or a record, sorted; an index may be lost and its record not.

        Raises:
            DatasetNameError: no dataset can be called so.
        """
        found = {path.stem for path in self._folder(name).glob("*.json")} | set(self.versions(name))
        return [Version(stem) for stem in sorted(found) if _VERSION.fullmatch(stem)]

    def _point(self, name: str, version: Version) -> None:
        try:
            self.latest(name)
        except (DatasetMissingError, IndexFormatError):
            write_text(self._folder(name) / "latest", f"{version}\n")

    def remove(self, name: str, version: Version, *, now: bool = False) -> None:
        """Take a version out of the catalog; who has it open reads on. Its shards stay where they are.

        Args:
            name: the dataset.
            version: not its newest, unless it is the only one.
            now: free the space at once, also if a job on another node may still read it.

        Raises:
            DatasetMissingError: there is no such version.
            NewestVersionError: the name points at it, and there are others.
            DatasetMissingError, NewestUnknownError: there are others, and what the name points at is lost.
            CatalogError: it cannot be removed, or it cannot be read what the name points at.
        """
        self.check_removable(name, version)
        path = self.path(name, version)
        try:
            if len(self.versions(name)) == 1:
                (path.parent / "latest").unlink(missing_ok=True)
            for beside in (".json", ".marks", ".held"):
                path.with_suffix(beside).unlink(missing_ok=True)
            kept = path.with_name(f"{_REMOVED}{version}-{uuid.uuid4().hex[:12]}")
            path.rename(kept)
            os.utime(kept)  # it is kept from now on, not from when it was packed
            if now:
                kept.unlink()
            self._sweep(path.parent)
            fsync_path(path.parent)
        except OSError as problem:
            raise CatalogError(self.root, problem.strerror or str(problem)) from problem

    def check_removable(self, name: str, version: Version) -> None:
        """Return if `remove` would remove a version. Raises as it does, and as `latest` where there are others."""
        there = self.versions(name)
        if version not in there:
            raise DatasetMissingError(name, version, self.root, there)
        # Where the pointer is unreadable, damaged or lost, any of them may be the newest.
        if len(there) > 1 and self.latest(name) == version:
            raise NewestVersionError(name, version)

    def _points_at(self, name: str, version: Version) -> bool:
        try:
            return self.latest(name) == version
        except (DatasetMissingError, IndexFormatError):
            return False

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Remove what was left by who was killed, and what was taken out long ago."""
        for prefix, kept_s in ((DRAFT_PREFIX, _DRAFT_KEPT_S), (_REMOVED, _REMOVED_KEPT_S)):
            for path in folder.glob(f"{prefix}*"):
                # Another packer's draft may become its version, or vanish, at any moment.
                with suppress(FileNotFoundError):
                    # By the file system's own clock: the draft of this very moment is on it.
                    if folder.stat().st_mtime - path.stat().st_mtime > kept_s:
                        path.unlink()


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    draft = folder / f"{DRAFT_PREFIX}{uuid.uuid4().hex}"
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _move_in(draft: Path, final: Path) -> None:
    fsync_path(draft)
    draft.replace(final)
    fsync_path(final.parent)
