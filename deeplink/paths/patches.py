"""Puts our functions in place of Python's own that open, look at, list and change files; takes them back."""

from __future__ import annotations

import functools
import glob
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from deeplink.paths.routing import ROOTS_VARIABLE, STARTUP, PackedRoot, Real, ServedPaths, environment, roots_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from deeplink.cache.reader import ReadStats
    from deeplink.core.config import Config

_CHANGING = ("chmod", "chown", "link", "mkfifo", "mknod", "remove", "symlink", "truncate", "unlink", "utime")
_MOVING = ("rename", "replace", "rmdir")
_OF_TWO = ("link", "symlink", "rename", "replace")
_READING_MODES = frozenset({"r", "rt", "tr", "rb", "br"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LEFT_ALONE = ("deeplink.", "posix", "_io")  # our own; what Python imports with
_SUPPORT: tuple[set[Any], ...] = (
    *(os.supports_dir_fd, os.supports_fd),
    *(os.supports_follow_symlinks, os.supports_effective_ids),
)

_served = ServedPaths([])
_put: list[tuple[Any, str, Any]] = []  # where a function was put, under which name, and what was there before


class _ServedEntry:
    """What os.scandir gives: an entry of a served folder."""

    __slots__ = ("_is_folder", "name", "path")

    def __init__(self, folder: str, name: str, *, is_folder: bool) -> None:
        self.name, self._is_folder = name, is_folder
        self.path = os.path.join(folder, name)  # noqa: PTH118 - as os.scandir does

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:  # type: ignore[explicit-override] # typing_extensions costs each Python 10 ms
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002 - as os.DirEntry has it
        return self._is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002 - as os.DirEntry has it
        return not self._is_folder

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116 - ours

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _ServedScan:
    """What os.scandir returns."""

    def __init__(self, entries: Iterator[_ServedEntry]) -> None:
        self._entries = entries

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _ServedEntry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _problem: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


@functools.wraps(Real.open)
def _open(  # noqa: PLR0917 - as the function that it stands for
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,  # noqa: FBT001, FBT002
    opener: Any = None,
) -> Any:
    path = _served.find(file)
    # What is wrong about other arguments, the real function says.
    if (
        path is not None
        and mode in _READING_MODES
        and opener is None
        and closefd
        and (encoding is errors is newline is None if "b" in mode else buffering != 0)
    ):
        raw = _served.ask(path, "open_raw", os.fspath(file))
        if raw is not None:
            if "b" not in mode:
                return _as_text(raw, mode, buffering, (encoding, errors, newline))
            return raw if buffering == 0 else _buffered(raw, buffering)
    opened = Real.open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if path is not None and opened.writable():
        _served.changed(path)
    return opened


def _buffered(raw: Any, buffering: int) -> io.BufferedReader:
    return io.BufferedReader(raw, buffering) if buffering > 1 else io.BufferedReader(raw)


def _as_text(raw: Any, mode: str, buffering: int, how: tuple[str | None, ...]) -> io.TextIOWrapper:
    encoding, errors, newline = how
    text = io.TextIOWrapper(_buffered(raw, buffering), encoding, errors, newline, buffering == 1)
    text.mode = mode  # type: ignore[misc] # as `open` does
    return text


@functools.wraps(Real.os_open)
def _os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    found = _served.find(path) if dir_fd is None else None
    if found is not None and flags & ~os.O_CLOEXEC == os.O_RDONLY:  # with any other flag it is no plain read
        descriptor: int | None = _served.ask(found, "descriptor")
        if descriptor is not None:
            return descriptor
    opened = Real.os_open(path, flags, mode, dir_fd=dir_fd)
    if found is not None and flags & _WRITING:
        _served.changed(found)
    return opened


@functools.wraps(Real.stat)
def _stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    found = _served.find(path) if dir_fd is None else None
    answer: os.stat_result | None = None if found is None else _served.ask(found, "stat")
    return Real.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks) if answer is None else answer


@functools.wraps(Real.lstat)
def _lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
    found = _served.find(path) if dir_fd is None else None
    answer: os.stat_result | None = None if found is None else _served.ask(found, "stat")
    return Real.lstat(path, dir_fd=dir_fd) if answer is None else answer


def _listed(path: Any) -> list[tuple[str, bool]] | None:
    found = _served.find("." if path is None else path, whole=True)
    return None if found is None else _served.ask(found, "listing")


@functools.wraps(Real.scandir)
def _scandir(path: Any = None) -> Any:
    names = _listed(path)
    if names is None:
        return Real.scandir(path)
    folder = "." if path is None else os.fspath(path)
    return _ServedScan(_ServedEntry(folder, name, is_folder=is_folder) for name, is_folder in names)


@functools.wraps(Real.listdir)
def _listdir(path: Any = None) -> Any:
    names = _listed(path)
    return Real.listdir(path) if names is None else [name for name, _ in names]


def _in_folder(path: Any, descriptor: int) -> Any:
    """Return a path that is relative to an open folder as one that is not."""
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))  # noqa: PTH115, PTH118
    except (OSError, TypeError):
        return path


