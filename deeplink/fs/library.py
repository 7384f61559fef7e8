"""The catalog's datasets by path, `deeplink://name[@version]/path`, and how their samples are read."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from deeplink.cache.catalog import Catalog, checked_name
from deeplink.cache.errors import DatasetMissingError, KeyMissingError
from deeplink.cache.format.block import SPAN
from deeplink.cache.read.mapped import read_piece
from deeplink.cache.reader import Reader
from deeplink.cache.store.store import Store
from deeplink.core.config import Config, load_config
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.munge import vouch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.core.types import Version

PROTOCOL = "deeplink"
_SCHEME = f"{PROTOCOL}://"


@dataclass(frozen=True, slots=True)
class DatasetPath:
    """A place in a dataset."""

    name: str  # the dataset; empty for the catalog itself
    version: str = ""  # what stood behind the @, a version or its beginning; empty for the newest
    inner: str = ""  # folder or sample in the dataset, without slashes at its ends; empty for the whole dataset

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[deeplink://]name[@version][/path]`.

        >>> DatasetPath.parse("deeplink://mnist@3f2a/train/7/")
        DatasetPath(name='mnist', version='3f2a', inner='train/7')
        >>> DatasetPath.parse("")
        DatasetPath(name='', version='', inner='')
        """
        root, _, inner = stripped(text).partition("/")
        name, at, version = root.partition("@")
        if root and not (version if at else name):
            checked_name(root)  # raises: it is not a name alone
        return cls(checked_name(name) if root else "", version, inner)

    @property
    def root(self) -> str:
        """The part before the first slash."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @override
    def __str__(self) -> str:
        return f"{self.root}/{self.inner}" if self.inner else self.root


def stripped(text: str) -> str:
    """Return a path without its scheme and without slashes at its ends.

    >>> stripped("deeplink://mnist/train/")
    'mnist/train'
    """
    return text.removeprefix(_SCHEME).strip("/")


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A folder or a sample."""

    path: str  # where it is, from the dataset's root
    row: int = -1  # the sample's row; -1 for a folder

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.row < 0


