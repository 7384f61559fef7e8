"""Which files of a source are packed: globs, what is left out by default, links, and files that are bad."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.cache.errors import SourceError
from deeplink.cache.format.names import checked_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.cache.format.names import NameCollector

DEFAULT_EXCLUDES = (
    ".git",
    ".hg/",
    ".svn/",
    ".bzr/",
    "CVS/",
    ".DS_Store",
    "._*",
    "__MACOSX/",
    ".Spotlight-V100/",
    ".Trashes/",
    "Thumbs.db",
    "desktop.ini",
    ".directory",
    ".Trash-*/",
    ".nfs????????????????*",
    ".ipynb_checkpoints/",
)
"""Version control and what desktops, NFS and notebooks leave behind."""
_MOST_BAD = 10_000
"""Files that cannot be packed that are kept by name; more are counted."""
_SAID = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which files of a source become samples.

    A glob without a slash is compared with each name below the source, of files and folders; one with a slash
    with the whole path (`*` stays within a name, `**` does not). One that ends in a slash is for folders alone.
    """

    include: tuple[
        str, ...
    ] = ()  # files that none of these takes, nor a folder above them, are left out; (): none
    exclude: tuple[str, ...] = ()  # files and folders that one of these takes are left out
    default_excludes: bool = True  # leave out DEFAULT_EXCLUDES too
    follow_links: bool = False  # take what links out of the source and links to folders lead to
    skip_bad: bool = False  # leave out what cannot be packed, instead of refusing the source
    anchored: bool = (
        False  # globs of `include` are whole paths also without a slash; other folders are not entered
    )


@dataclass(slots=True)
class Picker:
    """Applies a selection while a source is listed: what it leaves out is counted, what is bad is gathered.

    Safe to use from several threads.
    """

    wanted: Selection
    left_out: Counter[str] = field(default_factory=Counter)  # glob -> files and folders
    bad: dict[str, SourceError] = field(default_factory=dict)  # by key, in the order found; the first 10,000
    bad_count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _out: tuple[_Globs, _Globs] = field(init=False)
    _in: tuple[_Globs, _Globs] | None = None
    _above: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        excluded = (*self.wanted.exclude, *(DEFAULT_EXCLUDES if self.wanted.default_excludes else ()))
        self._out = _Globs.of(excluded, folders=False), _Globs.of(excluded, folders=True)
        included = self.wanted.include
        if self.wanted.anchored:
            self._in = _Globs(None, _compiled(included), (), included), _Globs.of((), folders=True)
            self._above = _compiled(sorted({above for glob in included for above in _folders(glob)}))
        elif included:
            self._in = _Globs.of(included, folders=False), _Globs.of(included, folders=True)

    def enters(self, folder: str) -> bool:
        """Tell whether to look into a folder: its path below the source, without a slash at its end."""
        if self.wanted.anchored and not (self._above and self._above.fullmatch(folder)):
            return False
        return not self._is_out(folder, 1)

    def takes(self, key: str) -> bool:
        """Tell whether to take a file: its path below the source. The folders above it were entered."""
        if self._is_out(key, 0):
            return False
        if self._in is None or self._in[0].found(key) or self._in[1].found_above(key):
            return True
        self._count("(not --include)")
        return False

    def _is_out(self, path: str, kind: int) -> bool:
        glob = self._out[kind].found(path)
        if glob:
            self._count(glob)
        return bool(glob)

    def _count(self, glob: str) -> None:
        with self._lock:
            self.left_out[glob] += 1

    def takes_below(self, key: str) -> bool:
        """Tell whether to take a file of a source that has no folders to enter: those above it count too."""
        if not (all(map(self.enters, _folders(key))) and self.takes(key)):
            return False
        try:
            checked_key(key)  # such a source may hold any names: `../x`, `a//b`
        except SourceError as problem:
            self.refuse(key, problem)
            return False
        return True

    def refuse(self, key: str, problem: SourceError) -> None:
        """Note that a file, or a folder with all below it, cannot be packed."""
        with self._lock:
            self.bad_count += 1
            if len(self.bad) < _MOST_BAD:
                self.bad[key] = problem

    def add(
        self, found: NameCollector, prefix: str, names: Sequence[str], sizes: Sequence[int], marks: Sequence[int]
    ) -> None:
        """Give `found` files whose keys are `prefix` and their names; names that cannot be keys are bad."""
        try:
            found.add(prefix, names, sizes, marks)
        except (SourceError, UnicodeEncodeError):
            good = []
            for row, name in enumerate(names):
                try:
                    checked_key(prefix + name)
                    good.append(row)
                except SourceError as problem:
                    self.refuse(prefix + name, problem)
            kept = ([column[row] for row in good] for column in (names, sizes, marks))
            found.add(prefix, *kept)  # type: ignore[arg-type]

    def check(self, url: str) -> None:
        """Return if nothing bad was found, or such is left out; else raise one error that names all of it."""
        if not self.bad or self.wanted.skip_bad:
            return
        if self.bad_count == 1:
            raise next(iter(self.bad.values()))
        lines = [
            f"\n  {said(problem, url)}" for problem in sorted(self.bad.values(), key=lambda one: one.key)[:_SAID]
        ]
        more = f"\n  ... and {self.bad_count - _SAID:,} more" if self.bad_count > _SAID else ""
        raise SourceError(
            url,
            f"{self.bad_count:,} files cannot be packed:{''.join(lines)}{more}",
            "Mend or remove them, or leave them out: --skip-bad, or --exclude GLOB; --follow-links for links.",
        )


