"""Keys of samples: which paths may be one, and many in little memory: as strings, ten million take a gigabyte."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.core.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

_AT_ONCE = 1 << 16
MOST_KEY_BYTES = 4096
MOST_NAME_BYTES = 255
"""What Linux file systems allow, so that every key can be a file again."""


def checked_key(path: str) -> SampleKey:
    """Return `path` as a key.

    >>> checked_key("train/3/00001.png")
    'train/3/00001.png'
    """
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise SourceError.bad_key(path, "the name is not UTF-8") from None
    if not raw:
        raise SourceError.bad_key(path, "the name is empty")
    if b"\0" in raw:
        raise SourceError.bad_key(path, "the name holds a NUL character")
    if raw.startswith(b"/"):
        raise SourceError.bad_key(path, "the path is absolute")
    if len(raw) > MOST_KEY_BYTES:
        raise SourceError.bad_key(path, f"the path is longer than {MOST_KEY_BYTES} bytes")
    for part in raw.split(b"/"):
        if part in {b"", b".", b".."}:
            raise SourceError.bad_key(path, f"a part of the path is {part.decode()!r}")
        if len(part) > MOST_NAME_BYTES:
            raise SourceError.bad_key(path, f"a part of the path is longer than {MOST_NAME_BYTES} bytes")
    return SampleKey(path)


class Names(Sequence[SampleKey]):
    """Keys in a row: indexed, sliced (a view) and iterated like a list of strings, and equal to one.

    Attributes:
        text: the UTF-8 of the keys, one after another; may hold that of others before and behind.
        offsets: int64, where each key begins in `text`, and where the last one ends.
    """

    __slots__ = ("offsets", "text")

    def __init__(self, text: memoryview, offsets: np.ndarray) -> None:
        self.text, self.offsets = text, offsets

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Return `names`, in their order, unchecked."""
        raw = [name.encode() for name in names]
        offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        return cls(memoryview(b"".join(raw)), offsets)

    @classmethod
    def checked(cls, text: bytes, lengths: np.ndarray) -> Names:
        """Return keys that came from elsewhere: `text` cut into `lengths` (bytes)."""
        found = cls(memoryview(text), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        if len(text) != int(found.offsets[-1]):
            raise SourceError.bad_key("", "the names do not fit their lengths")
        for raw in found.raw():
            checked_key(raw.decode(errors="surrogateescape"))
        if not is_sorted(found):
            raise SourceError.bad_key("", "the names are not sorted")
        return found

    @override
    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, at: int) -> SampleKey: ...

    @overload
    def __getitem__(self, at: slice) -> Names: ...

    @override
    def __getitem__(self, at: int | slice) -> SampleKey | Names:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                raise ValueError("keys are sliced in runs")
            return Names(self.text, self.offsets[start : max(stop, start) + 1])
        row = range(len(self))[at]
        return SampleKey(str(self.text[self.offsets[row] : self.offsets[row + 1]], "utf-8"))

    @override
    def __iter__(self) -> Iterator[SampleKey]:
        for raw in self.raw():
            yield SampleKey(raw.decode())

    def raw(self) -> Iterator[bytes]:
        """Yield each key's UTF-8."""
        for start in range(0, len(self), _AT_ONCE):
            ends = self.offsets[start : start + _AT_ONCE + 1].tolist()
            base = ends[0]
            run = bytes(self.text[base : ends[-1]])
            before = 0
            for end in ends[1:]:
                yield run[before : end - base]
                before = end - base

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    @override
    def __repr__(self) -> str:
        return f"<{len(self)} keys>"

    @property
    def lengths(self) -> np.ndarray:
        """The bytes of each key, int64."""
        return np.diff(self.offsets)

    @property
    def arrow(self) -> pa.LargeStringArray:
        """The keys as Arrow has them; the text is shared, not copied."""
        import pyarrow as pa  # noqa: PLC0415 - pyarrow: no agent needs it to start

        ends, text = pa.py_buffer(np.ascontiguousarray(self.offsets)), pa.py_buffer(self.text)
        return pa.LargeStringArray.from_buffers(len(self), ends, text)

    def joined(self) -> bytes:
        """Return the UTF-8 of these keys and of no others, one after another."""
        return bytes(self.text[self.offsets[0] : self.offsets[-1]])

    def terminated(self) -> Iterator[bytes]:
        """Yield the UTF-8 of the keys, a NUL after each, in pieces of many."""
        for start in range(0, len(self), _AT_ONCE):
            run = self[start : start + _AT_ONCE]
            text = np.frombuffer(run.joined(), np.uint8)
            yield np.insert(text, run.offsets[1:] - run.offsets[0], 0).tobytes()


