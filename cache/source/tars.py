"""What is in a tar, WebDataset's way: where each file's bytes begin in it. Nothing is unpacked."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.source.containers import ContainerFile, FileRanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.cache.source.source import Source

SUFFIX = ".tar"
_BUFFER_HERE, _BUFFER_AWAY = 64 << 10, 8 << 20
"""Read at once when a tar is looked through: where requests take long, samples are read along with their heads."""
_GAP = 64 << 10
"""Samples closer than this are read at once, and what is between them is thrown away."""
_MOST_AT_ONCE = 16 << 20
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
"""How files of gzip, bzip2, xz, zstd and lz4 begin."""
_EACH_BYTES = 200
"""Of memory, a sample, about."""

Extent = tuple[int, int]
"""Where a file's bytes begin in a tar, and how many there are."""


class TarContainer(ContainerFile):
    """The files in one uncompressed tar."""

    def __init__(self, files: Source, name: str, size: int) -> None:
        self._files, self._name = files, name
        self._extents: dict[str, Extent] = {}
        self._bad: list[tuple[str, SourceError]] = []
        buffer = io.BufferedReader(FileRanges(files, name, size), _BUFFER_HERE if files.local else _BUFFER_AWAY)
        try:
            with tarfile.open(fileobj=buffer, mode="r:") as archive:
                for entry in archive:
                    self._take(entry, size)
                    archive.members.clear()  # type: ignore[attr-defined]  # it keeps each, with all its fields, for ever
        except tarfile.TarError as problem:
            what, remedy = f"is no tar: {problem}", "It must be a tar that is not compressed."
            if isinstance(problem, tarfile.ReadError) and "unexpected end" in str(problem):
                what, remedy = f"is cut short: it ends at {size:,} bytes, within a file", "Fetch it again."
            elif not size:
                what = "is empty"
            elif files.read_range(name, 0, min(size, 6)).startswith(_COMPRESSED):
                what, remedy = "is compressed: its files cannot be read one by one", "Decompress it."
            raise SourceError(files.url, f"{name!r} {what}", remedy, key=name) from problem

    def _take(self, entry: tarfile.TarInfo, size: int) -> None:
        path = entry.name.removeprefix("./")
        if entry.isdir():
            return
        extent = (entry.offset_data, entry.size)
        problem = ""
        if entry.islnk() and entry.linkname.removeprefix("./") in self._extents:
            extent = self._extents[entry.linkname.removeprefix("./")]
        elif not entry.isreg() or entry.issparse():
            problem = "it is no plain file, nor a hard link to one before it"
        elif sum(extent) > size:
            problem = "the tar ends within it"
        elif path in self._extents:
            problem = "it is there twice"
        if problem:
            self._bad.append((path, SourceError.bad_key(f"{self._name}/{path}", problem)))
        else:
            self._extents[path] = extent

    @property
    @override
    def held_bytes(self) -> int:
        return _EACH_BYTES * len(self._extents)

    @override
    def entries(self) -> Iterable[tuple[str, int | SourceError]]:
        yield from ((path, size) for path, (_, size) in self._extents.items())
        yield from self._bad

    @override
    def size(self, name: str) -> int:
        return self._extents[name][1]

    @override
    def read_range(self, name: str, start: int, length: int) -> bytes:
        first, size = self._extents[name]
        return self._files.read_range(self._name, first + start, min(length, max(size - start, 0)))

    @override
    def read(self, names: Sequence[str]) -> list[bytes]:
        extents = [self._extents[name] for name in names]
        found = [b""] * len(names)
        for start, stop, rows in _runs(extents):
            data = self._files.read_range(self._name, start, stop - start)
            for row in rows:
                first, size = extents[row]
                found[row] = data[first - start : first - start + size]
        return found


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield which parts of the tar to read, and the extents' numbers in each; one alone may be of any length."""
    start = stop = 0
    rows: list[int] = []
    for row in sorted(range(len(extents)), key=extents.__getitem__):
        first, size = extents[row]
        if rows and (first - stop > _GAP or first + size - start > _MOST_AT_ONCE):
            yield start, stop, rows
            rows = []
        if not rows:
            start = stop = first
        rows.append(row)
        stop = max(stop, first + size)
    if rows:
        yield start, stop, rows
