"""The small files' source: a folder, read with plain system calls, or whatever fsspec reaches."""

from __future__ import annotations

import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import xxhash
from typing_extensions import override

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.format.names import NameCollector, checked_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from deeplink.cache.format.names import Names

Entry = tuple[str, int, int]
"""A file's name, size and change mark; or a folder's name, which ends in a slash, and two zeros."""

# O_NONBLOCK: what was a file when it was listed may be a pipe by now.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MARK = (1 << 64) - 1  # times before 1970 are negative
_AT_ONCE = 1 << 16
"""Files of one folder that are held, and sorted, as Python's objects."""
_LISTED_AHEAD = 16
_ASKED_AT_ONCE = 16
_KINDS = ("s3", "gs", "abfs", "https", "sftp", "ftp", "hdfs", "hf", "zip", "tar")
_DRIVERS = ("s3fs", "gcsfs", "adlfs", "requests", "aiohttp", "paramiko", "huggingface_hub", "smbprotocol", "ocifs")
"""Packages of kinds that fsspec has no driver of its own for, as its errors name them."""
_CHANGE_MARKS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created", "md5Hash", "crc")


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of a source as they were listed, sorted by key."""

    keys: Names  # their paths below the root
    sizes: np.ndarray  # int64, bytes
    marks: np.ndarray  # uint64, of modification time or entity tag: changes when a file does; 0 for none
    marked: bool  # whether every file has a mark, so that an unchanged listing means unchanged files

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, url: str, found: NameCollector, *, marked: bool = False) -> Listing:
        """Return the files gathered at `url`; `marked`: each is known to have a mark, even where that is 0."""
        if not found:
            raise SourceError(url, "the folder holds no files")
        names, sizes, marks = found.finished()
        return cls(names, sizes, marks, marked=marked or bool(marks.all()))


class Source(Protocol):
    """A root below which the small files are. Reading is safe from several threads."""

    url: str
    local: bool  # a folder of this machine's file systems, whose files are opened in microseconds when warm
    batched: bool = False  # `read_many` has many requests under way at once

    def check(self) -> None:
        """Look whether there is a folder at all, without listing it."""
        ...

    def listing(self) -> Listing:
        """Return all files, sorted by key; one pass, 30 bytes of memory a file besides names."""
        ...

    def mark(self, key: str) -> int:
        """Return a file's change mark as it is now; 0 where there is none."""
        ...

    def read(self, key: str, size: int) -> bytes:
        """Return a file's bytes, which must be `size`."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from `start`."""
        ...

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Return the bytes of some files, in order."""
        return [self.read(name, size) for name, size in zip(names, sizes, strict=True)]

    def fill(self, names: Names, sizes: Sequence[int], into: memoryview) -> None:
        """Read some files one after another into `into`, which has a byte more than they have."""
        at = 0
        for name, size in zip(names, sizes, strict=True):
            into[at : at + size] = self.read(name, size)
            at += size


def check_size(url: str, key: str, size: int, found: int) -> None:
    """Return if a file has the size it was listed with."""
    if found != size:
        more = "more than " if found > size else ""
        raise SourceChangedError(url, key, f"{more}{min(found, size):,} bytes where {size:,} were listed")


def walk(entries: Callable[[str], Sequence[Entry]], found: NameCollector) -> None:
    """Gather all files below a root, folder by folder, in the order of the keys' bytes."""
    # A folder counts with its slash, so the order within each folder gives that of all keys.
    stack: list[tuple[str, Iterator[Entry]]] = [("", iter(sorted(entries(""))))]
    while stack:
        folder, rest = stack[-1]
        names: list[str] = []
        sizes: list[int] = []
        marks: list[int] = []
        deeper = ""
        for name, size, mark in rest:
            if name.endswith("/"):
                deeper = folder + name
                break
            names.append(name)
            sizes.append(size)
            marks.append(mark)
        found.add(folder, names, sizes, marks)
        if deeper:
            stack.append((deeper, iter(sorted(entries(deeper)))))
        else:
            stack.pop()


def open_source(url: str) -> Source:
    """Return the source a local path or a URL names; nothing is read yet."""
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


