"""The calls of an fsspec file system that read samples, and those that are refused since they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from deeplink.library import Library, ReadOnlyDatasetError
from deeplink.longsample import LongSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class _HasLibrary(Protocol):
    _library: Library


class _Paths(_HasLibrary, Protocol):
    """What the calls below need of the file system that they are part of."""

    def expand_path(self, path: Any, recursive: bool = False) -> list[str]: ...  # noqa: FBT001, FBT002 - fsspec's

    def isdir(self, path: str) -> bool: ...

    def _strip_protocol(self, path: Any) -> Any: ...

    def cat_file(self, path: str, **options: Any) -> bytes: ...


class ByteCalls:
    """Samples' bytes by path: however many are asked for, they are read at once."""

    def cat_file(
        self: _HasLibrary, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Return a sample's bytes, or those from `start` to `end` as slices go.

        Raises:
            NotThereError, IsFolderError: there is no such sample.
            NotReadError: its bytes cannot be had anywhere.
        """
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
        """Return one sample's bytes, or those of several by path, read at once.

        Args:
            path: a path or a pattern, or a list of them.
            recursive: all that lies below folders.
            on_error: `raise`, `omit` or `return` (the error in place of the bytes).
            options: `start`, `end` as for `cat_file`.

        Raises:
            NotThereError, IsFolderError: there is no such sample.
            NotReadError: its bytes cannot be had anywhere.
            ValueError: `on_error` is none of these.
        """
        _check_choice(on_error, "raise", "omit", "return")
        paths = self.expand_path(path, recursive=recursive)
        asked = [self._strip_protocol(part) for part in (path if isinstance(path, list) else [path])]
        if not isinstance(path, list) and paths == asked:
            return self.cat_file(paths[0], **options)
        # Folders that a pattern or the recursion found are only in the way.
        paths = [part for part in paths if (part in asked and not recursive) or not self.isdir(part)]
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
        """Return a range of each of `paths`, read at once.

        Args:
            paths: one sample may occur several times.
            starts: one for all, or one each; as slices go.
            ends: the same.
            max_gap: of no use here.
            on_error: `return` (the error in place of the bytes) or `raise`.

        Raises:
            TypeError: paths is no list.
            ValueError: the lists are not of one length, or `on_error` is neither.
            NotThereError, IsFolderError, NotReadError: with `on_error="raise"`.
        """
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

    refuse.__doc__ = f"Refuse to {action}.\n\nRaises:\n    ReadOnlyError: always."
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