def said(problem: SourceError, url: str) -> str:
    """Return an error's words without the source, which was named already."""
    return str(problem).removeprefix(f"source {url}: ")


@dataclass(frozen=True, slots=True)
class _Globs:
    """Globs compiled for files or for folders: those for names, and those for paths."""

    names: re.Pattern[str] | None
    paths: re.Pattern[str] | None
    name_globs: tuple[str, ...]
    path_globs: tuple[str, ...]

    @classmethod
    def of(cls, globs: Sequence[str], *, folders: bool) -> _Globs:
        usable = [glob for glob in globs if folders or not glob.endswith("/")]
        names = tuple(glob for glob in usable if "/" not in glob.rstrip("/"))
        paths = tuple(glob for glob in usable if "/" in glob.rstrip("/"))
        return cls(_compiled(names), _compiled(paths), names, paths)

    def found(self, path: str) -> str:
        """Return the glob that takes a path, or its last name; empty where none does."""
        if self.names is not None and (match := self.names.fullmatch(path, path.rfind("/") + 1)):
            return self.name_globs[(match.lastindex or 1) - 1]
        if self.paths is not None and (match := self.paths.fullmatch(path)):
            return self.path_globs[(match.lastindex or 1) - 1]
        return ""

    def found_above(self, key: str) -> bool:
        """Tell whether a glob takes a folder above a file."""
        return any(map(self.found, _folders(key)))


def _folders(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def _compiled(globs: Sequence[str]) -> re.Pattern[str] | None:
    if not globs:
        return None
    return re.compile("|".join(f"({glob_pattern(glob.strip('/'))})" for glob in globs), re.DOTALL)


def glob_pattern(glob: str) -> str:
    """Return a glob as a regular expression without groups of its own.

    Raises:
        SourceError: its brackets make no set of letters.

    >>> bool(re.fullmatch(glob_pattern("train/**/*.jpg"), "train/a/b/1.jpg"))
    True
    >>> bool(re.fullmatch(glob_pattern("train/*.jpg"), "train/a/1.jpg"))
    False
    """
    found = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/]+\])", glob):
        if part == "**/":
            found += "(?:.*/)?"
        elif part == "**":
            found += ".*"
        elif part == "*":
            found += "[^/]*"
        elif part == "?":
            found += "[^/]"
        elif part.startswith("[") and part.endswith("]"):
            inner = part[1:-1].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            found += f"[^/{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
        else:
            found += re.escape(part)
    try:
        re.compile(found)
    except re.error as problem:
        raise SourceError("", f"{glob!r} is no glob: {problem}", "Such as '*.jpg' or 'train/**'.") from None
    return found
