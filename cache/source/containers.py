"""Files that hold many samples each as a source: tars, and tables in parquet or Arrow files.

One path or URL names the files, with globs and braces: `/data/train-{000..146}.tar`. All lie equally deep, so
that a sample's key alone says which file it is in: `train-000/0001.jpg` is `0001.jpg` in `train-000.tar`. What is
in a file is found by looking through it, also by a node that reads a few samples of it again; what was found is
kept for the last files, up to 512 MiB.
"""

from __future__ import annotations

import io
import re
import tarfile
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.format.names import NameCollector
from deeplink.cache.source.selection import Picker, Selection
from deeplink.cache.source.source import EVERYTHING, Listing, Source, check_size
from deeplink.core.ranged_file import RangedFile
from deeplink.core.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future


_HELD_BYTES = 512 << 20
_LISTED_AHEAD = 4
_OPENED_AT_ONCE = 8
"""Files that readers look through at the same time, at the most; two that share a lock wait for each other."""
_MOST_FILES = 1_000_000
_MAGIC = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RUN = re.compile(r"(\d+)\.\.(\d+)")


class ContainerFile(Protocol):
    """What is in one file. Reading is safe from several threads."""

    @property
    def held_bytes(self) -> int:
        """How much memory it takes, about."""
        ...

    def entries(self) -> Iterable[tuple[str, int | SourceError]]:
        """Yield each sample's name and size in bytes, or why it cannot be packed."""
        ...

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the bytes of samples, in order. Raises KeyError for one that is not in the file."""
        ...

    def size(self, name: str) -> int:
        """Return a sample's bytes. Raises KeyError."""
        return len(self.read([name])[0])

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return up to `length` bytes of a sample from `start`. Raises KeyError."""
        return self.read([name])[0][start : start + length]


class FileRanges(RangedFile):
    """A file of a source."""

    def __init__(self, files: Source, name: str, size: int) -> None:
        self._files, self._name, self.size = files, name, size

    @override
    def fetch(self, start: int, length: int) -> bytes:
        return self._files.read_range(self._name, start, length)


class ContainerSource(Source):
    """Samples in files of one kind, whose names end in `suffix`."""

    batched = True  # samples that lie one after another are read at once

    def __init__(
        self,
        url: str,
        files: Source,
        pattern: str,
        suffix: str,
        opened: Callable[[Source, str, int], ContainerFile],
    ) -> None:
        self.url, self.local = url, files.local
        self._files, self._pattern, self._suffix, self._opened = files, pattern, suffix, opened
        self._depth = pattern.count("/") + 1
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in range(_OPENED_AT_ONCE)]
        self._open: OrderedDict[str, tuple[tuple[int, int], ContainerFile]] = OrderedDict()

    def _named(self) -> list[tuple[SampleKey, int, int]]:
        """Return each file's name below the root, size and mark, in the order of the samples' keys."""
        globs = expanded(self._pattern)
        if any(map(_MAGIC.search, globs)):
            exactly = Selection(include=tuple(globs), anchored=True, default_excludes=False, follow_links=True)
            listing = self._files.listing(exactly)
            found = list(zip(listing.keys, listing.sizes.tolist(), listing.marks.tolist(), strict=True))
        else:
            found = [(SampleKey(name), *self._files.stat(name)) for name in sorted(set(globs))]
        return sorted(found, key=lambda one: f"{one[0].removesuffix(self._suffix)}/".encode())

    @override
    def check(self) -> None:
        self._named()

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        found, picker = NameCollector(), Picker(wanted)
        named = self._named()
        marked = all(mark for _, _, mark in named)
        for (name, _, mark), looked in self._looked_through(named):
            prefix = f"{name.removesuffix(self._suffix)}/"
            names: list[str] = []
            sizes: list[int] = []
            try:
                entries = looked.result()
            except SourceError as problem:
                if problem.may_pass:
                    raise
                picker.refuse(name, problem)
                continue
            for below, size in sorted(entries, key=lambda one: one[0].encode(errors="surrogateescape")):
                if not picker.takes_below(prefix + below):
                    continue
                if names and names[-1] == below:
                    picker.refuse(prefix + below, SourceError.bad_key(prefix + below, f"it is twice in {name}"))
                elif isinstance(size, SourceError):
                    picker.refuse(prefix + below, size)
                else:
                    names.append(below)
                    sizes.append(size)
            picker.add(found, prefix, names, sizes, [mark] * len(names))
        access = self._files.access_of([name for name, _, _ in named])
        return Listing.of(self.url, found, picker, marked=marked, access=access)

    def _looked_through(
        self, named: Sequence[tuple[str, int, int]]
    ) -> Iterator[tuple[tuple[str, int, int], Future[list[tuple[str, int | SourceError]]]]]:
        """Yield what is in each file; some are looked through at once."""
        waiting = iter(named)
        under_way: deque[tuple[tuple[str, int, int], Future[list[tuple[str, int | SourceError]]]]] = deque()
        with ThreadPoolExecutor(_LISTED_AHEAD, thread_name_prefix="deeplink-list") as pool:
            try:
                while True:
                    for file in islice(waiting, _LISTED_AHEAD - len(under_way)):
                        under_way.append((file, pool.submit(self._entries, *file)))
                    if not under_way:
                        return
                    yield under_way.popleft()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _entries(self, name: str, size: int, mark: int) -> list[tuple[str, int | SourceError]]:
        container = self._opened(self._files, name, size)
        entries = list(container.entries())
        self._keep(name, (size, mark), container)
        return entries

    def _keep(self, name: str, facts: tuple[int, int], container: ContainerFile) -> None:
        with self._lock:
            self._open[name] = (facts, container)
            self._open.move_to_end(name)
            while len(self._open) > 1 and sum(one.held_bytes for _, one in self._open.values()) > _HELD_BYTES:
                self._open.popitem(last=False)

    def _container(self, name: str) -> ContainerFile:
        try:
            facts = self._files.stat(name)
        except SourceError as problem:
            if isinstance(problem.__cause__, FileNotFoundError):
                raise SourceError.gone(self._files.url, name, str(problem.__cause__)) from problem.__cause__
            raise
        if (known := self._known(name, facts)) is not None:
            return known
        with self._opening[hash(name) % _OPENED_AT_ONCE]:  # one thread looks through it, and the others find it
            if (known := self._known(name, facts)) is None:
                known = self._opened(self._files, name, facts[0])
                self._keep(name, facts, known)
        return known

    def _known(self, name: str, facts: tuple[int, int]) -> ContainerFile | None:
        with self._lock:
            known = self._open.get(name)
            if known is None or known[0] != facts:
                return None
            self._open.move_to_end(name)
            return known[1]

    def _split(self, key: str) -> tuple[str, str]:
        """Return the file that a sample is in, and its name there."""
        parts = key.split("/", self._depth)
        if len(parts) <= self._depth:
            raise SourceError.unreadable(self.url, key, "no file of the source has such a sample")
        return "/".join(parts[: self._depth]) + self._suffix, parts[-1]

    def _missing(self, key: str, name: str) -> SourceChangedError:
        return SourceChangedError(self.url, key, f"{name} does not hold it")

    @override
    def stat(self, key: str) -> tuple[int, int]:
        name, below = self._split(key)
        try:
            return self._container(name).size(below), self._files.stat(name)[1]
        except KeyError:
            raise self._missing(key, name) from None

    @override
    def read(self, key: str, size: int) -> bytes:
        return self.read_many([key], [size])[0]

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        name, below = self._split(key)
        try:
            data = self._container(name).read_range(below, start, length)
        except KeyError:
            raise self._missing(key, name) from None
        check_size(self.url, key, start + length, start + len(data))
        return data

    @override
    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        by_file: dict[str, list[tuple[int, str]]] = {}
        for row, key in enumerate(names):
            file, below = self._split(key)
            by_file.setdefault(file, []).append((row, below))
        found = [b""] * len(names)
        for file, wanted in by_file.items():
            try:
                parts = self._container(file).read([below for _, below in wanted])
            except KeyError as missing:
                row = next((row for row, below in wanted if below == missing.args[0]), wanted[0][0])
                raise self._missing(names[row], file) from None
            for (row, _), data in zip(wanted, parts, strict=True):
                check_size(self.url, names[row], sizes[row], len(data))
                found[row] = data
        return found


def expanded(pattern: str) -> list[str]:
    """Return a pattern's alternatives: `{a,b}` and `{000..146}` as a shell expands them; globs stay.

    Raises:
        SourceError: there are more than a million of them.

    >>> expanded("x-{08..10}.{tar,bin}")
    ['x-08.tar', 'x-08.bin', 'x-09.tar', 'x-09.bin', 'x-10.tar', 'x-10.bin']
    """
    literals = _BRACES.split(pattern)
    choices: list[list[str]] = []
    count = 1
    for at, part in enumerate(literals):
        if at % 2 == 0:
            choices.append([part])
        elif run := _RUN.fullmatch(part):
            first, last = int(run[1]), int(run[2])
            width = len(run[1]) if run[1].startswith("0") or len(run[1]) == len(run[2]) else 0
            count *= abs(last - first) + 1
            if count <= _MOST_FILES:
                numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
                choices.append([f"{number:0{width}d}" for number in numbers])
        elif "," in part:
            choices.append(part.split(","))
            count *= len(choices[-1])
        else:
            choices.append([f"{{{part}}}"])
        if count > _MOST_FILES:
            raise SourceError(pattern, f"its braces name more than {_MOST_FILES:,} files", "Use a glob: *.")
    return ["".join(parts) for parts in product(*choices)]


SUFFIX = ".tar"
_BUFFER_HERE, _BUFFER_AWAY = 64 << 10, 8 << 20
"""Read at once when a tar is looked through: where requests take long, samples are read along with their heads."""
_GAP = 64 << 10
"""Samples closer than this are read at once, and what is between them is thrown away."""
_MOST_AT_ONCE = 16 << 20
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
"""How files of gzip, bzip2, xz, zstd and lz4 begin."""
_CUT = ("unexpected end", "truncated header", "empty header")
"""What tarfile says of a tar that ends within a file or its head."""
_BLOCK = tarfile.BLOCKSIZE
_AGAIN = "Fetch it again."
_EACH_BYTES = 200
"""Of memory, a sample, about."""

Extent = tuple[int, int]
"""Where a file's bytes begin in a tar, and how many there are."""


