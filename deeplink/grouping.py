"""Files that are one sample together, as WebDataset has it: `a/7.jpg` and `a/7.json` are columns of `a/7`. Pure.

The key is the path up to the first dot of the file's own name, the extension all that is behind it. Names are
compared as bytes, a run of rows at a time: nothing is made per file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deeplink.cache.index import Index

_DOT, _SLASH = ord("."), ord("/")
_AT_ONCE = 1 << 16
"""Rows looked at together: some ten MiB of temporary arrays."""
_CASE = ord("a") - ord("A")


class TwoInOneColumnError(DeepLinkError):
    """Two files of one group have the same extension, but for upper and lower case."""

    def __init__(self, first: str, second: str, column: str) -> None:
        super().__init__(
            f"{first!r} and {second!r} are both column {column!r} of one sample",
            remedy="Rename one of them and pack anew.",
        )
        self.first, self.second, self.column = first, second, column


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Which files of an index are one sample together.

    Attributes:
        rows: int64, shape (files,): the rows that have an extension.
        stems: int64, the same shape: bytes of each row's path before the dot.
        groups: int64, the same shape: the group of each, numbered in the order of their first rows.
        count: how many groups there are.
    """

    rows: np.ndarray
    stems: np.ndarray
    groups: np.ndarray
    count: int


def grouped(index: Index, rows: range) -> Grouping:
    """Return how the files in a run of an index's rows go together.

    Raises:
        IndexFormatError: the index is damaged.
    """
    parts = list(_parts(index, rows))
    if not parts:
        empty = np.empty(0, np.int64)
        return Grouping(empty, empty, empty, 0)
    found = np.concatenate([part.rows for part in parts])
    stems = np.concatenate([part.stems for part in parts])
    begins = np.concatenate([part.begins for part in parts])
    numbers = np.cumsum(begins) - 1
    if any(part.has_dotted_folders for part in parts):
        numbers = _joined(index, found, stems, begins, numbers)
    return Grouping(found, stems, numbers, int(numbers.max()) + 1 if len(numbers) else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    rows: np.ndarray
    stems: np.ndarray
    begins: np.ndarray
    """Whether a row begins a group: its key is not that of the row before it."""
    has_dotted_folders: bool


def _parts(index: Index, rows: range) -> Iterator[_Part]:
    last = b""
    for start in range(rows.start, rows.stop, _AT_ONCE):
        run = range(start, min(start + _AT_ONCE, rows.stop))
        text, bounds = index.key_text(run)
        names, dots, dotted = _split(text, bounds)
        has_one = dots > names
        places = np.flatnonzero(has_one)
        starts, stems = bounds[:-1][places], (dots - bounds[:-1])[places]
        begins = np.ones(len(places), bool)
        begins[1:] = ~_equal(text, starts[:-1], starts[1:], stems[:-1], stems[1:])
        if len(places):
            first = bytes(text[starts[0] : starts[0] + stems[0]])
            begins[0] = first != last
            last = bytes(text[starts[-1] : starts[-1] + stems[-1]])
        yield _Part(places + start, stems, begins, dotted)


def _split(text: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return where keys' own names begin, where their first dots are (0: none), and whether a folder has one."""
    starts, stops = bounds[:-1], bounds[1:]
    slashes, dots = np.flatnonzero(text == _SLASH), np.flatnonzero(text == _DOT)
    # The last slash before the key's end, if it is the key's own.
    before = np.append(-1, slashes)[np.searchsorted(slashes, stops)]
    names = np.maximum(before + 1, starts)
    behind = np.append(dots, len(text))[np.searchsorted(dots, names)]
    in_folders = np.searchsorted(dots, names) > np.searchsorted(dots, starts)
    return names, np.where(behind < stops, behind, 0), bool(in_folders.any())


def _equal(
    text: np.ndarray, starts: np.ndarray, others: np.ndarray, sizes: np.ndarray, other_sizes: np.ndarray
) -> np.ndarray:
    """Return, for each pair of pieces of `text`, whether they are the same bytes."""
    same: np.ndarray = sizes == other_sizes
    pairs = np.flatnonzero(same)
    if not len(pairs):
        return same
    lengths = sizes[pairs]
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    differs = text[np.repeat(starts[pairs], lengths) + within] != text[np.repeat(others[pairs], lengths) + within]
    same[pairs] = np.add.reduceat(differs, ends - lengths) == 0
    return same


def _joined(
    index: Index, rows: np.ndarray, stems: np.ndarray, begins: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """Return the groups' numbers where a folder may lie between the files of one: `a.c`, `a.d/x`, `a.e`."""
    number_of: dict[bytes, int] = {}
    places = np.flatnonzero(begins).tolist()
    known = [
        number_of.setdefault(key_of(index, int(rows[place]), int(stems[place])).encode(), len(number_of))
        for place in places
    ]
    found: np.ndarray = np.array(known, np.int64)[numbers]
    return found


def key_of(index: Index, row: int, stem: int) -> str:
    """Return the key of the group that a row belongs to.

    Args:
        index: where it is.
        row: one of the group's files.
        stem: bytes of its path before the dot.
    """
    return index.key(row).encode()[:stem].decode()


def column(index: Index, grouping: Grouping, extensions: Sequence[str]) -> np.ndarray:
    """Return the row of each group's file with an extension, int64, shape (count,); -1 where it has none.

    Args:
        index: where the files are.
        grouping: of them.
        extensions: in lower case; the first that a group has counts. Files' own may be in upper case.

    Raises:
        TwoInOneColumnError: a group has two files of one extension.
        IndexFormatError: the index is damaged.
    """
    found = np.full(grouping.count, -1, np.int64)
    for extension in extensions:
        members = np.flatnonzero(_has(index, grouping, extension.encode()))
        groups = grouping.groups[members]
        order = np.argsort(groups, kind="stable")
        twice = np.flatnonzero(groups[order][1:] == groups[order][:-1])
        if len(twice):
            first, second = (index.key(int(grouping.rows[members[order[twice[0] + i]]])) for i in range(2))
            raise TwoInOneColumnError(first, second, extension)
        is_new = found[groups] < 0
        found[groups[is_new]] = grouping.rows[members[is_new]]
    return found


def _has(index: Index, grouping: Grouping, extension: bytes) -> np.ndarray:
    """Return whether each file has an extension, whatever the case of its letters."""
    wanted = np.frombuffer(extension, np.uint8)
    found = np.zeros(len(grouping.rows), bool)
    for start in range(0, len(grouping.rows), _AT_ONCE):
        rows, stems = grouping.rows[start : start + _AT_ONCE], grouping.stems[start : start + _AT_ONCE]
        first, last = int(rows[0]), int(rows[-1])
        text, bounds = index.key_text(range(first, last + 1))
        begins = bounds[rows - first] + stems + 1
        fits = np.flatnonzero(bounds[rows - first + 1] - begins == len(wanted))
        letters = text[begins[fits][:, None] + np.arange(len(wanted))]
        is_upper = (letters >= ord("A")) & (letters <= ord("Z"))
        found[start + fits] = (letters + is_upper * np.uint8(_CASE) == wanted).all(axis=1)
    return found
