"""The calls of an fsspec file system that read samples, and those that are refused since they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from deeplink.cache.format.block import SPAN
from deeplink.cache.read.mapped import read_piece
from deeplink.cache.store.store import Store
from deeplink.core.errors import DeepLinkError
from deeplink.fs.library import DatasetNotFoundError, Library, NotReadError, ReadOnlyDatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.core.config import Config
    from deeplink.fs.library import Library, PathEntry

_BATCH_BYTES, _BATCH_SAMPLES = 32 << 20, 256
"""Read at once by `ReadAhead`."""
_KEPT = 2
"""Pieces remembered: who reads a table goes between its end and its columns."""


class LongSample:
    """A sample of several pieces. For one thread; holds some pieces in memory, or all of them.

    What this node does not hold is read whole, once: samples come from elsewhere with one checksum for all of it.

    Attributes:
        bytes: its length.
    """

    def __init__(self, found: PathEntry, config: Config) -> None:
        self._reader, self._store = found.reader, Store(config.store, make=False)
        self._row, self.bytes = found.entry.row, found.bytes
        self._pieces: dict[int, memoryview] = {}
        self._whole: memoryview | None = None

    @staticmethod
    def is_one(found: PathEntry) -> bool:
        """Tell whether a sample is so long."""
        return found.bytes > SPAN

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, both within the sample."""
        parts = []
        while start < stop:
            number, begin = divmod(start, SPAN)
            end = min(stop - number * SPAN, SPAN)
            parts.append(self._piece(number)[begin:end])
            start = number * SPAN + end
        return b"".join(parts)

    def _piece(self, number: int) -> memoryview:
        if self._whole is None and number not in self._pieces:
            piece = read_piece(self._store, self._reader.index, self._row, number)
            if piece is None:
                self._pieces, self._whole = {}, self._read_whole()
            else:
                while len(self._pieces) >= _KEPT:
                    del self._pieces[next(iter(self._pieces))]
                self._pieces[number] = piece
        if self._whole is not None:
            return self._whole[number * SPAN : (number + 1) * SPAN]
        return self._pieces[number]

    def _read_whole(self) -> memoryview:
        try:
            return self._reader.read([self._row])[0]
        except DeepLinkError as problem:
            raise NotReadError(problem) from problem


class _HasLibrary(Protocol):
    _library: Library


class _Paths(_HasLibrary, Protocol):
    """The file system that the calls below are part of."""

    def expand_path(self, path: Any, recursive: bool = False) -> list[str]: ...  # noqa: FBT001, FBT002 - fsspec's

    def isdir(self, path: str) -> bool: ...

    def _strip_protocol(self, path: Any) -> Any: ...

    def cat_file(self, path: str, **options: Any) -> bytes: ...


class ByteCalls:
    """Samples' bytes by path: however many are asked for, they are read at once."""

    def cat_file(
        self: _HasLibrary, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Return a sample's bytes, or those from `start` to `end` as slices go."""
        if start is not None or end is not None:
            found = self._library.at(path)
            if LongSample.is_one(found):
                return LongSample(found, self._library.config).read(*slice(start, end).indices(found.bytes)[:2])
        return bytes(self._library.read([path])[path][start:end])

    def cat(
        self: _Paths,
        path: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002 - fsspec's
        on_error: str = "raise",
        **options: Any,
    ) -> Any:
        """Return one sample's bytes, or those of several by path, read at once."""
        _check_choice(on_error, "raise", "omit", "return")
        paths = self.expand_path(path, recursive=recursive)
        asked = [self._strip_protocol(part) for part in (path if isinstance(path, list) else [path])]
        if not isinstance(path, list) and paths == asked:
            return self.cat_file(paths[0], **options)
        # Folders that a pattern or the recursion found are only in the way.
        named = frozenset() if recursive else frozenset(asked)
        paths = [part for part in paths if part in named or not self.isdir(part)]
        piece = slice(options.get("start"), options.get("end"))
        return {
            part: data if isinstance(data, OSError) else bytes(data[piece])
            for part, data in _read(self._library, paths, on_error).items()
            if not (isinstance(data, OSError) and on_error == "omit")
        }

    def cat_ranges(
        self: _HasLibrary,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,  # noqa: ARG002 - fsspec's; samples are read whole, at once
        on_error: str = "return",
        **_options: Any,
    ) -> list[bytes | OSError]:
        """Return a range of each of `paths`, read at once."""
        _check_choice(on_error, "raise", "return")
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        data = _read(self._library, list(dict.fromkeys(paths)), on_error)
        return [
            whole if isinstance(whole := data[path], OSError) else bytes(whole[start:end])
            for path, start, end in zip(paths, starts, ends, strict=True)
        ]


def _read(library: Library, paths: Sequence[str], on_error: str) -> Mapping[str, memoryview | OSError]:
    return library.read(paths) if on_error == "raise" else library.read_each(paths)


def _check_choice(on_error: str, *choices: str) -> None:
    if on_error not in choices:
        raise ValueError(f"on_error is {on_error!r}, not one of {', '.join(choices)}")


def _refusal(action: str) -> Callable[..., NoReturn]:
    def refuse(_self: object, *_args: object, **_options: object) -> NoReturn:
        raise ReadOnlyDatasetError(action)

    refuse.__doc__ = f"Refuse to {action}.\n\nRaises:\n    ReadOnlyDatasetError: always."
    return refuse


class RefusedWrites:
    """Every call of fsspec that would write."""

    mkdir = makedirs = makedir = mkdirs = _refusal("make a folder")
    rm = rm_file = _rm = rmdir = delete = _refusal("remove")
    mv = move = rename = _refusal("move")
    cp = copy = cp_file = _refusal("copy")
    put = put_file = upload = _refusal("put")
    pipe = pipe_file = write_bytes = write_text = touch = _refusal("write")
    start_transaction = _refusal("begin a transaction of writes")


class ReadAhead:
    """Reads the next samples of a list along with the one that is wanted. For one thread."""

    def __init__(self, library: Library, paths: Sequence[str]) -> None:
        self._library, self._paths = library, paths
        self._position = {path: position for position, path in enumerate(paths)}
        self._read: dict[str, memoryview | OSError] = {}

    def take(self, path: str) -> memoryview:
        """Return a sample's bytes, and forget them."""
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
