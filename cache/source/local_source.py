"""A folder of this machine's file systems as a source, read with plain system calls."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import NameCollector
from deeplink.cache.source.selection import Picker, Selection
from deeplink.cache.source.source import EVERYTHING, Entry, Listing, Source, SourceAccess, check_size, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.format.names import Names

# O_NONBLOCK: what was a file when it was listed may be a pipe by now.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MARK = (1 << 64) - 1  # times before 1970 are negative
_ALL_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_AT_ONCE = 1 << 16
"""Files of one folder that are held, and sorted, as Python's objects."""


class _AccessTally:
    """Who may read all that was seen so far."""

    def __init__(self, access: SourceAccess | None) -> None:
        self._access = access

    def see(self, facts: os.stat_result, *, folder: bool = False) -> None:
        if self._access is not None:
            self._access = self._access.narrowed(facts, folder=folder)

    @override
    def __str__(self) -> str:
        return str(self._access or "")


class LocalSource(Source):
    """A folder of this machine's file systems."""

    local = True

    def __init__(self, path: str) -> None:
        self._root = Path(os.path.abspath(path))  # noqa: PTH100 - keeps links in the path as the user wrote them
        self._prefix = str(self._root).rstrip("/") + "/"
        self.url = str(self._root)

    def _failed(self, key: str, problem: OSError) -> SourceError:
        return SourceError.unreadable(self.url, key, problem.strerror or str(problem))

    def _unread(self, key: str, problem: OSError) -> SourceError:
        is_gone = isinstance(problem, FileNotFoundError)
        return SourceError.gone(self.url, key, str(problem.strerror)) if is_gone else self._failed(key, problem)

    @override
    def check(self) -> None:
        if not self._root.is_dir():
            problem = "it is not a folder" if self._root.exists() else "there is no such folder"
            raise SourceError(self.url, problem)

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        self.check()
        found, picker = NameCollector(), Picker(wanted)
        seen = _AccessTally(SourceAccess.of_folder(self._root))
        walk(lambda folder: self._entries(folder, found, picker, seen), found, picker)
        return Listing.of(self.url, found, picker, marked=True, access=str(seen))

    @override
    def access_of(self, keys: Sequence[str]) -> str:
        try:
            seen = _AccessTally(SourceAccess.of_folder(self._root))
            for key in keys:
                path = Path(self._prefix + key)
                for folder in path.parents[: key.count("/")]:
                    seen.see(folder.stat(), folder=True)
                seen.see(path.stat())
        except OSError:
            return ""
        return str(seen)

    def _entries(self, folder: str, found: NameCollector, picker: Picker, access: _AccessTally) -> list[Entry]:
        """Return what is in a folder; where that is very much, all but the last files go straight to `found`."""
        folders: list[Entry] = []
        files: list[Entry] = []
        try:
            descriptor = os.open(self._prefix + folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                access.see(os.fstat(descriptor), folder=True)
                # By descriptor: the files are then looked at without walking the path again.
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            if picker.enters(folder + entry.name):
                                folders.append((f"{entry.name}/", 0, 0))
                            continue
                        key = folder + entry.name
                        if entry.is_file(follow_symlinks=False):
                            if not picker.takes(key):
                                continue
                            facts = entry.stat(follow_symlinks=False)
                            if self._may_read(key, facts, picker):
                                access.see(facts)
                                files.append((entry.name, facts.st_size, facts.st_mtime_ns & _MARK))
                        elif (seen := self._looked_at(key, picker, access)) is not None:
                            (folders if seen[0].endswith("/") else files).append(seen)
                        if len(files) >= _AT_ONCE:
                            _hand_over(folder, files, found, picker)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise self._failed(folder, problem) from problem
        return folders + files

    def _may_read(self, key: str, facts: os.stat_result, picker: Picker) -> bool:
        # Only the kernel knows (access lists, a squashed root); it is asked where not everybody may read.
        if facts.st_mode & _ALL_READ == _ALL_READ or os.access(self._prefix + key, os.R_OK):
            return True
        picker.refuse(key, self._failed(key, PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
        return False

    def _looked_at(self, key: str, picker: Picker, access: _AccessTally) -> Entry | None:
        """Return what a link, or what is no plain file, leads to; None where that is left out, or bad."""
        path = Path(self._prefix + key)
        is_folder = path.is_dir()
        if not (picker.enters(key) if is_folder else picker.takes(key)):
            return None
        try:
            facts = path.stat()  # first: `resolve` raises a RuntimeError for a link that leads to itself
            if path.is_symlink():
                self._check_link(key, path, picker.wanted, is_folder=is_folder)
        except OSError as problem:
            picker.refuse(key, self._failed(key, problem))
            return None
        except SourceError as problem:
            picker.refuse(key, problem)
            return None
        if is_folder:
            return f"{path.name}/", 0, 0
        if not stat.S_ISREG(facts.st_mode):
            picker.refuse(key, SourceError.bad_key(key, "it is neither a file nor a folder"))
        elif self._may_read(key, facts, picker):
            access.see(facts)
            return path.name, facts.st_size, facts.st_mtime_ns & _MARK
        return None

    def _check_link(self, key: str, path: Path, wanted: Selection, *, is_folder: bool) -> None:
        if wanted.follow_links and not is_folder:
            return
        target = path.resolve()
        if wanted.follow_links:
            # Or in a folder on the way here, which a link led to: two that link to each other have no end.
            way = [self._prefix + key[:at] for at, letter in enumerate(key) if letter == "/"]
            if path.parent.resolve().is_relative_to(target) or any(map(target.samefile, way)):
                raise SourceError.bad_key(key, f"it is a link to {target}, which it lies in")
            return
        if not target.is_relative_to(self._root.resolve()):
            raise SourceError.bad_key(key, f"it is a link to {target}, outside of the source (--follow-links)")
        if is_folder:
            raise SourceError.bad_key(key, f"it is a link to the folder {target} (--follow-links)")

    @override
    def stat(self, key: str) -> tuple[int, int]:
        try:
            facts = os.stat(self._prefix + key)  # noqa: PTH116 - a path object costs more than the call
        except OSError as problem:
            raise self._failed(key, problem) from problem
        return facts.st_size, facts.st_mtime_ns & _MARK

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
            raise self._unread(key, problem) from problem
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
            raise self._unread(os.fsdecode(key), problem) from problem
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


def _hand_over(folder: str, files: list[Entry], found: NameCollector, picker: Picker) -> None:
    names, sizes, marks = zip(*files, strict=True)
    picker.add(found, folder, names, sizes, marks)
    files.clear()