class DatasetTree:
    """The folders and samples of one version; asks the index each time, remembers nothing."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def entry(self, path: str) -> TreeEntry | None:
        """Return what lies at a path; None where nothing does."""
        try:
            return TreeEntry(path, self.index.row(path)) if path else TreeEntry("")
        except KeyMissingError:
            return TreeEntry(path) if self._is_folder(path) else None

    def _is_folder(self, path: str) -> bool:
        # The index takes slashes at the ends for nothing; in a path they are wrong.
        return path == path.strip("/") and bool(self.index.rows_below(path))

    def entries(self, folder: str) -> list[TreeEntry]:
        """Return what lies directly in a folder, sorted by name; empty where there is no such folder."""
        prefix = f"{folder}/" if folder else ""
        try:
            found = self.index.listing(folder)
        except KeyMissingError:
            return []
        entries = [TreeEntry(prefix + name) for name in found.folders]
        entries += [TreeEntry(self.index.key(row), row) for row in found.rows.tolist()]
        return sorted(entries, key=lambda entry: entry.path)

    def below(self, folder: str, depth: int | None = None) -> Iterator[TreeEntry]:
        """Yield all that lies below a folder, folders before what is in them, at most `depth` levels down."""
        if depth is None:
            yield from self._all_below(folder)
            return
        for entry in self.entries(folder):
            yield entry
            if entry.is_folder and depth > 1:
                yield from self.below(entry.path, depth - 1)

    def _all_below(self, folder: str) -> Iterator[TreeEntry]:
        rows = self.index.rows_below(folder)
        start = len(folder) + 1 if folder else 0
        seen: set[str] = set()
        for row, key in zip(rows, self.index.keys(rows), strict=True):
            parent = key.rpartition("/")[0]
            if len(parent) > len(folder) and parent not in seen:
                yield from self._new_folders(parent, start, seen)
            yield TreeEntry(key, row)

    @staticmethod
    def _new_folders(parent: str, start: int, seen: set[str]) -> Iterator[TreeEntry]:
        end = parent.find("/", start)
        while end >= 0:
            if parent[:end] not in seen:
                seen.add(parent[:end])
                yield TreeEntry(parent[:end])
            end = parent.find("/", end + 1)
        seen.add(parent)
        yield TreeEntry(parent)


_BATCH_BYTES, _BATCH_SAMPLES = 32 << 20, 256
"""Read at once by `ReadAhead`."""
_KEPT = 2
"""Pieces remembered: who reads a table goes between its end and its columns."""
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
    return Reader.open(name, version=version, config=config, vouch=vouch)


def forget_open_datasets() -> None:
    """Let go of the datasets that this process keeps open; they are opened again when needed."""
    _opened.cache_clear()


@dataclass(frozen=True, slots=True)
class PathEntry:
    """A folder or sample that lies at a path."""

    place: DatasetPath  # the path, taken apart
    reader: Reader  # of the version
    entry: TreeEntry  # the folder or sample

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
        """Return what lies at `[deeplink://]name[@version][/path]`."""
        try:
            place = DatasetPath.parse(path)
            reader = self._reader(place)
        except DatasetMissingError as problem:
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
            version = self.catalog.resolved(place.name, beginning)
            # Of two threads that look at once, both go on with what the first one found.
            reader = self._pinned.setdefault(asked, _opened(place.name, version, self.config))
        return reader

    def read(self, paths: Sequence[str]) -> dict[str, memoryview]:
        """Return the bytes of samples by path, read at once for each dataset."""
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


class LongSample:
    """A sample of several pieces. For one thread; holds some pieces in memory, or all of them.

    What this node does not hold is read whole, once: samples come from elsewhere with one checksum for all of it.
    """

    def __init__(self, found: PathEntry, config: Config) -> None:
        self._reader, self._store = found.reader, Store(config.store, make=False)
        self._row, self.bytes = found.entry.row, found.bytes
        self._pieces: dict[int, memoryview] = {}
        self._whole: memoryview | None = None

    @staticmethod
    def is_one(found: PathEntry) -> bool:
        """Tell whether a sample is so long."""
        return found.bytes > SPAN

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, both within the sample."""
        parts = []
        while start < stop:
            number, begin = divmod(start, SPAN)
            end = min(stop - number * SPAN, SPAN)
            parts.append(self._piece(number)[begin:end])
            start = number * SPAN + end
        return b"".join(parts)

    def _piece(self, number: int) -> memoryview:
        if self._whole is None and number not in self._pieces:
            piece = read_piece(self._store, self._reader.index, self._row, number)
            if piece is None:
                self._pieces, self._whole = {}, self._read_whole()
            else:
                while len(self._pieces) >= _KEPT:
                    del self._pieces[next(iter(self._pieces))]
                self._pieces[number] = piece
        if self._whole is not None:
            return self._whole[number * SPAN : (number + 1) * SPAN]
        return self._pieces[number]

    def _read_whole(self) -> memoryview:
        try:
            return self._reader.read([self._row])[0]
        except DeepLinkError as problem:
            raise NotReadError(problem) from problem


class ReadAhead:
    """Reads the next samples of a list along with the one that is wanted. For one thread."""

    def __init__(self, library: Library, paths: Sequence[str]) -> None:
        self._library, self._paths = library, paths
        self._position = {path: position for position, path in enumerate(paths)}
        self._read: dict[str, memoryview | OSError] = {}

    def take(self, path: str) -> memoryview:
        """Return a sample's bytes, and forget them."""
        if path not in self._read:
            self._read = self._library.read_each([path, *self._following(path)])
        found = self._read.pop(path)
        if isinstance(found, OSError):
            raise found
        return found

    def _following(self, path: str) -> Iterator[str]:
        start = self._position.get(path, len(self._paths)) + 1
        room = _BATCH_BYTES
        for other in self._paths[start : start + _BATCH_SAMPLES - 1]:
            try:
                found = self._library.at(other)
            except DatasetNotFoundError:
                continue
            room -= found.bytes
            if room < 0:
                return
            if not found.entry.is_folder:
                yield other
