"""The catalog's datasets by path: what the doors of DeepLink that speak of files have in common."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import DatasetMissingError, DatasetNameError
from deeplink.cache.reader import Reader
from deeplink.config import Config, load_config
from deeplink.errors import DeepLinkError
from deeplink.path import DatasetPath, resolved_version, stripped
from deeplink.tree import DatasetTree, TreeEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.types import Version

_MOST_OPEN = 16
"""Versions that a process keeps open between uses."""


class ReadOnlyDatasetError(DeepLinkError, PermissionError):
    """Somebody tried to write to a packed dataset."""

    def __init__(self, action: str) -> None:
        super().__init__(
            f"packed datasets are read only: to {action} is refused",
            remedy="Write elsewhere; `deeplink pack SOURCE NAME` makes a new version of a dataset.",
        )
        self.action, self.errno = action, errno.EROFS


class DatasetNotFoundError(DeepLinkError, FileNotFoundError):
    """There is no such dataset, version, folder or sample."""

    exit_code = 2

    def __init__(
        self, path: str, problem: str = "there is no such file or folder", remedy: str = "`deeplink ls` lists."
    ) -> None:
        super().__init__(f"deeplink://{path}: {problem}", remedy=remedy)
        self.path, self.problem, self.errno = path, problem, errno.ENOENT


class IsFolderError(DeepLinkError, IsADirectoryError):
    """A folder was to be read as a file."""

    exit_code = 2

    def __init__(self, path: str, remedy: str = "Name a file in it.") -> None:
        super().__init__(f"deeplink://{path} is a folder", remedy=remedy)
        self.path, self.errno = path, errno.EISDIR


class NotReadError(DeepLinkError, OSError):
    """Samples cannot be had; `problem` says why, in the cache's own words."""

    def __init__(self, problem: DeepLinkError) -> None:
        super().__init__(str(problem), remedy=problem.remedy)
        self.problem, self.errno = problem, errno.EIO


@lru_cache(_MOST_OPEN)
def _opened(name: str, version: Version, config: Config) -> Reader:
    # A reader may be used by all threads, and by forked children; what was verified once stays so.
    return Reader.open(name, version=version, config=config)


def forget_open_datasets() -> None:
    """Let go of the datasets that this process keeps open; they are opened again when needed."""
    _opened.cache_clear()


@dataclass(frozen=True, slots=True)
class PathEntry:
    """What lies at a path.

    Attributes:
        place: the path, taken apart.
        reader: of the version.
        entry: the folder or sample.
    """

    place: DatasetPath
    reader: Reader
    entry: TreeEntry

    @property
    def bytes(self) -> int:
        """Bytes of the sample; 0 for a folder."""
        return 0 if self.entry.is_folder else self._cell("lengths")

    @property
    def checksum(self) -> int:
        """The sample's xxh3-64; a number of the version for a folder."""
        return int(self.reader.version, 16) if self.entry.is_folder else self._cell("checksums")

    def _cell(self, column: str) -> int:
        # As sealed: where a sample is read in ranges nothing else tells that it goes on behind its last one.
        return int(self.reader.index.column(column, range(self.entry.row, self.entry.row + 1))[0])

    def path_of(self, entry: TreeEntry) -> str:
        """Return the path of another entry of this version."""
        return f"{self.place.root}/{entry.path}"

    def entries(self) -> list[TreeEntry]:
        """Return what lies directly in the folder, sorted; the sample itself for a sample."""
        return DatasetTree(self.reader.index).entries(self.place.inner) if self.entry.is_folder else [self.entry]

    def below(self, depth: int | None = None) -> Iterator[TreeEntry]:
        """Yield all that lies below the folder, at most `depth` levels down; nothing for a sample."""
        if self.entry.is_folder:
            yield from DatasetTree(self.reader.index).below(self.place.inner, depth)


class Library:
    """The datasets, each at one version for the life of the object: the newest when it was first looked at.

    Safe to use from several threads and across fork, and to pickle: the copy reads the same versions.

    Args:
        versions: dataset name to version, or the beginning of one, for datasets not to be read at their newest.
        config: where catalog, store and members are; what the environment and the files say when None.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(self, *, versions: Mapping[str, str] | None = None, config: Config | None = None) -> None:
        self.config = config or load_config()
        self.catalog = Catalog(self.config.catalog)
        self._given = dict(versions or {})
        self._pinned: dict[tuple[str, str], Reader] = {}

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.versions, self.config)

    @property
    def versions(self) -> dict[str, str]:
        """The versions read where a path names none: those given, and those looked at so far."""
        return self._given | {name: found.version for (name, asked), found in self._pinned.items() if not asked}

    def at(self, path: str) -> PathEntry:
        """Return what lies at `[deeplink://]name[@version][/path]`.

        Raises:
            NotThereError: nothing does.
            VersionAmbiguousError: the beginning of a version fits several.
            CatalogError, IndexFormatError: the catalog or the index cannot be read.
        """
        try:
            place = DatasetPath.parse(path)
            reader = self._reader(place)
        except (DatasetMissingError, DatasetNameError) as problem:
            raise DatasetNotFoundError(stripped(path), str(problem), problem.remedy) from problem
        entry = DatasetTree(reader.index).entry(place.inner)
        if entry is None:
            raise DatasetNotFoundError(str(place))
        return PathEntry(place, reader, entry)

    def _reader(self, place: DatasetPath) -> Reader:
        asked = place.name, place.version
        reader = self._pinned.get(asked)
        if reader is None:
            beginning = place.version or self._given.get(place.name, "")
            version = resolved_version(self.catalog, place.name, beginning)
            # Of two threads that look at once, both go on with what the first one found.
            reader = self._pinned.setdefault(asked, _opened(place.name, version, self.config))
        return reader

    def read(self, paths: Sequence[str]) -> dict[str, memoryview]:
        """Return the bytes of samples by path, read at once for each dataset.

        Raises:
            NotThereError, IsFolderError: there is no such sample.
            NotReadError: a sample's bytes cannot be had anywhere.
        """
        wanted: dict[Reader, dict[str, int]] = {}
        for path in paths:
            found = self.at(path)
            if found.entry.is_folder:
                raise IsFolderError(str(found.place))
            wanted.setdefault(found.reader, {})[path] = found.entry.row
        read: dict[str, memoryview] = {}
        for reader, row_of in wanted.items():
            try:
                read.update(zip(row_of, reader.read(list(row_of.values())), strict=True))
            except DeepLinkError as problem:
                raise NotReadError(problem) from problem
        return read

    def read_each(self, paths: Sequence[str]) -> dict[str, memoryview | OSError]:
        """Return the bytes of samples by path, in the order asked; in place of what cannot be had, its error."""
        out: dict[str, memoryview | OSError] = dict.fromkeys(paths, DatasetNotFoundError(""))
        there = []
        for path in out:
            try:
                if self.at(path).entry.is_folder:
                    out[path] = IsFolderError(stripped(path))
                else:
                    there.append(path)
            except DatasetNotFoundError as problem:
                out[path] = problem
        try:
            out.update(self.read(there))
        except NotReadError:  # which of them it was is found out one by one
            out.update((path, self._read_one(path)) for path in there)
        return out

    def _read_one(self, path: str) -> memoryview | OSError:
        try:
            return self.read([path])[path]
        except OSError as problem:
            return problem


def _reopened(kind: type[Library], versions: dict[str, str], config: Config) -> Library:
    return kind(versions=versions, config=config)
