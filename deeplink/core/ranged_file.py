"""A file whose bytes are fetched by ranges, as Python's raw file objects are read."""

from __future__ import annotations

import errno
import io
import os
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from typing_extensions import Buffer


class RangedFile(io.RawIOBase):
    """A file of `size` bytes, read only; who derives from it says in `fetch` how bytes are had."""

    size: int
    _at = 0

    def fetch(self, start: int, length: int) -> bytes:
        """Return 1 to `length` bytes from `start`, both within the file; `length` is over 0. Fewer are no end.

        Raises:
            OSError: they cannot be had.
        """
        raise NotImplementedError

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}
        if whence not in origins:
            raise ValueError(f"whence is {whence}, not 0, 1 or 2")
        at = offset + origins[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    @override
    def readinto(self, buffer: Buffer) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        with memoryview(buffer).cast("B") as into:
            length = max(min(len(into), self.size - self._at), 0)
            piece = self.fetch(self._at, length) if length else b""
            into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
