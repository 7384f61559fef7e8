"""A source that is a folder, read with plain system calls: fsspec's own local one costs several times as much."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.errors import BadKeyError, SourceError, SourceFileError
from deeplink.cache.names import NameCollector
from deeplink.cache.sources.origin import Listing, Source, check_size, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.cache.names import Names
    from deeplink.cache.sources.origin import Entry

# O_NONBLOCK: what was a file when it was listed may be a pipe by now.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MARK = (1 << 64) - 1  # times before 1970 are negative
_AT_ONCE = 1 << 16
"""Files of one folder that are held, and sorted, as Python's objects."""


def refuse_within(source: Source, places: Mapping[str, str]) -> None:
    """Return if none of some folders lies in a source: what is written there would be packed the next time.

    Args:
        source: what is packed.
        places: folders or URLs, by what they are called; an empty one is none.

    Raises:
        SourceError: one does.
    """
    for what, place in places.items():
        folder = place.removeprefix("file://")
        if not (source.local and folder) or "://" in folder:
            continue
        if Path(folder).resolve().is_relative_to(Path(source.url).resolve()):
            problem = f"the {what} {place} lies in it, and would be packed too"
            raise SourceError(source.url, problem, f"Let the {what} lie elsewhere, or pack a folder without it.")


class LocalSource(Source):
    """A folder of this machine's file systems."""

    local = True

    def __init__(self, path: str) -> None:
        self._root = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links in the path as the user wrote them
        self._prefix = str(self._root).rstrip("/") + "/"
        self.url = str(self._root)

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
        if not found:
            raise SourceError(self.url, "the folder holds no files")
        return Listing(*found.finished(), marked=True)

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
            raise SourceFileError(self.url, folder, problem.strerror or str(problem)) from problem
        return folders + files

    def _looked_at(self, name: str) -> tuple[int, int]:
        path = Path(self._prefix + name)
        if path.is_symlink():
            target = path.resolve()
            if not target.is_relative_to(self._root.resolve()):
                raise BadKeyError(name, f"it is a link to {target}, outside of the source")
            if target.is_dir():
                raise BadKeyError(name, f"it is a link to the folder {target}")
        try:
            facts = path.stat()
        except OSError as problem:
            raise SourceFileError(self.url, name, problem.strerror or str(problem)) from problem
        if not stat.S_ISREG(facts.st_mode):
            raise BadKeyError(name, "it is neither a file nor a folder")
        return facts.st_size, facts.st_mtime_ns & _MARK

    @override
    def mark(self, key: str) -> int:
        try:
            return os.stat(self._prefix + key).st_mtime_ns & _MARK  # noqa: PTH116 - a path object costs more than the call
        except OSError as problem:
            raise SourceFileError(self.url, key, problem.strerror or str(problem)) from problem

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
            raise SourceFileError(self.url, key, problem.strerror or str(problem)) from problem
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
            raise SourceFileError(self.url, os.fsdecode(key), problem.strerror or str(problem)) from problem
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