class TarContainer(ContainerFile):
    """The files in one uncompressed tar."""

    def __init__(self, files: Source, name: str, size: int) -> None:
        self._files, self._name = files, name
        self._extents: dict[str, Extent] = {}
        self._bad: list[tuple[str, SourceError]] = []
        buffer = io.BufferedReader(FileRanges(files, name, size), _BUFFER_HERE if files.local else _BUFFER_AWAY)
        try:
            with tarfile.open(fileobj=buffer, mode="r:") as archive:
                for entry in archive:
                    self._take(entry, size)
                    archive.members.clear()  # type: ignore[attr-defined]  # it keeps each, with all its fields, for ever
                buffer.seek(archive.offset)
                self._unended = self._no_end(archive.offset, buffer.read(_BLOCK), size)
        except tarfile.TarError as problem:
            what, remedy = f"is no tar: {problem}", "It must be a tar that is not compressed."
            if not size:
                what, remedy = "is empty", _AGAIN
            elif files.read_range(name, 0, min(size, 6)).startswith(_COMPRESSED):
                what, remedy = "is compressed: its files cannot be read one by one", "Decompress it."
            elif isinstance(problem, tarfile.ReadError) and any(text in str(problem) for text in _CUT):
                what, remedy = f"is cut short: it ends at {size:,} bytes, within a file", _AGAIN
            raise SourceError(files.url, f"{name!r} {what}", remedy, key=name) from problem

    def _no_end(self, at: int, block: bytes, size: int) -> SourceError | None:
        """Return an error unless an empty block ends the tar; tarfile takes all that is no head for the end."""
        if len(block) < _BLOCK:
            what = f"is cut short: it ends at {size:,} bytes, without the empty blocks that end a tar"
            remedy = "Fetch it again; if nothing is missing, `truncate -s +1024 FILE` ends it."
        elif any(block):
            what, remedy = f"is damaged: there is no file's head at {at:,} bytes", _AGAIN
        else:
            return None
        return SourceError(self._files.url, f"{self._name!r} {what}", remedy, key=self._name)

    def _take(self, entry: tarfile.TarInfo, size: int) -> None:
        path = entry.name.removeprefix("./")
        if entry.isdir():
            return
        extent = (entry.offset_data, entry.size)
        problem = ""
        if entry.islnk() and entry.linkname.removeprefix("./") in self._extents:
            extent = self._extents[entry.linkname.removeprefix("./")]
        elif not entry.isreg() or entry.issparse():
            problem = "it is no plain file, nor a hard link to one before it"
        elif sum(extent) > size:
            problem = "the tar ends within it"
        elif path in self._extents:
            problem = "it is there twice"
        if problem:
            self._bad.append((path, SourceError.bad_key(f"{self._name}/{path}", problem)))
        else:
            self._extents[path] = extent

    @property
    @override
    def held_bytes(self) -> int:
        return _EACH_BYTES * len(self._extents)

    @override
    def entries(self) -> Iterable[tuple[str, int | SourceError]]:
        if self._unended:  # reading what was packed of it before goes on
            raise self._unended
        yield from ((path, size) for path, (_, size) in self._extents.items())
        yield from self._bad

    @override
    def size(self, name: str) -> int:
        return self._extents[name][1]

    @override
    def read_range(self, name: str, start: int, length: int) -> bytes:
        first, size = self._extents[name]
        return self._files.read_range(self._name, first + start, min(length, max(size - start, 0)))

    @override
    def read(self, names: Sequence[str]) -> list[bytes]:
        extents = [self._extents[name] for name in names]
        found = [b""] * len(names)
        for start, stop, rows in _runs(extents):
            data = self._files.read_range(self._name, start, stop - start)
            for row in rows:
                first, size = extents[row]
                found[row] = data[first - start : first - start + size]
        return found


def _runs(extents: Sequence[Extent]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield which parts of the tar to read, and the extents' numbers in each; one alone may be of any length."""
    start = stop = 0
    rows: list[int] = []
    for row in sorted(range(len(extents)), key=extents.__getitem__):
        first, size = extents[row]
        if rows and (first - stop > _GAP or first + size - start > _MOST_AT_ONCE):
            yield start, stop, rows
            rows = []
        if not rows:
            start = stop = first
        rows.append(row)
        stop = max(stop, first + size)
    if rows:
        yield start, stop, rows
