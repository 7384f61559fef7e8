"""Whatever fsspec reaches as a source."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import fsspec
import xxhash
from fsspec.archive import AbstractArchiveFileSystem
from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import NameCollector, checked_key
from deeplink.cache.source.selection import Picker, Selection
from deeplink.cache.source.source import EVERYTHING, Entry, Listing, Source, check_size, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LISTED_AHEAD = 16
_ASKED_AT_ONCE = 16
_SMALL = 5 << 20
"""Bytes from which on a driver may take a whole file in pieces, several at once."""
_KINDS = ("s3", "http", "zip", "tar")
"""Those that the tests read; of others fsspec's word is taken."""
_DRIVERS = ("s3fs", "gcsfs", "adlfs", "requests", "aiohttp", "paramiko", "huggingface_hub", "smbprotocol", "ocifs")
"""Packages of kinds that fsspec has no driver of its own for, as its errors name them."""
_CHANGE_MARKS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "md5Hash", "crc")


def _remedy(problem: Exception) -> str:
    if isinstance(problem, ImportError):
        missing = [package for package in _DRIVERS if package in str(problem)]
        install = f"pip install {' '.join(missing)}" if missing else "Install what is missing"
        return f"{install}, in the environment of this command and of the nodes."
    if isinstance(problem, ValueError):
        return f"Name a folder, or a URL of a known kind: {', '.join(f'{kind}://' for kind in _KINDS)} ..."
    return "Check the address, and what its kind needs on this machine."


class ListingAhead:
    """Gives what `entries` gives, for folders in the order of `origin.walk`; sixteen are asked for at once.

    Use `with`: at its end no thread works any more.
    """

    def __init__(self, entries: Callable[[str], Sequence[Entry]]) -> None:
        self._entries = entries
        self._asked: dict[str, Future[Sequence[Entry]]] = {}
        self._next: list[str] = []  # the last one is needed first
        self._pool = ThreadPoolExecutor(_LISTED_AHEAD, thread_name_prefix="deeplink-list")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __call__(self, folder: str) -> Sequence[Entry]:
        """Return what is in a folder; raises what `entries` raises for it."""
        if folder not in self._asked:
            if self._next and self._next[-1] == folder:
                self._next.pop()
            self._ask(folder)
        found = self._asked.pop(folder).result()
        below = sorted((folder + name for name, _, _ in found if name.endswith("/")), reverse=True)
        self._next.extend(below)
        while self._next and len(self._asked) < _LISTED_AHEAD:
            self._ask(self._next.pop())
        return found

    def _ask(self, folder: str) -> None:
        self._asked[folder] = self._pool.submit(self._entries, folder)


