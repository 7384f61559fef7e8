"""Which packed folder a path lies below: what our functions in place of Python's own ask.

A path that lies below none costs some hundred nanoseconds. Importing this module imports none of the cache: every
Python below a rank does it.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.cache.reader import ReadStats
    from deeplink.core.config import Config
    from deeplink.paths.packed_folder import PackedFolder

_MOST_LINKS = 40  # the kernel's own bound
_MOST_UNRELATED = 4096
_MOST_CHANGED = 100_000


class _Busy(threading.local):
    """Whether this thread is in the cache's own code: files that it opens are the real ones."""

    def __init__(self) -> None:  # once in each thread
        self.here = threading.current_thread().name.startswith("deeplink-")


class Real:
    """Python's own functions."""

    open, os_open, stat, lstat = io.open, os.open, os.stat, os.lstat
    scandir, listdir, readlink, getcwd = os.scandir, os.listdir, os.readlink, os.getcwd


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(Real.lstat(path or "/").st_mode)
    except OSError:
        return False


class ServedPaths:
    """Which packed folder a path lies below, and what was changed there since."""

    def __init__(self, roots: Iterable[PackedRoot], config: Config | None = None) -> None:
        self._config = config
        self._folders: list[tuple[str, PackedRoot]] = []
        for root in roots:
            real = self._resolved(root.folder)
            self._folders += [(f"{folder}/", root) for folder in dict.fromkeys((root.folder, real)) if folder]
        # The innermost first.
        self._folders.sort(key=lambda one: -len(one[0]))
        self._prefixes = tuple(prefix for prefix, _ in self._folders)
        self._packed: dict[PackedRoot, PackedFolder] = {}
        self._unrelated: set[str] = set()
        self._changed: set[str] = set()
        self._moved: set[str] = set()
        self._busy = _Busy()

    def _resolved(self, folder: str) -> str:
        """Return an absolute path without links and dots before a packed folder; empty where that is not clear."""
        done, todo, links = "", folder.split("/")[::-1], 0
        prefixes: tuple[str, ...] = getattr(self, "_prefixes", ())
        while todo:
            name = todo.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                # Below a packed folder, whether there is a folder to leave is for the file system to say.
                if f"{done}/".startswith(prefixes) or not _is_folder(done):
                    return ""
                done = done.rpartition("/")[0]
                continue
            path = f"{done}/{name}"
            try:
                target = "" if f"{path}/".startswith(prefixes) else Real.readlink(path)
            except (OSError, ValueError):  # no link; no path at all
                target = ""
            if not target:
                done = path
                continue
            links += 1
            if links > _MOST_LINKS:
                return ""
            done = "" if target.startswith("/") else done
            todo += target.split("/")[::-1]
        return done

    def find(self, path: Any, *, whole: bool = False) -> str | None:
        """Return where a path leads, if that is below a packed folder; `whole`: or if it is one itself."""
        if type(path) is not str:
            try:
                path = os.fspath(path)
            except TypeError:  # a descriptor, or nothing at all
                return None
            if not isinstance(path, str):
                return None
        if not path.startswith("/"):
            try:
                path = f"{Real.getcwd()}/{path}"
            except OSError:
                return None
        if path.startswith(self._prefixes) and "//" not in path and "/." not in path and path[-1] != "/":
            return str(path)
        return self._found(path, whole=whole)

    def _found(self, path: str, *, whole: bool) -> str | None:
        """Return what `find` does for a path that has links, dots or double slashes, or lies elsewhere."""
        folder, _, name = (path, "", "") if whole else path.rpartition("/")
        if folder in self._unrelated or (not whole and name in {"", ".", ".."}):
            return None
        real = self._resolved(folder)
        if f"{real}/".startswith(self._prefixes):
            return f"{real}/{name}" if name else real
        if len(self._unrelated) >= _MOST_UNRELATED:
            self._unrelated.clear()
        self._unrelated.add(folder)
        return None

    def ask(self, path: str, question: str, *details: Any) -> Any:
        """Return what the packed folders answer about a path that `find` gave; None where none does."""
        if self._busy.here or ((self._changed or self._moved) and self._is_changed(path)):
            return None
        self._busy.here = True
        try:
            for prefix, root in self._folders:
                if f"{path}/".startswith(prefix):
                    answer = self._answer(self._folder(root), path[len(prefix) :], question, details)
                    if answer is not None:
                        return answer
        except Exception as problem:  # noqa: BLE001 - of a Python that lacks what the cache needs
            self._folders, self._prefixes = [], ()
            sys.stderr.write(f"deeplink: no more paths are served, files are read themselves: {problem}\n")
        finally:
            self._busy.here = False
        return None

    def _folder(self, root: PackedRoot) -> PackedFolder:
        packed = self._packed.get(root)
        if packed is None:
            from deeplink.paths.packed_folder import PackedFolder  # noqa: PLC0415 - the cache, when it is wanted

            packed = self._packed.setdefault(root, PackedFolder(root, self._config, Real.stat))
        return packed

    @staticmethod
    def _answer(packed: PackedFolder, inner: str, question: str, details: tuple[Any, ...]) -> Any:
        try:
            return getattr(packed, question)(inner, *details)
        except Exception as problem:  # noqa: BLE001 - whatever fails here, the file itself may be read
            packed.failed(problem, samples=question in {"open_raw", "descriptor"})
            return None

    def _is_changed(self, path: str) -> bool:
        path = self._as_packed(path)
        if path in self._changed:
            return True
        while path:
            if path in self._moved:
                return True
            path = path.rpartition("/")[0]
        return False

    def _as_packed(self, path: str) -> str:
        """Return a path by the name that its folder was packed under: links may give it others."""
        for prefix, root in self._folders:
            if f"{path}/".startswith(prefix):
                return f"{root.folder}/{path[len(prefix) :]}".rstrip("/")
        return path

    def changed(self, path: Any, *, below: bool = False) -> None:
        """Note that a file was changed, or all that lies below: from now on the real one is taken."""
        found = self.find(path, whole=True)
        if found is None or self._busy.here:
            return
        if len(self._changed) + len(self._moved) >= _MOST_CHANGED:
            self._changed, self._moved = set(), {root.folder for _, root in self._folders}
        (self._moved if below else self._changed).add(self._as_packed(found))

    def stats(self) -> ReadStats:
        """Return where the samples of all folders came from that this process read."""
        from deeplink.paths.packed_folder import summed  # noqa: PLC0415 - as above

        return summed(packed.stats() for packed in self._packed.values())


