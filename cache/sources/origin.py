"""What a source of small files is: a listing of its files, and ways to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deeplink.cache.errors import SourceChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from deeplink.cache.names import NameCollector, Names

Entry = tuple[str, int, int]
"""A file's name, size and change mark; or a folder's name, which ends in a slash, and two zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of a source as they were listed, sorted by key.

    Attributes:
        keys: their paths below the root.
        sizes: int64, bytes.
        marks: uint64, changes when a file does (from modification time or entity tag); 0 where there is none.
        marked: whether every file has a mark, so that an unchanged listing means unchanged files.
    """

    keys: Names
    sizes: np.ndarray
    marks: np.ndarray
    marked: bool

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, found: NameCollector) -> Listing:
        """Return what was gathered.

        Raises:
            KeyCollisionError: two names collide.
        """
        names, sizes, marks = found.finished()
        return cls(names, sizes, marks, marked=bool(marks.all()))


class Source(Protocol):
    """A root below which the small files are. Reading is safe from several threads.

    Attributes:
        url: the root.
        local: a folder of this machine's file systems, whose files are opened in microseconds when warm.
        batched: `read_many` has many requests under way at once.
    """

    url: str
    local: bool
    batched: bool = False

    def check(self) -> None:
        """Look whether there is a folder at all, without listing it.

        Raises:
            SourceError: the root is missing, no folder, or cannot be reached.
        """
        ...

    def listing(self) -> Listing:
        """Return all files, sorted by key; one pass over the source, in 30 bytes of memory a file besides names.

        Raises:
            SourceError: the root is missing, no folder, or empty.
            SourceFileError: an entry is no file, or cannot be looked at.
            BadKeyError: a file's name cannot be a key.
            KeyCollisionError: two names collide.
        """
        ...

    def mark(self, key: str) -> int:
        """Return a file's change mark as it is now; 0 where there is none.

        Raises:
            SourceFileError: it cannot be looked at.
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

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Return the bytes of some files, in order.

        Raises:
            SourceFileError: one cannot be read.
            SourceChangedError: one is not of its size.
        """
        return [self.read(name, size) for name, size in zip(names, sizes, strict=True)]

    def fill(self, names: Names, sizes: Sequence[int], into: memoryview) -> None:
        """Read some files one after another into `into`, which has a byte more than they have.

        Raises:
            SourceFileError: one cannot be read.
            SourceChangedError: one is not of its size.
        """
        at = 0
        for name, size in zip(names, sizes, strict=True):
            into[at : at + size] = self.read(name, size)
            at += size


def check_size(url: str, key: str, size: int, found: int) -> None:
    """Return if a file has the size it was listed with.

    Raises:
        SourceChangedError: it has another.
    """
    if found != size:
        more = "more than " if found > size else ""
        raise SourceChangedError(url, key, f"{more}{min(found, size):,} bytes where {size:,} were listed")


def walk(entries: Callable[[str], Sequence[Entry]], found: NameCollector) -> None:
    """Gather all files below a root, folder by folder, in the order of the keys' bytes.

    Args:
        entries: what is directly in a folder (`""` or a path that ends in a slash), in any order; called once for
            each folder.
        found: where the files go.
    """
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
