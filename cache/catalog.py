"""The catalog, a folder on shared storage: per dataset the indexes of its versions (docs/format.md)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.errors import CatalogError, DatasetMissingError, IndexFormatError
from deeplink.cache.format.block import DIGEST_DIGITS
from deeplink.core.codec import from_row
from deeplink.core.publish import DRAFT_PREFIX, fsync_path, write_text
from deeplink.core.text import nearest
from deeplink.core.types import DATASET_NAME, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.cache.format.index_format import IndexContent

PARTS = ".parts"
"""The folder in a dataset's where its parts wait to be merged (`pack.parts`)."""
_VERSION = re.compile(rf"[0-9a-f]{{{DIGEST_DIGITS}}}")
_REMOVED = ".removed-"
_DRAFT_KEPT_S = 86_400.0
_REMOVED_KEPT_S = 7 * 86_400.0
"""On a network file system a process of another node that still reads an index would be killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRecord:
    """How a version was packed."""

    source: str
    plan: str  # digest of what was listed there (names, sizes, change marks) and of the settings that shape shards
    files: int
    bytes: int
    shards: int
    packed_unix: float
    shard_bytes: int = 0  # most bytes of samples in a shard; 0 where that was not noted
    shard_ids: tuple[str, ...] = ()  # in the order of its index, which can be rebuilt from them
    home: str = ""  # where the shards are kept besides; empty for nowhere
    access: str = ""  # who may read it (`SourceAccess`); empty: that is not known
    listed_unix: float = 0.0  # before the source was listed; 0: not noted, or some of its files were left out


def checked_name(name: str) -> str:
    """Return `name` if a dataset can be called so."""
    if not DATASET_NAME.fullmatch(name):
        raise DatasetMissingError(
            f"{name!r} cannot be a dataset's name",
            remedy="Use up to 100 letters, digits, dots, hyphens and underscores, a letter or digit first.",
        )
    return name


def ambiguous_version(name: str, beginning: str, found: Sequence[Version]) -> DatasetMissingError:
    """Return the error for the beginning of a version's name that fits several of them."""
    problem = f"dataset {name!r}: {beginning!r} is the beginning of {', '.join(found)}"
    return DatasetMissingError(problem, remedy="Give more digits of the version.")


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
        return sorted(filter(DATASET_NAME.fullmatch, found))

    def versions(self, name: str) -> list[Version]:
        """Return the versions of a dataset, the newest last; empty when there is none."""
        found: list[tuple[int, str]] = []
        for path in self._folder(name).glob("*.arrow"):
            if _VERSION.fullmatch(path.stem):
                with suppress(FileNotFoundError):  # removed since
                    found.append((path.stat().st_mtime_ns, path.stem))
        return [Version(stem) for _, stem in sorted(found)]

    def unmerged(self) -> list[Path]:
        """Return the indexes of the parts of all datasets that wait to be merged."""
        return sorted(self.root.glob(f"*/{PARTS}/*.arrow"))

    def recorded(self, name: str) -> list[Version]:
        """Return the versions that have an index or a record, sorted; an index may be lost and its record not."""
        found = {path.stem for path in self._folder(name).glob("*.json")} | set(self.versions(name))
        return [Version(stem) for stem in sorted(found) if _VERSION.fullmatch(stem)]

    def latest(self, name: str) -> Version:
        """Return the version a name points at."""
        pointer = self._folder(name) / "latest"
        try:
            text = pointer.read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            raise self.missing(name, "", self.versions(name) or self.recorded(name)) from None
        except UnicodeDecodeError:
            text = ""
        except OSError as problem:
            raise self._failed(problem) from problem
        if not _VERSION.fullmatch(text):
            remedy = [_recorded_by_rebuilding(name, versions)] if (versions := self.versions(name)) else []
            raise IndexFormatError(pointer, f"it does not say which version of {name!r} is the newest", *remedy)
        return Version(text)

    def resolved(self, name: str, beginning: str = "") -> Version:
        """Return the version that a text means: the newest for an empty one, else the one that begins with it."""
        if not beginning:
            return self.latest(name)
        there = self.versions(name)
        found = [version for version in there if version.startswith(beginning)]
        if len(found) > 1:
            raise ambiguous_version(name, beginning, found)
        if not found:
            lost = [version for version in self.recorded(name) if version.startswith(beginning)]
            raise self.missing(name, beginning, there, lost=lost)
        return found[0]

    def chosen(self, name: str, version: str | None = None) -> Version:
        """Return the version that `open` opens; one that is named in full need not be there."""
        whole = version and _VERSION.fullmatch(version)  # does without a look through the folder
        return Version(version) if version and whole else self.resolved(name, version or "")

    def open(self, name: str, version: str | None = None) -> Index:
        """Return the index of a version, or of the one that begins so; the newest when none is named."""
        from deeplink.cache.format.index import Index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        chosen = self.chosen(name, version)
        path = self.path(name, chosen)
        try:
            return Index(path, chosen)
        except FileNotFoundError:
            lost = {chosen}.intersection(self.recorded(name))
            raise self.missing(name, chosen, self.versions(name), lost=[*lost]) from None
        except OSError as problem:
            raise CatalogError(f"catalog {self.root}: {path}: {problem.strerror or problem}") from problem

    def path(self, name: str, version: Version) -> Path:
        """Return where the index of a version is, or would be."""
        if not _VERSION.fullmatch(version):
            raise self.missing(name, version, self.versions(name))
        return self._folder(name) / f"{version}.arrow"

    def record(self, name: str, version: Version) -> PackRecord | None:
        """Return how a version was packed; None where that is not known."""
        try:
            text = self.path(name, version).with_suffix(".json").read_text(encoding="utf-8")
            return from_row(PackRecord, json.loads(text))
        except (OSError, ValueError, TypeError):
            return None

    def missing(
        self, name: str, version: str = "", versions: Sequence[str] = (), *, lost: Sequence[str] = ()
    ) -> DatasetMissingError:
        """Return the error for a dataset, or a version of it, that is not there.

        `versions`: those that are; `lost`: those of which only the index is missing.
        """
        wanted = f"version {version} of {name!r}" if version else f"dataset {name!r}"
        problem = f"the catalog {self.root} has no {wanted}"
        remedy = "`deeplink pack SOURCE NAME` makes one; DEEPLINK_CATALOG says where to look."
        if not (lost or versions) and (meant := nearest(name, self.names(lost=True))):
            remedy = f"Is {meant!r} meant? {remedy}"
        if lost:
            problem = f"the catalog {self.root} has lost the index of {wanted}"
            remedy = f"`deeplink index rebuild {name}@{lost[0]}` makes it again of its shards."
        elif versions and not version:
            problem = f"the catalog {self.root} has lost which version of {name!r} is the newest"
            remedy = _recorded_by_rebuilding(name, versions)
        elif versions:
            remedy = f"Versions there are, the newest last: {', '.join(versions[-5:])}."
        return DatasetMissingError(problem, remedy=remedy)

    def _failed(self, problem: OSError) -> CatalogError:
        return CatalogError(f"catalog {self.root}: {problem.strerror or problem}")

    def check_writable(self, name: str) -> None:
        """Try whether a version could be published, before the work begins; leaves nothing behind."""
        folder = self._folder(name)
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with self._writing(there) as draft:
            draft.touch()  # not access(2): root squashing, quotas and read-only mounts are beyond it

    def publish(self, name: str, content: IndexContent, record: PackRecord) -> Version:
        """Make a version and let the name point at it; readers see all of it or nothing."""
        from deeplink.cache.format.index_format import write_index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        folder = self._folder(name)
        shards = tuple(entry.id for entry in content.shards)
        with self._writing(folder, make=True) as draft:
            # Not `published_file`: the name is known once the file is written.
            version = write_index(draft, content)
            _move_in(draft, folder / f"{version}.arrow")
            packed_unix = record.packed_unix
            if (before := self.record(name, version)) and self.newest(name) == version:
                packed_unix = before.packed_unix  # nothing has changed since
            noted = dataclasses.replace(
                record, shard_ids=shards, home=content.home, access=content.access, packed_unix=packed_unix
            )
            text = json.dumps(dataclasses.asdict(noted), indent=1, sort_keys=True)
            write_text(folder / f"{version}.json", f"{text}\n")
            write_text(folder / "latest", f"{version}\n")
            self._sweep(folder)
        return version

    def restore(self, name: str, version: Version, content: IndexContent) -> Version:
        """Put the index of a version back in place of a lost or damaged one; the name points where it did.

        Return the version that `content` is; nothing was changed where it is another than `version`.
        """
        from deeplink.cache.format.index_format import write_index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        final = self.path(name, version)
        with self._writing(final.parent, make=True) as draft:
            found = write_index(draft, content)
            if found != version:
                return found
            record = self.record(name, version)
            if record is not None:  # `versions` sorts by when they came
                os.utime(draft, (record.packed_unix, record.packed_unix))
            _move_in(draft, final)
            if self.newest(name) is None:
                write_text(final.with_name("latest"), f"{version}\n")
        return found

    def preview(self, name: str, content: IndexContent) -> Version:
        """Return the version that `content` would be; leaves nothing."""
        from deeplink.cache.format.index_format import write_index  # noqa: PLC0415 - pyarrow: no agent needs it to start

        self.check_writable(name)
        folder = self._folder(name)
        with self._writing(folder if folder.is_dir() else self.root) as draft:
            return write_index(draft, content)

    @contextmanager
    def _writing(self, folder: Path, *, make: bool = False) -> Iterator[Path]:
        """Give a file in `folder` to write to, which is removed unless it was moved."""
        draft = folder / f"{DRAFT_PREFIX}{uuid.uuid4().hex}"
        try:
            if make:
                folder.mkdir(parents=True, exist_ok=True)
            try:
                yield draft
            finally:
                draft.unlink(missing_ok=True)
        except OSError as problem:
            raise self._failed(problem) from problem

    def check_removable(self, name: str, version: Version) -> None:
        """Return if `remove` would remove a version. Raises as it does, and as `latest` where there are others."""
        there = self.versions(name)
        if version not in there:
            raise self.missing(name, version, there)
        # Where the pointer is unreadable, damaged or lost, any of them may be the newest.
        if len(there) > 1 and self.latest(name) == version:
            raise CatalogError(
                f"{version} is the newest version of {name!r}: opening {name!r} reads it",
                "Pack the dataset again, or remove its other versions first.",
                exit_code=2,
            )

    def remove(self, name: str, version: Version, *, now: bool = False) -> None:
        """Take a version out of the catalog; open readers read on. Its shards stay where they are."""
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
            raise self._failed(problem) from problem

    def remove_all(self, name: str) -> None:
        """Take a dataset out of the catalog, also what is left of versions that lost their index; as `remove`."""
        newest = self.newest(name)
        for version in sorted(self.versions(name), key=lambda one: one == newest):  # the newest last
            self.remove(name, version)
        try:
            for version in self.recorded(name):
                self.path(name, version).with_suffix(".json").unlink(missing_ok=True)
        except OSError as problem:
            raise self._failed(problem) from problem

    def newest(self, name: str) -> Version | None:
        """Return the version a name points at; None where there is none, or it cannot be told."""
        try:
            return self.latest(name)
        except (DatasetMissingError, IndexFormatError):
            return None

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Remove drafts of killed processes, and versions that were removed long ago."""
        for prefix, kept_s in ((DRAFT_PREFIX, _DRAFT_KEPT_S), (_REMOVED, _REMOVED_KEPT_S)):
            for path in folder.glob(f"{prefix}*"):
                # Another packer's draft may become its version, or vanish, at any moment.
                with suppress(FileNotFoundError):
                    # By the file system's own clock: the draft of this very moment is on it.
                    if folder.stat().st_mtime - path.stat().st_mtime > kept_s:
                        path.unlink()


def _move_in(draft: Path, final: Path) -> None:
    fsync_path(draft)
    draft.replace(final)
    fsync_path(final.parent)


def _recorded_by_rebuilding(name: str, versions: Sequence[str]) -> str:
    commands = " or ".join(f"`deeplink index rebuild {name}@{version}`" for version in versions[:-4:-1])
    return f"{commands} records it again; or name the version."