ROOTS_VARIABLE = "DEEPLINK_PATH_ROOTS"
"""A line `NAME@VERSION=FOLDER` for each folder."""
MOST_TEXT = 64 << 10
"""Bytes of that variable; Linux takes 128 KiB in one."""
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")  # noqa: PTH100, PTH118, PTH120 - pathlib costs each process 5 ms
"""On PYTHONPATH it makes a Python serve paths: it holds a `sitecustomize`."""


class PackedRoot(NamedTuple):
    """A folder that was packed."""

    folder: str  # absolute, as it was given to `deeplink pack`
    name: str  # of the dataset
    version: str


def environment(roots: Iterable[PackedRoot], env: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be changed in an environment so that every Python below it serves paths."""
    text = "\n".join(f"{root.name}@{root.version}={root.folder}" for root in roots)
    path = [STARTUP, *(part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part not in {"", STARTUP})]
    return {ROOTS_VARIABLE: text, "PYTHONPATH": os.pathsep.join(path)}


def roots_in(env: Mapping[str, str]) -> list[PackedRoot]:
    """Return the folders that an environment names; what is no such line is left out."""
    found = []
    for line in env.get(ROOTS_VARIABLE, "").split("\n"):
        dataset, _, folder = line.partition("=")
        name, _, version = dataset.partition("@")
        if name and version and folder.startswith("/"):
            found.append(PackedRoot(folder, name, version))
    return found
