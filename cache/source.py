"""Where the small files are: a local folder or any fsspec URL. The only module that touches fsspec."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import fsspec
import xxhash
from fsspec.archive import AbstractArchiveFileSystem
from typing_extensions import override

from deeplink.cache.errors import SourceError, SourceFileError
from deeplink.cache.keys import checked_key
from deeplink.cache.names import NameCollector
from deeplink.cache.sources.folder import LocalSource
from deeplink.cache.sources.folders_ahead import ListingAhead
from deeplink.cache.sources.origin import Listing, Source, check_size, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.sources.origin import Entry

__all__ = ["Listing", "LocalSource", "RemoteSource", "Source", "open_source"]

_KINDS = ("s3", "gs", "abfs", "https", "sftp", "ftp", "hdfs", "hf", "zip", "tar")
_DRIVERS = ("s3fs", "gcsfs", "adlfs", "requests", "aiohttp", "paramiko", "huggingface_hub", "smbprotocol", "ocifs")
"""Packages of kinds that fsspec has no driver of its own for, as its errors name them."""
_CHANGE_MARKS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "md5Hash", "crc")
_ASKED_AT_ONCE = 16


def open_source(url: str) -> Source:
    """Return the source a local path or a URL names; nothing is read yet.

    Raises:
        SourceError: the URL is of an unknown kind, or holds credentials.
    """
    if "://" not in url and "::" not in url:
        return LocalSource(url)
    if url.startswith("file://"):
        return LocalSource(url.removeprefix("file://"))
    return RemoteSource(url)


def _remedy(problem: Exception) -> str:
    if isinstance(problem, ImportError):
        missing = [package for package in _DRIVERS if package in str(problem)]
        install = f"pip install {' '.join(missing)}" if missing else "Install what is missing"
        return f"{install}, in the environment of this command and of the nodes."
    if isinstance(problem, ValueError):
        return f"Name a folder, or a URL of a known kind: {', '.join(f'{kind}://' for kind in _KINDS)} ..."
    return "Check the address, and what its kind needs on this machine."


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
        except (ValueError, ImportError, OSError) as problem:
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

    def _unreachable(self, error: Exception) -> SourceError:
        return SourceError(self.url, f"cannot be listed: {error}", "Check the address and rights.")

    @override
    def listing(self) -> Listing:
        self.check()
        found = NameCollector()
        if isinstance(self._fs, AbstractArchiveFileSystem):
            # It holds the list of all its files anyway, and goes through all of it for each folder.
            self._gather_all(found)
        else:
            with ListingAhead(self._entries) as entries:
                walk(entries, found)
        if not found:
            raise SourceError(self.url, "the folder holds no files")
        return Listing.of(found)

    def _gather_all(self, found: NameCollector) -> None:
        try:
            every: dict[str, dict[str, Any]] = self._fs.find(self._root, withdirs=False, detail=True)
        except Exception as error:
            raise self._unreachable(error) from error
        for path, facts in every.items():
            if not path.endswith("/"):
                name, size, mark = self._file(path.removeprefix(self._prefix).lstrip("/"), facts)
                found.add("", [checked_key(name)], [size], [mark])

    def _entries(self, folder: str) -> list[Entry]:
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
            if facts["type"] == "directory":
                folders.append((f"{below.rstrip('/')}/", 0, 0))
                checked_key(folder + below.rstrip("/"))
            # An object store's marker of a folder is an object of no bytes whose name ends in a slash.
            elif not below.endswith("/"):
                files.append((checked_key(folder + below)[len(folder) :], facts))
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
            raise SourceFileError(self.url, key, f"{type(problem).__name__}: {problem}") from problem
        return found

    def _file(self, key: str, facts: dict[str, Any]) -> Entry:
        if facts.get("size") is None:
            raise SourceFileError(self.url, key, "the server does not say how long it is")
        return key, int(facts["size"]), _mark(facts)

    @override
    def mark(self, key: str) -> int:
        return _mark(self._asked(key))

    @override
    def read(self, key: str, size: int) -> bytes:
        data = self._cat(key)
        check_size(self.url, key, size, len(data))
        return data

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._cat(key, start=start, end=start + length)
        check_size(self.url, key, start + length, start + len(data))
        return data

    @override
    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        if not self.batched:
            return super().read_many(names, sizes)
        # Not `cat`: that takes brackets and asterisks in names for patterns.
        paths = [f"{self._root}/{name}" for name in names]
        try:
            found = self._fs.cat_ranges(paths, None, None, on_error="return")
        except Exception as problem:
            raise SourceFileError(self.url, names[0], f"{type(problem).__name__}: {problem}") from problem
        for name, size, data in zip(names, sizes, found, strict=True):
            if isinstance(data, BaseException):
                raise SourceFileError(self.url, name, f"{type(data).__name__}: {data}") from data
            check_size(self.url, name, size, len(data))
        return list(found)

    def _cat(self, key: str, **extent: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{key}", **extent)
        except Exception as problem:
            raise SourceFileError(self.url, key, f"{type(problem).__name__}: {problem}") from problem
        return data


def _mark(facts: dict[str, Any]) -> int:
    said = [f"{name}={facts[name]}" for name in _CHANGE_MARKS if facts.get(name) is not None]
    return xxhash.xxh3_64_intdigest(";".join(said).encode()) if said else 0