class RemoteSource(Source):
    """Whatever fsspec can reach."""

    local = False

    def __init__(self, url: str) -> None:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise SourceError(
                "(hidden)", "the URL holds credentials, which the index would show", "Use the environment's."
            )
        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except Exception as problem:  # of any kind: that of an archive has been opened already
            # A driver that looked for a library in forty places names them all, a line each.
            raise SourceError(url, str(problem).partition("\n")[0], _remedy(problem)) from problem
        self._root = str(root).rstrip("/")
        self._prefix = f"{self._root}/" if self._root else ""
        self.batched = bool(getattr(self._fs, "async_impl", False))

    @override
    def check(self) -> None:
        try:
            there = self._fs.exists(self._root)
        except Exception as error:
            # What a driver raises is its own affair: botocore, aiohttp, paramiko ...
            raise self._unreachable(error) from error
        if not there:
            raise SourceError(self.url, "there is no such folder")

    def _failed(self, key: str, problem: BaseException) -> SourceError:
        said = f"{type(problem).__name__}: {problem}"
        return SourceError.unreadable(self.url, key, said, may_pass=_may_pass(problem))

    def _unread(self, key: str, problem: BaseException) -> SourceError:
        is_gone = isinstance(problem, FileNotFoundError)
        return SourceError.gone(self.url, key, str(problem)) if is_gone else self._failed(key, problem)

    def _unreachable(self, error: Exception) -> SourceError:
        return SourceError(
            self.url, f"cannot be listed: {error}", "Check the address and rights.", may_pass=_may_pass(error)
        )

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        self.check()
        found, picker = NameCollector(), Picker(wanted)
        if isinstance(self._fs, AbstractArchiveFileSystem):
            # It holds the list of all its files anyway, and goes through all of it for each folder.
            self._gather_all(found, picker)
        else:
            with ListingAhead(lambda folder: self._entries(folder, picker)) as entries:
                walk(entries, found, picker)
        return Listing.of(self.url, found, picker)

    def _gather_all(self, found: NameCollector, picker: Picker) -> None:
        try:
            every: dict[str, dict[str, Any]] = self._fs.find(self._root, withdirs=False, detail=True)
        except Exception as error:
            raise self._unreachable(error) from error
        for path, facts in every.items():
            key = path.removeprefix(self._prefix)  # `/abs` stays: the archive does not give it by another name
            if not path.endswith("/") and picker.takes_below(key):
                name, size, mark = self._file(key, facts)
                picker.add(found, "", [name], [size], [mark])

    def _entries(self, folder: str, picker: Picker) -> list[Entry]:
        """Return what is in a folder. Not `find`, which holds a dictionary for each file of all folders."""
        path = f"{self._root}/{folder}".rstrip("/")
        try:
            listed: list[dict[str, Any]] = self._fs.ls(path, detail=True)
            # Drivers remember what they listed, for ever.
            self._fs.invalidate_cache(path)
        except Exception as error:
            raise self._unreachable(error) from error
        folders: list[Entry] = []
        files: list[tuple[str, dict[str, Any]]] = []
        for facts in listed:
            name: str = facts["name"] if self._prefix.startswith("/") else facts["name"].lstrip("/")
            below = name.removeprefix(self._prefix + folder)
            # The folder itself, or what a web page links to elsewhere.
            if not name.startswith(self._prefix + folder) or not below.strip("/"):
                continue
            key = folder + below.rstrip("/")
            try:
                checked_key(key)
            except SourceError as problem:
                picker.refuse(key, problem)
                continue
            if facts["type"] == "directory":
                if picker.enters(key):
                    folders.append((f"{below.rstrip('/')}/", 0, 0))
            # An object store's marker of a folder is an object of no bytes whose name ends in a slash.
            elif not below.endswith("/") and picker.takes(key):
                files.append((below, facts))
        return folders + self._files(folder, files)

    def _files(self, folder: str, files: list[tuple[str, dict[str, Any]]]) -> list[Entry]:
        unsized = [(name, facts) for name, facts in files if facts.get("size") is None]
        if unsized:
            # A web server's list of a folder gives names alone.
            with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
                asked = pool.map(lambda item: self._asked(folder + item[0]), unsized)
                for (_, facts), more in zip(unsized, asked, strict=True):
                    facts.update(more)
        return [(name, *self._file(folder + name, facts)[1:]) for name, facts in files]

    def _asked(self, key: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._fs.info(f"{self._root}/{key}")
        except Exception as problem:
            raise self._failed(key, problem) from problem
        return found

    def _file(self, key: str, facts: dict[str, Any]) -> Entry:
        if facts.get("size") is None:
            raise SourceError.unreadable(self.url, key, "the server does not say how long it is")
        return key, int(facts["size"]), _mark(facts)

    @override
    def stat(self, key: str) -> tuple[int, int]:
        _, size, mark = self._file(key, self._asked(key))
        return size, mark

    @override
    def read(self, key: str, size: int) -> bytes:
        start, end = _extent(size)
        data = self._cat(key, start=start, end=end)
        check_size(self.url, key, size, len(data))
        return data

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        if not length:
            self._asked(key)  # there is no such range: a server would give the whole file
            return b""
        data = self._cat(key, start=start, end=start + length)
        check_size(self.url, key, start + length, start + len(data))
        return data

    @override
    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        if not self.batched:
            return super().read_many(names, sizes)
        # Not `cat`: that takes brackets and asterisks in names for patterns.
        paths = [f"{self._root}/{name}" for name in names]
        starts, ends = zip(*map(_extent, sizes), strict=True)
        try:
            found = self._fs.cat_ranges(paths, list(starts), list(ends), on_error="return")
        except Exception as problem:
            raise self._unread(names[0], problem) from problem
        for name, size, data in zip(names, sizes, found, strict=True):
            if isinstance(data, BaseException):
                raise self._unread(name, data) from data
            check_size(self.url, name, size, len(data))
        return list(found)

    def _cat(self, key: str, **extent: int | None) -> bytes:
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{key}", **extent)
        except Exception as problem:
            raise self._unread(key, problem) from problem
        return data


def _extent(size: int) -> tuple[int | None, int | None]:
    """Return where to begin and end so that a small file takes one request: s3fs asks for the size of a whole one.

    A byte more than it should have shows that it grew. An empty file has no range.
    """
    return (0, size + 1) if 0 < size < _SMALL else (None, None)


def _may_pass(problem: BaseException) -> bool:
    return not isinstance(problem, (FileNotFoundError, PermissionError))


def _mark(facts: dict[str, Any]) -> int:
    said = [f"{name}={facts[name]}" for name in _CHANGE_MARKS if facts.get(name) is not None]
    return xxhash.xxh3_64_intdigest(";".join(said).encode()) if said else 0
