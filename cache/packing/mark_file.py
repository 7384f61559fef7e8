"""The file of a version's change marks, packed: a few bytes a mark where they are times, and never a wrong mark.

docs/format.md has it to the byte. A run of 65,536 marks is packed by itself and has a checksum of its own, so that
the marks of one shard are had without unpacking those of all. Times of files that follow one another lie near each
other, so each is written less the one before it: most of its bytes are zeros then. The lowest bytes of all stand
together, and so on, so that zlib finds the zeros. Marks that take no less room so, as hashes do, stay as they are.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from deeplink.cache import block

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

RUN = 1 << 16
_MAGIC = b"DLMARKS1"
_HEAD = struct.Struct("<8sQ")
_RUN_HEAD = struct.Struct("<IIQ")
_PLACE = struct.Struct("<QQII")
_PLAIN = 0
_UNITS = (1_000_000_000, 1_000_000, 1_000, 1)
_LEVEL = 6
_SIZE = 8


def write_marks(path: Path, marks: np.ndarray) -> None:
    """Write a file of marks, uint64; takes a few MiB of memory besides them.

    Raises:
        OSError: it cannot be written.
    """
    count = len(marks)
    with path.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, count))
        for number, start in enumerate(range(0, count, RUN)):
            unit, content = _packed(np.asarray(marks[start : start + RUN], np.uint64))
            place = _PLACE.pack(count, number, len(content), unit)
            file.write(_RUN_HEAD.pack(len(content), unit, block.checksum(place + content)) + content)


def read_marks(path: Path, count: int, rows: np.ndarray | None = None) -> np.ndarray:
    """Return marks, uint64, from a file of `count`.

    Args:
        path: the file.
        count: how many it has to hold.
        rows: int64, of which rows; None for all. Only the runs that hold them are unpacked.

    Raises:
        ValueError: the file is damaged, not of so many marks, or no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(_HEAD.size) != _HEAD.pack(_MAGIC, count):
            raise ValueError(f"it does not begin as a file of {count:,} change marks")
        if rows is None:
            found = np.empty(count, np.uint64)
            for number, marks in _runs(file, count, range(-(-count // RUN))):
                found[number * RUN : number * RUN + len(marks)] = marks
            if file.read(1):
                raise ValueError("it goes on behind the last change mark")
            return found
        found, run = np.empty(len(rows), np.uint64), rows // RUN
        for number, marks in _runs(file, count, np.unique(run).tolist()):
            mine = run == number
            found[mine] = marks[rows[mine] % RUN]
        return found


def _runs(file: BinaryIO, count: int, wanted: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the numbers of some runs, which ascend, and their marks; the file stands behind its head."""
    at = 0
    for number in wanted:
        for _ in range(at, number):
            file.seek(_run_head(file, RUN)[0], 1)
        at = number + 1
        many = min(RUN, count - number * RUN)
        length, unit, checksum = _run_head(file, many)
        content = file.read(length)
        if block.checksum(_PLACE.pack(count, number, length, unit) + content) != checksum:
            raise ValueError(f"the change marks from {number * RUN:,} on are damaged")
        yield number, _unpacked(content, unit, many)


def _run_head(file: BinaryIO, many: int) -> tuple[int, int, int]:
    head = file.read(_RUN_HEAD.size)
    if len(head) < _RUN_HEAD.size:
        raise ValueError("it ends before its last change mark")
    length, unit, checksum = _RUN_HEAD.unpack(head)
    if length > many * _SIZE:
        raise ValueError(f"{length:,} bytes where {many:,} change marks should be")
    return length, unit, checksum


def _packed(marks: np.ndarray) -> tuple[int, bytes]:
    """Return the unit of a run of marks, and its content."""
    unit = next(unit for unit in _UNITS if not (marks % np.uint64(unit)).any())
    steps = np.diff(marks // np.uint64(unit), prepend=np.uint64(0)).view(np.int64)
    folded = ((steps << 1) ^ (steps >> 63)).astype("<i8", copy=False)
    content = zlib.compress(folded.view(np.uint8).reshape(-1, _SIZE).T.tobytes(), _LEVEL)
    if len(content) < len(marks) * _SIZE:
        return unit, content
    return _PLAIN, marks.astype("<u8", copy=False).tobytes()


def _unpacked(content: bytes, unit: int, many: int) -> np.ndarray:
    """Return so many marks. A checksum is no proof against who means harm, so nothing is believed here either."""
    size = many * _SIZE
    if unit != _PLAIN:
        try:
            content = zlib.decompressobj().decompress(content, size)
        except zlib.error as problem:
            raise ValueError(f"its change marks cannot be unpacked: {problem}") from None
    if len(content) != size:
        raise ValueError(f"{len(content):,} bytes of change marks where {size:,} were expected")
    if unit == _PLAIN:
        return np.frombuffer(content, "<u8")
    planes = np.frombuffer(content, np.uint8).reshape(_SIZE, many)
    folded = np.ascontiguousarray(planes.T).view("<u8").ravel().astype(np.uint64, copy=False)
    steps = (folded >> np.uint64(1)) ^ (np.uint64(0) - (folded & np.uint64(1)))
    marks: np.ndarray = np.cumsum(steps, dtype=np.uint64) * np.uint64(unit)
    return marks
