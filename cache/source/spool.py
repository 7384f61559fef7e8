"""What a Python iterable gave, as a source: written to one file as it comes, in any order, and read back by key.

Nothing can be read from such a source again once it is packed, and no other node can read it.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import NameCollector, checked_key
from deeplink.cache.source.source import EVERYTHING, ITERABLE, Listing, Source, check_size
from deeplink.cache.source.tables import as_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from deeplink.cache.source.selection import Selection

_AT_ONCE = 4096


def spent() -> SourceError:
    """Return why nothing can be read from such a source any more."""
    return SourceError(
        ITERABLE,
        "a Python iterable was packed, which cannot be read again",
        "Its only copies are at nodes that hold its shards and in its packed home: start those, or pack again.",
    )


class SpooledSource(Source):
    """Samples of an iterable. Use `with`: the file, in `folder`, is gone at its end."""

    local = True
    elsewhere = False
    url = ITERABLE

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is closed by `with`
        self._listing: Listing | None = None
        self._places = np.empty(0, np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, items: Iterable[tuple[str, Any]]) -> None:
        """Write down all samples: pairs of a key and its bytes, or of a key and its parts by name.

        A part is called `key.name`. Bytes and text are taken as they are, a mapping's `bytes` too, None as no
        part, all else as JSON.

        Raises:
            SourceError: a key cannot be one, or comes twice.
        """
        found, at = NameCollector(), 0
        keys: list[str] = []
        sizes: list[int] = []
        places: list[int] = []
        for key, value in items:
            for name, data in _parts(key, value):
                keys.append(checked_key(name))
                places.append(at)
                sizes.append(len(data))
                at += self._file.write(data)
            if len(keys) >= _AT_ONCE:
                found.add("", keys, sizes, places)
                keys, sizes, places = [], [], []
        found.add("", keys, sizes, places)
        self._file.flush()
        if not found:
            raise SourceError(self.url, "it gave no samples", "It has to give pairs: (key, bytes).")
        # The places are sorted with the keys, as change marks are.
        names, sizes_of, self._places = found.finished()
        self._listing = Listing(names, sizes_of, np.zeros(len(names), np.uint64), marked=False)

    @override
    def check(self) -> None:
        return

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        if self._listing is None:
            raise SourceError(self.url, "nothing was taken from it yet", "Call `take` first.")
        return self._listing

    @override
    def stat(self, key: str) -> tuple[int, int]:
        return int(self.listing().sizes[self._row(key)]), 0

    def _row(self, key: str) -> int:
        names = self.listing().keys
        row = bisect_left(names, key.encode(), key=str.encode)
        if row == len(names) or names[row] != key:
            raise SourceError.unreadable(self.url, key, "the iterable gave no such sample")
        return row

    @override
    def read(self, key: str, size: int) -> bytes:
        row = self._row(key)
        check_size(self.url, key, size, int(self.listing().sizes[row]))
        return self._part(key, int(self._places[row]), size)

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        row = self._row(key)
        length = max(min(length, int(self.listing().sizes[row]) - start), 0)
        return self._part(key, int(self._places[row]) + start, length)

    def _part(self, key: str, start: int, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:  # one call gives less than 2 GiB (read(2))
            if not (more := os.pread(self._file.fileno(), size - len(found), start + len(found))):
                raise SourceError.unreadable(self.url, key, "its file ends too soon")
            found += more
        return bytes(found)


def _parts(key: str, value: Any) -> Iterator[tuple[str, bytes]]:
    if not isinstance(value, Mapping):
        value, stem = {"": value}, key
    else:
        stem = f"{key}."
    for name, part in value.items():
        data = part.get("bytes") if isinstance(part, Mapping) and "bytes" in part else part
        if data is None:
            continue
        if isinstance(data, str):
            data = data.encode()
        try:
            yield stem + name, bytes(data) if isinstance(data, bytes | bytearray | memoryview) else as_json(data)
        except (TypeError, ValueError) as problem:
            what = f"{stem}{name} is a {type(data).__name__}, of which no bytes are known"
            remedy = "Give bytes (an array's .tobytes(), an image's file), text, numbers, lists or mappings."
            raise SourceError(ITERABLE, what, remedy, key=key) from problem
