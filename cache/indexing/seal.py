"""The seal of an index file: checksums of all of it, and what it takes to restore parts of it that were damaged.

An Arrow file ends with a footer that says where everything is; the seal stands before that footer, where other
readers of Arrow files do not look. In order:

    parities   What stands before the seal is cut into chunks, the last one shorter. Where there are n parities,
               the first is the exclusive or of the first chunk and every n-th from it on, and so on.
    footer     a copy of it
    list       u64 checksum of each chunk; u64 each: checksum of the footer, bytes before the seal, how many of
               them a reader checks when it opens the file, bytes of the footer, bytes of a chunk, number of
               parities; u64 checksum of the list so far; `DLSEAL2` and a line feed
    list       once more

All checksums are xxh3-64, numbers are little endian. In place of the last two numbers `DLSEAL1` has the number of
chunks: they are of 256 KiB there, and have one parity.
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

_SMALLEST, _LARGEST = 1 << 12, 1 << 18
_IN_A_PARITY = 128
_MAGIC, _MAGIC_1 = b"DLSEAL2\n", b"DLSEAL1\n"
_FIELDS, _FIELDS_1 = struct.Struct("<QQQQQQ"), struct.Struct("<QQQQQ")
_CHECKSUM = struct.Struct("<Q")
_ARROW_END = struct.Struct("<i6s")
"""An Arrow file's last bytes: how long its footer is, and `ARROW1`."""
_LISTS = 2
_LOOKED_AT = (1 << 16, 1 << 23)
"""Of the file's end, for the lists: the second takes in those of the largest index."""


def chunk_size(covered: int) -> int:
    """Return how large the chunks of so many bytes are made: so that they and the lists of them are both small.

    Each has 16 bytes in the lists, and two of them at least are parities.

    >>> [chunk_size(covered) for covered in (0, 1 << 20, 1 << 28, 1 << 40)]
    [4096, 4096, 65536, 262144]
    """
    size = _SMALLEST
    while size < _LARGEST and size * size < 8 * covered:
        size *= 2
    return size


def parities_of(count: int) -> int:
    """Return how many parities so many chunks have: at least two, so that damage across a border is restored.

    >>> [parities_of(count) for count in (1, 2, 200, 5000)]
    [1, 2, 2, 40]
    """
    return min(count, max(2, -(-count // _IN_A_PARITY)))


def append_seal(path: Path, checked: int, behind: bytes | memoryview = b"") -> None:
    """Put a seal into an Arrow file that has just been written.

    Args:
        path: the file.
        checked: how many of its first bytes a reader is to check when it opens it.
        behind: what to put behind its columns, and to cover.

    Raises:
        OSError: the file cannot be read or written.
    """
    with path.open("r+b") as file:
        file.seek(-_ARROW_END.size, 2)
        length, _ = _ARROW_END.unpack(file.read(_ARROW_END.size))
        start = file.seek(-_ARROW_END.size - length, 2)
        footer = file.read()
        file.seek(start)
        file.write(behind)
        covered = file.tell()
        file.seek(0)
        size = chunk_size(covered)
        count = -(-covered // size)
        checksums, parities = [], np.zeros((parities_of(count), min(size, covered)), np.uint8)
        for number in range(count):
            chunk = file.read(min(size, covered - number * size))
            checksums.append(block.checksum(chunk))
            parities[number % len(parities), : len(chunk)] ^= np.frombuffer(chunk, np.uint8)
        fields = (block.checksum(footer), covered, checked, len(footer), size, len(parities))
        listed = np.array(checksums, "<u8").tobytes() + _FIELDS.pack(*fields)
        listed += _CHECKSUM.pack(block.checksum(listed)) + _MAGIC
        file.seek(covered)
        file.write(parities.tobytes() + footer + listed * _LISTS + footer)


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
        chunk: bytes of a chunk.
        parities: how many there are, at most one of a chunk each.
        listed: bytes of a list.
    """

    data: memoryview
    checksums: np.ndarray
    footer_checksum: int
    covered: int
    checked: int
    footer: int
    chunk: int
    parities: int
    listed: int

    @classmethod
    def find(cls, data: memoryview) -> Seal | None:
        """Return the seal of a file; None where there is none, or no whole one."""
        for size in _LOOKED_AT:
            tail = bytes(data[-size:])
            # With its line feed: what an index says of itself, in JSON behind the lists, may hold the word.
            for magic in (_MAGIC, _MAGIC_1):
                at = len(tail)
                for _ in range(_LISTS):
                    at = tail.rfind(magic, 0, at)
                    if at < 0:
                        break
                    found = cls._parsed(data, len(data) - len(tail) + at)
                    if found is not None:
                        return found
        return None

    @classmethod
    def _parsed(cls, data: memoryview, magic: int) -> Seal | None:
        stop = magic + len(_MAGIC)
        fields = {_MAGIC: _FIELDS, _MAGIC_1: _FIELDS_1}.get(bytes(data[magic:stop]))
        end = magic - _CHECKSUM.size
        if fields is None or end < fields.size:
            return None
        at = end - fields.size
        footer, covered, checked, footer_bytes, *rest = fields.unpack(data[at:end])
        chunk, parities = rest if fields is _FIELDS else (_LARGEST, 1)
        if not chunk or not parities:
            return None
        start = at - 8 * -(-covered // chunk)
        if start < 0 or block.checksum(data[start:end]) != _CHECKSUM.unpack(data[end:magic])[0]:
            return None
        checksums = np.frombuffer(data[start:at], "<u8")
        seal = cls(data, checksums, footer, covered, checked, footer_bytes, chunk, parities, stop - start)
        return seal if len(data) == seal.file_bytes else None

    @property
    def file_bytes(self) -> int:
        """How many bytes the file has to have."""
        return self._parity(self.parities) + 2 * self.footer + _LISTS * self.listed

    def _parity(self, number: int) -> int:
        """Return where a parity begins; behind the last one the copy of the footer."""
        return self.covered + number * min(self.chunk, self.covered)

    def _span(self, number: int) -> tuple[int, int]:
        return number * self.chunk, min((number + 1) * self.chunk, self.covered)

    def chunks(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """Return the numbers of the chunks that hold bytes of `spans`, (start, stop) each, sorted."""
        return sorted(
            {
                number
                for start, stop in spans
                for number in range(start // self.chunk, -(-min(stop, self.covered) // self.chunk))
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
        """Write what chunk `number` was, if no other of its parity is damaged; False, with nothing written, if so.

        Args:
            number: which.
            write: is given where, and what.
        """
        start, stop = self._span(number)
        mine = number % self.parities
        whole = np.frombuffer(self.data[self._parity(mine) : self._parity(mine + 1)], np.uint8).copy()
        for other in range(mine, len(self.checksums), self.parities):
            a, b = self._span(other)
            if other != number:
                whole[: b - a] ^= np.frombuffer(self.data[a:b], np.uint8)
        restored = whole[: stop - start].tobytes()
        if block.checksum(restored) != self.checksums[number]:
            return False
        write(start, restored)
        return True

    def restore_footer(self, write: Callable[[int, bytes], None]) -> bool:
        """Write what the footer was, from its copy; False where that is damaged, too."""
        start = self._parity(self.parities)
        copy = bytes(self.data[start : start + self.footer])
        if block.checksum(copy) != self.footer_checksum:
            return False
        write(len(self.data) - self.footer, copy)
        return True
