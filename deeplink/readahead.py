"""Samples of a list of paths that are taken one by one, and read many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.library import DatasetNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.library import Library

_BATCH_BYTES, _BATCH_SAMPLES = 32 << 20, 256


class ReadAhead:
    """Reads the next samples of a list along with the one that is wanted. For one thread.

    Args:
        library: where they are.
        paths: in the order in which they will be taken; folders and what is not there are passed over.
    """

    def __init__(self, library: Library, paths: Sequence[str]) -> None:
        self._library, self._paths = library, paths
        self._position = {path: position for position, path in enumerate(paths)}
        self._read: dict[str, memoryview | OSError] = {}

    def take(self, path: str) -> memoryview:
        """Return a sample's bytes, and forget them.

        Raises:
            NotThereError, IsFolderError, NotReadError: as `Library.read`.
        """
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