class NameCollector:
    """Takes in the files of a source as they are found, in little memory; `finished` gives them sorted."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._lengths, self._sizes, self._marks = array("H"), array("q"), array("Q")

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, prefix: str, names: Sequence[str], sizes: Iterable[int], marks: Iterable[int]) -> None:
        """Take in files whose keys are `prefix` and their names."""
        if not names:
            return
        # One text with NULs between, encoded and cut at once: a third of the time of one by one.
        try:
            raw = (prefix + ("\0" + prefix).join(names)).encode()
        except UnicodeEncodeError:
            self._find_bad(prefix, names)
            raise
        whole = np.frombuffer(raw, np.uint8)
        ends = np.append(np.flatnonzero(whole == 0), len(whole))
        if len(ends) != len(names):
            self._find_bad(prefix, names)
        lengths = np.diff(ends, prepend=-1) - 1
        if int(lengths.max()) > MOST_KEY_BYTES:
            self._find_bad(prefix, names)
        self._text += raw.replace(b"\0", b"")
        self._lengths.frombytes(lengths.astype(np.uint16).tobytes())
        self._sizes.extend(sizes)
        self._marks.extend(marks)

    @staticmethod
    def _find_bad(prefix: str, names: Sequence[str]) -> None:
        for name in names:
            checked_key(prefix + name)

    def finished(self) -> tuple[Names, np.ndarray, np.ndarray]:
        """Return the keys in the order of their bytes, the sizes (int64) and the marks (uint64); takes no more."""
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(np.frombuffer(self._lengths, np.uint16), out=offsets[1:])
        names = Names(memoryview(self._text), offsets)
        sizes, marks = np.frombuffer(self._sizes, np.int64), np.frombuffer(self._marks, np.uint64)
        if not is_sorted(names):
            import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow: no agent needs it to start

            order = pc.sort_indices(names.arrow)
            _, offsets, text = names.arrow.take(order).buffers()
            names = Names(memoryview(text), np.frombuffer(offsets, np.int64, len(order) + 1))
            sizes, marks = sizes[order.to_numpy()], marks[order.to_numpy()]
            is_sorted(names)
        return names, sizes, marks


def is_sorted(names: Names) -> bool:
    """Tell whether the keys are in the order of their bytes."""
    import pyarrow.compute as pc  # noqa: PLC0415 - pyarrow: no agent needs it to start

    if not _may_begin_with_another(names) and pc.all(pc.less(names.arrow[:-1], names.arrow[1:])).as_py():
        return True
    # All keys that begin with a key follow it at once: the stack holds those that the current one begins with.
    open_keys: list[bytes] = []
    previous = b""
    for key in names.raw():
        if key < previous:
            return False
        while open_keys and not key.startswith(open_keys[-1]):
            open_keys.pop()
        for shorter in open_keys:
            if len(shorter) == len(key) or key[len(shorter)] == ord("/"):
                raise _collision(shorter.decode(), key.decode())
        open_keys.append(key)
        previous = key
    return True


def _may_begin_with_another(names: Names) -> bool:
    """Tell whether some key may be longer than the one before it and begin with it; its text is not read."""
    text = np.frombuffer(names.text, np.uint8)
    for start in range(0, len(names) - 1, _AT_ONCE):
        begins = names.offsets[start : start + _AT_ONCE + 2]
        lengths = np.diff(begins)
        some = np.flatnonzero((lengths[1:] > lengths[:-1]) & (lengths[:-1] > 0))
        # If it does, it has the last letter of the shorter in the same place.
        last = lengths[some] - 1
        if (text[begins[some] + last] == text[begins[some + 1] + last]).any():
            return True
    return bool((np.diff(names.offsets) == 0).any())


def _collision(key: str, other: str) -> SourceError:
    what = "twice in the source" if key == other else f"a file and, because of {other!r}, also a folder"
    return SourceError("", f"{key!r} is {what}", "Rename one of the two: a key names one sample.", key=key)
