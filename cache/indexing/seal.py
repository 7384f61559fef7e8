"""The seal of an index file: checksums of all of it, and what it takes to restore one part of it that was damaged.

An Arrow file ends with a footer that says where everything is; the seal stands before that footer, where other
readers of Arrow files do not look. In order:

    parity     the exclusive or of all chunks (256 KiB each, the last one shorter) of what stands before the seal
    footer     a copy of it
    list       u64 checksum of each chunk; u64 each: checksum of the footer, bytes before the seal, how many of
               them a reader checks when it opens the file, bytes of the footer, number of chunks; u64 checksum of
               the list so far; `DLSEAL1` and a line feed
    list       once more

All checksums are xxh3-64, numbers are little endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

CHUNK = 1 << 18
_MAGIC = b"DLSEAL1\n"
_FIELDS = struct.Struct("<QQQQQ")
_CHECKSUM = struct.Struct("<Q")
_ARROW_END = struct.Struct("<i6s")
"""An Arrow file's last bytes: how long its footer is, and `ARROW1`."""
_LISTS = 2
_LOOKED_AT = (1 << 16, 1 << 23)
"""Of the file's end, for the lists: the second takes in those of the largest index."""


def append_seal(path: Path, checked: int) -> None:
    """Put a seal into an Arrow file that has just been written.

    Args:
        path: the file.
        checked: how many of its first bytes a reader is to check when it opens it.

    Raises:
        OSError: the file cannot be read or written.
    """
    with path.open("r+b") as file:
        file.seek(-_ARROW_END.size, 2)
        length, _ = _ARROW_END.unpack(file.read(_ARROW_END.size))
        start = file.seek(-_ARROW_END.size - length, 2)
        footer = file.read()
        file.seek(0)
        checksums, parity = [], np.zeros(min(CHUNK, start), np.uint8)
        for at in range(0, start, CHUNK):
            chunk = file.read(min(CHUNK, start - at))
            checksums.append(block.checksum(chunk))
            parity[: len(chunk)] ^= np.frombuffer(chunk, np.uint8)
        fields = (block.checksum(footer), start, checked, len(footer), len(checksums))
        listed = np.array(checksums, "<u8").tobytes() + _FIELDS.pack(*fields)
        listed += _CHECKSUM.pack(block.checksum(listed)) + _MAGIC
        file.seek(start)
        file.write(parity.tobytes() + footer + listed * _LISTS + footer)


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """What the seal of a mapped file says.

    Attributes:
        data: the whole file.
        checksums: uint64, of each chunk.
        footer_checksum: of the footer.
        covered: bytes before the seal.
        checked: how many of them are to be checked when the file is opened.
        footer: bytes of the footer.
    """

    data: memoryview
    checksums: np.ndarray
    footer_checksum: int
    covered: int
    checked: int
    footer: int

    @classmethod
    def find(cls, data: memoryview) -> Seal | None:
        """Return the seal of a file; None where there is none, or no whole one."""
        for size in _LOOKED_AT:
            tail = bytes(data[-size:])
            at = tail.rfind(_MAGIC)
            for _ in range(_LISTS):
                found = cls._parsed(data, len(data) - len(tail) + at) if at >= 0 else None
                if found is not None:
                    return found
                at = tail.rfind(_MAGIC, 0, max(at, 0))
        return None

    @classmethod
    def _parsed(cls, data: memoryview, magic: int) -> Seal | None:
        end = magic - _CHECKSUM.size
        if end < _FIELDS.size:
            return None
        footer, covered, checked, footer_bytes, count = _FIELDS.unpack(data[end - _FIELDS.size : end])
        start = end - _FIELDS.size - 8 * count
        if start < 0 or block.checksum(data[start:end]) != _CHECKSUM.unpack(data[end:magic])[0]:
            return None
        checksums = np.frombuffer(data[start : end - _FIELDS.size], "<u8")
        seal = cls(data, checksums, footer, covered, checked, footer_bytes)
        return seal if len(data) == seal.file_bytes else None

    @property
    def file_bytes(self) -> int:
        """How many bytes the file has to have."""
        listed = 8 * len(self.checksums) + _FIELDS.size + _CHECKSUM.size + len(_MAGIC)
        return self.covered + min(CHUNK, self.covered) + 2 * self.footer + _LISTS * listed

    def _span(self, number: int) -> tuple[int, int]:
        return number * CHUNK, min((number + 1) * CHUNK, self.covered)

    def chunks(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """Return the numbers of the chunks that hold bytes of `spans`, (start, stop) each, sorted."""
        return sorted(
            {
                number
                for start, stop in spans
                for number in range(start // CHUNK, -(-min(stop, self.covered) // CHUNK))
            }
        )

    def is_whole(self, number: int) -> bool:
        """Tell whether a chunk is what was written."""
        start, stop = self._span(number)
        return bool(block.checksum(self.data[start:stop]) == self.checksums[number])

    def is_footer_whole(self) -> bool:
        """Tell whether the file ends with the footer it was written with."""
        return block.checksum(self.data[-self.footer :]) == self.footer_checksum

    def restore(self, number: int, write: Callable[[int, bytes], None]) -> bool:
        """Write what chunk `number` was, if it is the only damaged one; False, with nothing written, if not.

        Args:
            number: which.
            write: is given where, and what.
        """
        start, stop = self._span(number)
        whole = np.zeros(min(CHUNK, self.covered), np.uint8)
        for other in range(len(self.checksums)):
            a, b = self._span(other)
            if other != number:
                whole[: b - a] ^= np.frombuffer(self.data[a:b], np.uint8)
        whole ^= np.frombuffer(self.data[self.covered : self.covered + len(whole)], np.uint8)
        restored = whole[: stop - start].tobytes()
        if block.checksum(restored) != self.checksums[number]:
            return False
        write(start, restored)
        return True

    def restore_footer(self, write: Callable[[int, bytes], None]) -> bool:
        """Write what the footer was, from its copy; False where that is damaged, too."""
        start = self.covered + min(CHUNK, self.covered)
        copy = bytes(self.data[start : start + self.footer])
        if block.checksum(copy) != self.footer_checksum:
            return False
        write(len(self.data) - self.footer, copy)
        return True