def _noticed(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that changes files, and what it changes is noted."""
    count, below = 2 if real.__name__ in _OF_TWO else 1, real.__name__ in _MOVING

    @functools.wraps(real)
    def changing(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        folder = options.get("dir_fd")
        folders = options.get("src_dir_fd", folder), options.get("dst_dir_fd", folder)
        for path, below_fd in zip((*arguments, *options.values())[:count], folders, strict=False):
            _served.changed(path if below_fd is None else _in_folder(path, below_fd), below=below)
        return answer

    return changing


_OURS: dict[Any, Callable[..., Any]] = {
    Real.open: _open,
    Real.os_open: _os_open,
    Real.stat: _stat,
    Real.lstat: _lstat,
    Real.scandir: _scandir,
    Real.listdir: _listdir,
    **{getattr(os, name): _noticed(getattr(os, name)) for name in (*_CHANGING, *_MOVING)},
}
for _real, _function in _OURS.items():
    _function.__module__ = "io" if _real is Real.open else "os"  # where a pickle of it looks


def _put_in(place: Any, name: str, function: Any) -> None:
    _put.append((place, name, vars(place)[name]))
    setattr(place, name, function)


def install_roots(roots: Iterable[PackedRoot], config: Config | None = None) -> None:
    """Serve paths below these folders, here and in Pythons that are started from now on."""
    global _served  # noqa: PLW0603 - one for the process, as the functions are
    uninstall()
    roots = list(roots)
    _served = ServedPaths(roots, config)
    # In every module that has taken one, as tarfile does `open`.
    by_id = {id(real): ours for real, ours in _OURS.items()}
    for module in [module for name, module in sys.modules.items() if not name.startswith(_LEFT_ALONE)]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in by_id:
                _put_in(module, name, by_id[id(value)])
    for real, ours in _OURS.items():
        for supporting in _SUPPORT:
            if real in supporting:
                supporting.add(ours)
    # From Python 3.13 on, pathlib lists folders with what this class took from os when it was made.
    globber = vars(glob).get("_StringGlobber")
    if globber is not None and getattr(globber, "scandir", None) is Real.scandir:
        _put_in(globber, "scandir", staticmethod(_scandir))
    os.environ.update(environment(roots, os.environ))


def install_from(env: Mapping[str, str]) -> None:
    """Serve paths below the folders that an environment names."""
    if roots := roots_in(env):
        install_roots(roots)


def uninstall() -> None:
    """Put Python's own functions back."""
    global _served  # noqa: PLW0603 - see above
    _served = ServedPaths([])
    while _put:
        setattr(*_put.pop())
    for supporting in _SUPPORT:
        supporting.difference_update(_OURS.values())
    if os.environ.pop(ROOTS_VARIABLE, None) is not None:
        kept = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in {"", STARTUP}]
        os.environ.pop("PYTHONPATH", None)
        if kept:
            os.environ["PYTHONPATH"] = os.pathsep.join(kept)


def stats() -> ReadStats:
    """Return where the samples came from that this process read by path."""
    return _served.stats()
