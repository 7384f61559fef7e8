"""A version of a dataset as folders and files. Pure: what is asked of the index, and how it is arranged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.cache.errors import KeyMissingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.cache.index import Index


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A folder or a sample.

    Attributes:
        path: where it is, from the dataset's root.
        row: the sample's row; -1 for a folder.
    """

    path: str
    row: int = -1

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.row < 0


class DatasetTree:
    """The folders and samples of one version; asks the index anew each time, remembers nothing."""

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
