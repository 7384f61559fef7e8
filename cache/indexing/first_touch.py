"""What is read of an index file without checksums of its own is compared with the file's seal when first read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deeplink.cache.errors import IndexFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.cache.indexing.index_parts import MappedFile
    from deeplink.cache.indexing.seal import Seal

log = logging.getLogger(__name__)


class FirstTouch:
    """Which chunks of a mapped file were found whole. Safe to use from several threads, and across fork.

    A wrong byte in a key is no error by itself: it hides a sample, or makes a class that there is not.

    Args:
        path: of the file.
        file: where damage is put right.
        seal: what it is compared with.

    Attributes:
        unseen: per chunk, 1 until it was compared.
        chunk: bytes of one.
    """

    def __init__(self, path: Path, file: MappedFile, seal: Seal) -> None:
        self._path, self._file, self._seal = path, file, seal
        self.unseen, self.chunk = bytearray(b"\1") * len(seal.checksums), seal.chunk

    def see(self, start: int, stop: int) -> None:
        """Return when the bytes from `start` to before `stop` of the file are what was written.

        Raises:
            IndexFormatError: they are damaged, and cannot be restored.
        """
        if not any(self.unseen[start // self.chunk : -(-stop // self.chunk)]):
            return
        numbers = [number for number in self._seal.chunks([(start, stop)]) if self.unseen[number]]
        self.mend(numbers)
        for number in numbers:
            self.unseen[number] = 0

    def mend(self, numbers: Iterable[int]) -> bool:
        """Restore, in memory, those of some chunks that are damaged; tell whether any was.

        Raises:
            IndexFormatError: one cannot be restored.
        """
        damaged = [number for number in numbers if not self._seal.is_whole(number)]
        for number in damaged:
            start = number * self.chunk
            if not self._seal.restore(number, self._file.write):
                here = f"the {self.chunk:,} bytes from {start:,} on, and others"
                raise IndexFormatError(self._path, f"more is damaged than can be restored: {here}")
            log.warning("index %s: bytes from %d on were damaged and are restored in memory", self._path, start)
        return bool(damaged)
