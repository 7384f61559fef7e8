"""`deeplink://name[@version]/path`: packed datasets as an fsspec file system, to be read only.

So that whatever reads through fsspec (pyarrow, pandas, Hugging Face datasets, an ImageFolder of one's own) reads
packed samples. `deeplink://` lists the catalog's datasets. fsspec finds this by an entry point, or when it is
imported.
"""

from __future__ import annotations

import io
import os
from contextvars import ContextVar
from datetime import UTC, datetime
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import isfilelike
from typing_extensions import override

from deeplink.core.publish import write_unsynced
from deeplink.fs.library import (
    PROTOCOL,
    DatasetNotFoundError,
    IsFolderError,
    Library,
    LongSample,
    ReadAhead,
    ReadOnlyDatasetError,
    forget_open_datasets,
    stripped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from deeplink.core.config import Config
    from deeplink.fs.library import PathEntry, TreeEntry


class SampleFile(io.BytesIO):
    """A sample's bytes, in memory, as an open file: seekable, picklable with its position.

    Attributes:
        path: where the sample lies.
        size: bytes.
        mode: `rb`.
    """

    mode = "rb"

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(data)
        self.path, self.size = path, len(data)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _sample_reopened, (type(self), self.path, self.getvalue(), self.tell())

    @override
    def writable(self) -> bool:
        return False

    @override
    def write(self, _data: Any) -> NoReturn:
        raise ReadOnlyDatasetError("write to a sample")

    @override
    def writelines(self, _lines: Iterable[Any]) -> NoReturn:
        raise ReadOnlyDatasetError("write to a sample")

    @override
    def truncate(self, _size: int | None = None) -> NoReturn:
        raise ReadOnlyDatasetError("truncate a sample")


def _sample_reopened(kind: type[SampleFile], path: str, data: bytes, position: int) -> SampleFile:
    file = kind(path, data)
    file.seek(position)
    return file


_ahead: ContextVar[ReadAhead | None] = ContextVar("_ahead", default=None)
"""Of the `get` that is under way in this thread: it asks for one file after another."""
_FSSPEC_OPTIONS = frozenset({"asynchronous", "loop", "use_listings_cache", "listings_expiry_time", "max_paths"})


class _LongSampleFile(AbstractBufferedFile):  # type: ignore[misc]
    """A sample of many MiB: its bytes come when they are read, not when it is opened."""

    _sample: LongSample | None = None

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._sample is None:
            library: Library = self.fs._library  # noqa: SLF001 - our own
            self._sample = LongSample(library.at(self.path), library.config)
        return self._sample.read(start, end)


def _refusal(action: str) -> Callable[..., NoReturn]:
    def refuse(_self: object, *_args: object, **_options: object) -> NoReturn:
        raise ReadOnlyDatasetError(action)

    refuse.__doc__ = f"Refuse to {action}.\n\nRaises:\n    ReadOnlyDatasetError: always."
    return refuse


class DeepLinkFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Packed datasets, read only. Safe to use from several threads, across fork, and to pickle.

    A dataset's version is fixed when an instance first looks at it: what is packed meanwhile is seen by the next
    instance. fsspec keeps no instances of it, so `fsspec.open(url)` always sees the newest. A pickled instance
    carries its versions along. A sample whose name holds `*`, `?` or `[` is found by that very name, too.

    Args:
        versions: dataset name to version, or the beginning of one, for datasets not to be read at their newest.
        config: where catalog, store and members are; what the environment and the files say when None.
        options: fsspec's own.

    Raises:
        ConfigError: the configuration cannot be used.
        TypeError: an option is unknown.
    """

    protocol = PROTOCOL
    root_marker = ""
    cachable = False

    def __init__(
        self, *, versions: Mapping[str, str] | None = None, config: Config | None = None, **options: Any
    ) -> None:
        if unknown := sorted(options.keys() - _FSSPEC_OPTIONS):
            raise TypeError(f"deeplink:// has no option {', '.join(unknown)}: it has versions and config")
        super().__init__(**options)
        self._library = Library(versions=versions, config=config)

    @property
    def versions(self) -> dict[str, str]:
        """The versions read where a path names none: those given, and those looked at so far."""
        return self._library.versions

    @property
    def fsid(self) -> str:
        """The same in all sessions that read the same catalog."""
        return f"{PROTOCOL}:{self._library.config.catalog}"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.versions, self._library.config)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeepLinkFileSystem):
            return NotImplemented
        return (self._library.config, self.versions) == (other._library.config, other.versions)

    @override
    def __hash__(self) -> int:
        return hash(self._library.config)

    def to_dict(self, **options: Any) -> dict[str, Any]:
        """Return what fsspec makes the same file system of, at the same versions."""
        return {**super().to_dict(**options), "versions": self.versions}

    @classmethod
    def clear_instance_cache(cls) -> None:
        """Let go of the datasets that this process keeps open."""
        super().clear_instance_cache()
        forget_open_datasets()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(part) for part in path]
        return stripped(os.fspath(path))

    # What there is.

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return name, size, type and, for a sample, its checksum as ETag; of a dataset also the version.

        Raises:
            DatasetNotFoundError: nothing lies there.
        """
        if not stripped(path):
            return _folder("")
        found = self._library.at(path)
        if not found.place.inner:
            return {**_folder(found.place.root), "version": found.reader.version}
        return _facts(found, found.entry)

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:  # noqa: FBT001, FBT002 - fsspec's
        """Return what lies directly in a folder, sorted; a sample lists itself; the root lists the datasets.

        Raises:
            DatasetNotFoundError: nothing lies there.
        """
        if stripped(path):
            found = self._library.at(path)
            facts = [_facts(found, entry) for entry in found.entries()]
        else:
            facts = [_folder(name) for name in self._library.catalog.names()]
        return facts if detail else [fact["name"] for fact in facts]

    def exists(self, path: str, **_options: Any) -> bool:
        """Tell whether something lies there. Raises what keeps it from being looked for."""
        return bool(self._kind(path))

    def isdir(self, path: str) -> bool:
        """Tell whether it is a folder. Raises what keeps it from being looked for."""
        return self._kind(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Tell whether it is a sample. Raises what keeps it from being looked for."""
        return self._kind(path) == "file"

    def _kind(self, path: str) -> str:
        try:
            return str(self.info(path)["type"])
        except DatasetNotFoundError:
            return ""

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002 - fsspec's
        detail: bool = False,  # noqa: FBT001, FBT002 - fsspec's
        prefix: str = "",
        **_options: Any,
    ) -> Any:
        """Return all samples below a folder, sorted, or details by name.

        Args:
            path: the folder; a sample finds itself; where there is nothing, nothing is found.
            maxdepth: how many levels down.
            withdirs: the folder and those below it, too.
            detail: a dict of what `info` says instead of names.
            prefix: only what lies in `path` under a name that begins so.

        Raises:
            ValueError: maxdepth is below 1.
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        try:
            found = {fact["name"]: fact for fact in self._below(stripped(path), maxdepth)}
        except DatasetNotFoundError:
            found = {}
        if not withdirs:
            found = {name: fact for name, fact in found.items() if fact["type"] == "file"}
        if prefix:
            start = f"{stripped(path)}/{prefix}".lstrip("/")
            found = {name: fact for name, fact in found.items() if name.startswith(start)}
        return {name: found[name] for name in sorted(found)} if detail else sorted(found)

    def _below(self, path: str, depth: int | None) -> Iterator[dict[str, Any]]:
        if path:
            found = self._library.at(path)
            yield self.info(path)
            yield from (_facts(found, entry) for entry in found.below(depth))
            return
        for name in self._library.catalog.names():
            if depth == 1:
                yield _folder(name)
            else:
                yield from self._below(name, None if depth is None else depth - 1)

    def expand_path(
        self,
        path: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002 - fsspec's
        maxdepth: int | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the paths that patterns and folders stand for; a sample of that very name is no pattern.

        Raises:
            DatasetNotFoundError: nothing matches.
            ValueError: maxdepth is below 1.
        """
        asked = [path] if isinstance(path, str | os.PathLike) else list(path)
        asked = self._strip_protocol(asked)
        found: set[str] = {part for part in asked if has_magic(part) and self.isfile(part)}
        patterns = [part for part in asked if part not in found]
        try:
            found.update(super().expand_path(patterns, recursive, maxdepth, **options))
        except FileNotFoundError as problem:
            if not found:
                raise DatasetNotFoundError(", ".join(asked)) from problem
        return sorted(found)

    def checksum(self, path: str) -> int:
        """Return a sample's xxh3-64; a number of the version for a dataset or a folder.

        Raises:
            DatasetNotFoundError: nothing lies there.
        """
        return self._library.at(path).checksum

    def modified(self, path: str) -> datetime:
        """Return when the version was packed.

        Raises:
            DatasetNotFoundError: nothing lies there, or it is not known.
        """
        found = self._library.at(path)
        record = self._library.catalog.record(found.place.name, found.reader.version)
        if record is None:
            raise DatasetNotFoundError(stripped(path), "it is not known when it was packed", "")
        return datetime.fromtimestamp(record.packed_unix, UTC)

    created = modified

    # Bytes: however many samples are asked for, they are read at once.

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_options: Any) -> bytes:
        """Return a sample's bytes, or those from `start` to `end` as slices go."""
        if start is not None or end is not None:
            found = self._library.at(path)
            if LongSample.is_one(found):
                return LongSample(found, self._library.config).read(*slice(start, end).indices(found.bytes)[:2])
        return bytes(self._library.read([path])[path][start:end])

    def cat(
        self,
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
        self,
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

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002 - fsspec's
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **options: Any,
    ) -> None:
        """Copy samples to local files, each whole or not at all; they are read many at once.

        Raises:
            DatasetNotFoundError: there is no such sample.
            NotReadError: its bytes cannot be had anywhere.
            OSError: it cannot be written.
        """
        if isinstance(rpath, list) and isinstance(lpath, list):
            paths = self._strip_protocol(rpath)
        else:
            paths = self.expand_path(rpath, recursive=recursive, maxdepth=maxdepth)
        if bad := [path for path in paths if not {".", ".."}.isdisjoint(path.split("/"))]:
            raise DatasetNotFoundError(bad[0], "that name would lead out of the destination")
        token = _ahead.set(ReadAhead(self._library, paths))
        try:
            super().get(rpath, lpath, recursive=recursive, callback=callback, maxdepth=maxdepth, **options)
        finally:
            _ahead.reset(token)

    def get_file(
        self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **_options: Any
    ) -> None:
        """Copy one sample to a local file, which appears whole or not at all; make a folder for a folder.

        Raises:
            DatasetNotFoundError: there is no such sample.
            NotReadError: its bytes cannot be had anywhere.
            OSError: it cannot be written.
        """
        outfile = lpath if outfile is None and isfilelike(lpath) else outfile
        if outfile is None and self.isdir(rpath):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        path = self._strip_protocol(rpath)
        ahead = _ahead.get() or ReadAhead(self._library, [path])
        data = ahead.take(path)
        callback.set_size(len(data))
        if outfile is None:
            write_unsynced(Path(lpath), data)
        else:
            outfile.write(data)
        callback.relative_update(len(data))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            raise ReadOnlyDatasetError(f"open with mode {mode!r}")
        if mode != "rb":
            raise ValueError(f"mode {mode!r}")
        found = self._library.at(path)
        if found.entry.is_folder:
            raise IsFolderError(path)
        if LongSample.is_one(found):
            options["cache_type"] = "none"
            return _LongSampleFile(self, path, mode, block_size or "default", **options)
        return SampleFile(path, self.cat_file(path))

    # What would write.

    mkdir = makedirs = makedir = mkdirs = _refusal("make a folder")
    rm = rm_file = _rm = rmdir = delete = _refusal("remove")
    mv = move = rename = _refusal("move")
    cp = copy = cp_file = _refusal("copy")
    put = put_file = upload = _refusal("put")
    pipe = pipe_file = write_bytes = write_text = touch = _refusal("write")
    start_transaction = _refusal("begin a transaction of writes")


def _read(library: Library, paths: Sequence[str], on_error: str) -> Mapping[str, memoryview | OSError]:
    return library.read(paths) if on_error == "raise" else library.read_each(paths)


def _check_choice(on_error: str, *choices: str) -> None:
    if on_error not in choices:
        raise ValueError(f"on_error is {on_error!r}, not one of {', '.join(choices)}")


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _facts(found: PathEntry, entry: TreeEntry) -> dict[str, Any]:
    if entry.is_folder:
        return _folder(found.path_of(entry))
    index = found.reader.index
    return {
        "name": found.path_of(entry),
        "size": int(index.lengths[entry.row]),
        "type": "file",
        "ETag": f"{int(index.checksums[entry.row]):016x}",
    }


def _reopened(kind: type[DeepLinkFileSystem], versions: dict[str, str], config: Config) -> DeepLinkFileSystem:
    return kind(versions=versions, config=config)


fsspec.register_implementation(PROTOCOL, DeepLinkFileSystem, clobber=True)