class LocalSource(Source):
    """A folder of this machine's file systems."""

    local = True

    def __init__(self, path: str) -> None:
        self._root = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links in the path as the user wrote them
        self._prefix = str(self._root).rstrip("/") + "/"
        self.url = str(self._root)

    def _failed(self, key: str, problem: OSError) -> SourceError:
        return SourceError.unreadable(self.url, key, problem.strerror or str(problem))

    @override
    def check(self) -> None:
        if not self._root.is_dir():
            problem = "it is not a folder" if self._root.exists() else "there is no such folder"
            raise SourceError(self.url, problem)

    @override
    def listing(self) -> Listing:
        self.check()
        found = NameCollector()
        walk(lambda folder: self._entries(folder, found), found)
        return Listing.of(self.url, found, marked=True)

    def _entries(self, folder: str, found: NameCollector) -> list[Entry]:
        """Return what is in a folder; where that is very much, all but the last files go straight to `found`."""
        folders: list[Entry] = []
        files: list[Entry] = []
        try:
            descriptor = os.open(self._prefix + folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By descriptor: the files are then looked at without walking the path again.
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        if entry.is_file(follow_symlinks=False):
                            facts = entry.stat(follow_symlinks=False)
                            files.append((entry.name, facts.st_size, facts.st_mtime_ns & _MARK))
                        elif entry.is_dir(follow_symlinks=False):
                            folders.append((f"{entry.name}/", 0, 0))
                        else:
                            files.append((entry.name, *self._looked_at(folder + entry.name)))
                        if len(files) >= _AT_ONCE:
                            _hand_over(folder, files, found)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise self._failed(folder, problem) from problem
        return folders + files

    def _looked_at(self, name: str) -> tuple[int, int]:
        path = Path(self._prefix + name)
        if path.is_symlink():
            target = path.resolve()
            if not target.is_relative_to(self._root.resolve()):
                raise SourceError.bad_key(name, f"it is a link to {target}, outside of the source")
            if target.is_dir():
                raise SourceError.bad_key(name, f"it is a link to the folder {target}")
        try:
            facts = path.stat()
        except OSError as problem:
            raise self._failed(name, problem) from problem
        if not stat.S_ISREG(facts.st_mode):
            raise SourceError.bad_key(name, "it is neither a file nor a folder")
        return facts.st_size, facts.st_mtime_ns & _MARK

    @override
    def mark(self, key: str) -> int:
        try:
            return os.stat(self._prefix + key).st_mtime_ns & _MARK  # noqa: PTH116 - a path object costs more than the call
        except OSError as problem:
            raise self._failed(key, problem) from problem

    @override
    def read(self, key: str, size: int) -> bytes:
        # One byte more than expected, so that a file that grew is noticed.
        data = self._read(key, 0, size + 1)
        check_size(self.url, key, size, len(data))
        return data

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._read(key, start, length)
        check_size(self.url, key, start + length, start + len(data))
        return data

    def _read(self, key: str, start: int, length: int) -> bytes:
        try:
            descriptor = os.open(self._prefix + key, _FLAGS)
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
            raise self._failed(key, problem) from problem
        return data

    @override
    def fill(self, names: Names, sizes: Sequence[int], into: memoryview) -> None:
        # The hot loop of packing. Opening by a descriptor of the folder spares the walk along the path, a tenth.
        prefix = os.fsencode(self._prefix)
        opened, read, close = os.open, os.readv, os.close
        known, place, at, key = None, -1, 0, b""
        try:
            for key, size in zip(names.raw(), sizes, strict=True):
                cut = key.rfind(b"/") + 1
                if key[:cut] != known:
                    if place >= 0:
                        close(place)
                        place = -1
                    known = key[:cut]
                    place = opened(prefix + known, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                descriptor = opened(key[cut:], _FLAGS, dir_fd=place)
                try:
                    # One byte more than expected shows that a file grew; the next file overwrites it.
                    found = read(descriptor, (into[at : at + size + 1],))
                    if found != size:
                        self._fill_rest(descriptor, key, into[at : at + size + 1], found)
                finally:
                    close(descriptor)
                at += size
        except OSError as problem:
            raise self._failed(os.fsdecode(key), problem) from problem
        finally:
            if place >= 0:
                close(place)

    def _fill_rest(self, descriptor: int, key: bytes, into: memoryview, found: int) -> None:
        """Read on: a read may give less than there is; only one that gives nothing says that this is all."""
        while found < len(into):
            more = os.readv(descriptor, (into[found:],))
            if not more:
                break
            found += more
        check_size(self.url, os.fsdecode(key), len(into) - 1, found)


def _hand_over(folder: str, files: list[Entry], found: NameCollector) -> None:
    names, sizes, marks = zip(*files, strict=True)
    found.add(folder, names, sizes, marks)
    files.clear()


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
        import fsspec  # noqa: PLC0415 - fsspec: no agent needs it to start

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

    def _failed(self, key: str, problem: BaseException) -> SourceError:
        return SourceError.unreadable(self.url, key, f"{type(problem).__name__}: {problem}")

    def _unreachable(self, error: Exception) -> SourceError:
        return SourceError(self.url, f"cannot be listed: {error}", "Check the address and rights.")

    @override
    def listing(self) -> Listing:
        from fsspec.archive import AbstractArchiveFileSystem  # noqa: PLC0415 - fsspec: no agent needs it to start

        self.check()
        found = NameCollector()
        if isinstance(self._fs, AbstractArchiveFileSystem):
            # It holds the list of all its files anyway, and goes through all of it for each folder.
            self._gather_all(found)
        else:
            with ListingAhead(self._entries) as entries:
                walk(entries, found)
        return Listing.of(self.url, found)

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
            raise self._failed(key, problem) from problem
        return found

    def _file(self, key: str, facts: dict[str, Any]) -> Entry:
        if facts.get("size") is None:
            raise SourceError.unreadable(self.url, key, "the server does not say how long it is")
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
            raise self._failed(names[0], problem) from problem
        for name, size, data in zip(names, sizes, found, strict=True):
            if isinstance(data, BaseException):
                raise self._failed(name, data) from data
            check_size(self.url, name, size, len(data))
        return list(found)

    def _cat(self, key: str, **extent: int) -> bytes:
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{key}", **extent)
        except Exception as problem:
            raise self._failed(key, problem) from problem
        return data


def _mark(facts: dict[str, Any]) -> int:
    said = [f"{name}={facts[name]}" for name in _CHANGE_MARKS if facts.get(name) is not None]
    return xxhash.xxh3_64_intdigest(";".join(said).encode()) if said else 0
