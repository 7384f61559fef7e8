"""Where the small files are: a local folder or any fsspec URL. The only module that touches fsspec.

A local folder is read with plain system calls: fsspec's own local file system costs several times as much.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import fsspec
import numpy as np
import xxhash
from typing_extensions import override

from deeplink.cache import keys
from deeplink.cache.errors import BadKeyError, SourceChangedError, SourceError, SourceFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.types import SampleKey

_KINDS = ("s3", "gs", "abfs", "https", "sftp", "ftp", "hdfs", "hf", "zip", "tar")
_DRIVERS = ("s3fs", "gcsfs", "adlfs", "requests", "aiohttp", "paramiko", "huggingface_hub", "smbprotocol", "ocifs")
"""Packages of kinds that fsspec has no driver of its own for, as its errors name them."""
_CHANGE_MARKS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "md5Hash", "crc")


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of a source as they were listed, sorted by key.

    Attributes:
        keys: their paths below the root.
        sizes: int64, bytes.
        marks: uint64, changes when a file does (from modification time or entity tag); 0 where there is none.
        marked: whether every file has a mark, so that an unchanged listing means unchanged files.
    """

    keys: list[SampleKey]
    sizes: np.ndarray
    marks: np.ndarray
    marked: bool

    def __len__(self) -> int:
        return len(self.keys)


class Source(Protocol):
    """A root below which the small files are. Reading is safe from several threads."""

    url: str
    local: bool

    def check(self) -> None:
        """Look whether there is a folder at all, without listing it.

        Raises:
            SourceError: the root is missing, no folder, or cannot be reached.
        """
        ...

    def listing(self) -> Listing:
        """Return all files, sorted by key; one pass over the source.

        Raises:
            SourceError: the root is missing, no folder, or empty.
            SourceFileError: an entry is no file, or cannot be looked at.
            BadKeyError: a file's name cannot be a key.
            KeyCollisionError: two names collide.
        """
        ...

    def read(self, key: str, size: int) -> bytes:
        """Return a file's bytes, which must be `size`.

        Raises:
            SourceFileError: it cannot be read.
            SourceChangedError: it is not of that size.
        """
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from `start`.

        Raises:
            SourceFileError: it cannot be read.
            SourceChangedError: it ends before.
        """
        ...


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


def _checked_size(url: str, key: str, size: int, found: int) -> None:
    if found != size:
        more = "more than " if found > size else ""
        raise SourceChangedError(url, key, f"{more}{min(found, size):,} bytes where {size:,} were listed")


class LocalSource(Source):
    """A folder of this machine's file systems."""

    local = True

    def __init__(self, path: str) -> None:
        self._root = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links in the path as the user wrote them
        self._prefix = f"{self._root}/"
        self.url = str(self._root)

    @override
    def check(self) -> None:
        if not self._root.is_dir():
            problem = "it is not a folder" if self._root.exists() else "there is no such folder"
            raise SourceError(self.url, problem)

    @override
    def listing(self) -> Listing:
        self.check()
        found: dict[str, tuple[int, int]] = {}
        self._walk("", found)
        if not found:
            raise SourceError(self.url, "the folder holds no files")
        names = keys.checked_keys(found)
        sizes = np.array([found[name][0] for name in names], np.int64)
        marks = np.array([found[name][1] for name in names], np.uint64)
        return Listing(names, sizes, marks, marked=True)

    def _walk(self, top: str, found: dict[str, tuple[int, int]]) -> None:
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(self._prefix + folder) as entries:
                    for entry in entries:
                        name = folder + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(f"{name}/")
                        else:
                            found[name] = self._looked_at(entry, name)
            except OSError as problem:
                raise SourceFileError(self.url, folder, problem.strerror or str(problem)) from problem

    def _looked_at(self, entry: os.DirEntry[str], name: str) -> tuple[int, int]:
        if entry.is_symlink():
            target = Path(entry.path).resolve()
            if not target.is_relative_to(self._root.resolve()):
                raise BadKeyError(name, f"it is a link to {target}, outside of the source")
            if target.is_dir():
                raise BadKeyError(name, f"it is a link to the folder {target}")
        try:
            facts = entry.stat()
        except OSError as problem:
            raise SourceFileError(self.url, name, problem.strerror or str(problem)) from problem
        if not stat.S_ISREG(facts.st_mode):
            raise BadKeyError(name, "it is neither a file nor a folder")
        return facts.st_size, facts.st_mtime_ns

    @override
    def read(self, key: str, size: int) -> bytes:
        # One byte more than expected, so that a file that grew is noticed.
        data = self._read(key, 0, size + 1)
        _checked_size(self.url, key, size, len(data))
        return data

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._read(key, start, length)
        _checked_size(self.url, key, start + length, start + len(data))
        return data

    def _read(self, key: str, start: int, length: int) -> bytes:
        try:
            # O_NONBLOCK: what was a file when it was listed may be a pipe by now.
            descriptor = os.open(self._prefix + key, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                data = os.pread(descriptor, length, start)
                while len(data) < length:
                    more = os.pread(descriptor, length - len(data), start + len(data))
                    if not more:
                        break
                    data += more
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise SourceFileError(self.url, key, problem.strerror or str(problem)) from problem
        return data


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

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        prefix = f"{self._root}/" if self._root else ""
        found: dict[str, dict[str, Any]] = self._fs.find(self._root, withdirs=False, detail=True)
        for path, facts in found.items():
            # An object store's marker of a folder is an object of no bytes whose name ends in a slash.
            if not path.endswith("/"):
                yield path.removeprefix(prefix).lstrip("/"), facts

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
        try:
            found = list(self._entries())
        except Exception as error:
            raise self._unreachable(error) from error
        if not found:
            raise SourceError(self.url, "the folder holds no files")
        names = keys.checked_keys(name for name, _ in found)
        facts = dict(found)
        sizes = [facts[name].get("size") for name in names]
        for name, size in zip(names, sizes, strict=True):
            if size is None:
                raise SourceFileError(self.url, name, "the server does not say how long it is")
        marks = np.array([_mark(facts[name]) for name in names], np.uint64)
        return Listing(names, np.array(sizes, np.int64), marks, marked=bool(marks.all()))

    @override
    def read(self, key: str, size: int) -> bytes:
        data = self._cat(key)
        _checked_size(self.url, key, size, len(data))
        return data

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._cat(key, start=start, end=start + length)
        _checked_size(self.url, key, start + length, start + len(data))
        return data

    def _cat(self, key: str, **extent: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{key}", **extent)
        except Exception as problem:
            raise SourceFileError(self.url, key, f"{type(problem).__name__}: {problem}") from problem
        return data


def _mark(facts: dict[str, Any]) -> int:
    said = [f"{name}={facts[name]}" for name in _CHANGE_MARKS if facts.get(name) is not None]
    return xxhash.xxh3_64_intdigest(";".join(said).encode()) if said else 0
