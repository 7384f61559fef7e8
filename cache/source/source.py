"""What a source is: it lists small files, or the samples within larger ones, and reads each by its key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from typing_extensions import override

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.source.selection import Selection, said

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from deeplink.cache.format.names import NameCollector, Names
    from deeplink.cache.source.selection import Picker

Entry = tuple[str, int, int]
"""A file's name, size and change mark; or a folder's name, which ends in a slash, and two zeros."""
EVERYTHING = Selection(default_excludes=False)
ITERABLE = "iterable:"
"""The URL of whatever was packed from a Python iterable: nothing can be read from it again."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The files of a source as they were listed, sorted by key."""

    keys: Names  # their paths below the root
    sizes: np.ndarray  # int64, bytes
    marks: np.ndarray  # uint64, of modification time or entity tag: changes when a file does; 0 for none
    marked: bool  # whether every file has a mark, so that an unchanged listing means unchanged files
    left_out: Mapping[str, int] = field(default_factory=dict)  # per glob, how many files and folders it left out
    bad: Mapping[str, str] = field(default_factory=dict)  # per file that cannot be packed, and was skipped, why
    bad_count: int = 0  # all such files: `bad` has the first 10,000
    access: str = ""  # who may read all of them (`SourceAccess`); empty: that is not known
    listed_unix: float = 0.0  # before they were listed; 0: that was not noted

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(
        cls, url: str, found: NameCollector, picker: Picker, *, marked: bool = False, access: str = ""
    ) -> Listing:
        """Return the files gathered at `url`; `marked`: each is known to have a mark, even where that is 0."""
        picker.check(url)
        if not found and picker.wanted.anchored:
            patterns = ", ".join(picker.wanted.include[:3])
            raise SourceError(url, f"no file below it is called {patterns}", "Mend the pattern.")
        if not found:
            left_out = ", ".join(f"{glob} {count:,}" for glob, count in picker.left_out.items())
            raise SourceError(url, "it holds no files" + (f" but those left out: {left_out}" * bool(left_out)))
        names, sizes, marks = found.finished()
        return cls(
            names,
            sizes,
            marks,
            marked=marked or bool(marks.all()),
            left_out=dict(picker.left_out),
            bad={key: said(problem, url) for key, problem in picker.bad.items()},
            bad_count=picker.bad_count,
            access=access,
        )


class Source(Protocol):
    """A root below which the small files are. Reading is safe from several threads."""

    url: str
    local: bool  # a folder of this machine's file systems, whose files are opened in microseconds when warm
    batched: bool = False  # `read_many` has many requests under way at once
    elsewhere: bool = True  # `url` opens it on other nodes too, and later

    def check(self) -> None:
        """Look whether there is a folder at all, without listing it."""
        ...

    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        """Return all files that are wanted, sorted by key; one pass, 30 bytes of memory a file besides names."""
        ...

    def access_of(self, _keys: Sequence[str]) -> str:
        """Return who may read all of these files (`SourceAccess`); empty where that is not known."""
        return ""

    def stat(self, key: str) -> tuple[int, int]:
        """Return a file's size in bytes, and its change mark as it is now, 0 where there is none."""
        ...

    def read(self, key: str, size: int) -> bytes:
        """Return a file's bytes, which must be `size`."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from `start`."""
        ...

    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Return the bytes of some files, in order."""
        return [self.read(name, size) for name, size in zip(names, sizes, strict=True)]

    def fill(self, names: Names, sizes: Sequence[int], into: memoryview) -> None:
        """Read some files one after another into `into`, which has a byte more than they have."""
        at = 0
        for data in self.read_many(list(names), sizes):
            into[at : at + len(data)] = data
            at += len(data)


def check_size(url: str, key: str, size: int, found: int) -> None:
    """Return if a file has the size it was listed with."""
    if found != size:
        more = "more than " if found > size else ""
        raise SourceChangedError(url, key, f"{more}{min(found, size):,} bytes where {size:,} were listed")


def walk(entries: Callable[[str], Sequence[Entry]], found: NameCollector, picker: Picker) -> None:
    """Gather all files below a root, folder by folder, in the order of the keys' bytes.

    A folder that cannot be listed is bad; the root, or one that was not reached, an error.
    """
    # A folder counts with its slash, so the order within each folder gives that of all keys.
    stack: list[tuple[str, Iterator[Entry]]] = [("", iter(sorted(entries(""))))]
    while stack:
        folder, rest = stack[-1]
        names: list[str] = []
        sizes: list[int] = []
        marks: list[int] = []
        deeper = ""
        for name, size, mark in rest:
            if name.endswith("/"):
                deeper = folder + name
                break
            names.append(name)
            sizes.append(size)
            marks.append(mark)
        picker.add(found, folder, names, sizes, marks)
        if deeper:
            try:
                stack.append((deeper, iter(sorted(entries(deeper)))))
            except SourceError as problem:
                if problem.may_pass:
                    raise
                picker.refuse(deeper, problem)
        else:
            stack.pop()


_NOBODY = -1
"""An owner that no process has: what is packed belongs to several."""
_READS, _ENTERS = 0o4, 0o5


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """What a source's folder and all that is packed of it have in common."""

    owner: int  # the user's number
    group: int  # its number
    mode: int  # of files: 0o644, 0o640 or 0o600

    @override
    def __str__(self) -> str:
        return f"{self.owner}:{self.group}:{self.mode:04o}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the access that a text means. Raises ValueError.

        >>> str(SourceAccess.parse("1000:100:0640"))
        '1000:100:0640'
        """
        owner, group, mode = text.split(":")
        return cls(int(owner), int(group), int(mode, 8))

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """Return the access that a folder gives, with those that lead to it; None where it cannot be looked at."""
        try:
            here, *above = (path.stat() for path in (folder, *folder.parents))
        except OSError:
            return None
        # A folder's group is shut out by the group's bits, whatever others may do.
        shut = [one for one in above if ~one.st_mode & 0o011]
        mode = 0o600
        if not (~here.st_mode & 0o055 or shut):
            mode = 0o644
        elif not ~here.st_mode & 0o050 and all(one.st_mode & 0o010 and one.st_gid == here.st_gid for one in shut):
            mode = 0o640
        return cls(here.st_uid, here.st_gid, mode)

    @property
    def is_for_group(self) -> bool:
        """Whether the group may read it, and others may not."""
        return bool(self.mode & 0o040) and not self.mode & 0o004

    def narrowed(self, facts: os.stat_result, *, folder: bool = False) -> Self:
        """Return what is left of it where this file, or this folder, is among what is packed."""
        bits = _ENTERS if folder else _READS
        if facts.st_mode & bits * 0o11 == bits * 0o11:
            return self
        is_for_group = facts.st_gid == self.group and facts.st_mode & bits << 3 == bits << 3
        owner = self.owner if facts.st_uid == self.owner else _NOBODY
        return replace(self, owner=owner, mode=self.mode & (0o640 if is_for_group else 0o600))

    def allows(self, user: int, groups: Collection[int]) -> bool:
        """Tell whether a user, who is in these groups, may read it."""
        return bool(user in {0, self.owner} or self.mode & 0o004 or (self.mode & 0o040 and self.group in groups))
