"""One packed folder as file calls see it: a sample's bytes and stat, and what a folder holds."""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import KeyMissingError
from deeplink.cache.format import block
from deeplink.cache.format.block import SPAN
from deeplink.cache.pack.plan import kept_marks
from deeplink.cache.reader import Reader, ReadStats
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.ranged_file import RangedFile
from deeplink.core.types import Version
from deeplink.fs.library import DatasetPath, DatasetTree, LongSample, PathEntry, TreeEntry
from deeplink.paths.routing import MOST_TEXT, ROOTS_VARIABLE, PackedRoot, environment
from deeplink.scheduler.slurm.munge import vouch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from deeplink.core.config import Config

log = logging.getLogger(__name__)

_CLOCKS_S = 2.0
"""How far the clocks of a packer and of the storage may be apart."""
_MOST_MARKS = 1 << 24
"""Files of a dataset whose times of change are held in memory: 8 bytes each."""
_FAKE_INODE = 1 << 63
"""No real file has so high a number."""
_OWN_LINKS = 2
_OUT_OF_ORDER = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN})
"""What a storage says that does not answer: the cache still does."""
_NS = 1_000_000_000


def summed(every: Iterable[ReadStats]) -> ReadStats:
    """Return counts together, and the longest of the waits."""
    rows = [asdict(one) for one in every]
    longest = max((row.pop("longest_wait_s") for row in rows), default=0.0)
    counts: Counter[str] = sum(map(Counter, rows), Counter())
    return ReadStats(**counts, longest_wait_s=longest)


def packed_roots(names: Sequence[str] = (), config: Config | None = None) -> list[PackedRoot]:
    """Return the folders that datasets were packed from: of those named (`NAME[@VERSION]`), else of all."""
    config = config or load_config()
    catalog = Catalog(config.catalog)
    found = [root for text in names or catalog.names() if (root := _root(catalog, text, named=bool(names)))]
    if not found:
        raise DeepLinkError(
            f"no dataset of the catalog {catalog.root} was packed from a folder",
            remedy="`deeplink pack FOLDER NAME` packs one; then paths below FOLDER are served.",
            exit_code=2,
        )
    if len(os.fsencode(environment(found, {})[ROOTS_VARIABLE])) > MOST_TEXT:
        raise DeepLinkError(
            f"the catalog {catalog.root} has {len(found)} folders: too many for one variable",
            remedy="Name the datasets whose paths are to be served.",
            exit_code=2,
        )
    return found


def _root(catalog: Catalog, text: str, *, named: bool) -> PackedRoot | None:
    place = DatasetPath.parse(text)
    try:
        version = catalog.resolved(place.name, place.version)
        record = catalog.record(place.name, version)
        source = record.source if record is not None else catalog.open(place.name, version).source
    except DeepLinkError as problem:
        if named:
            raise
        log.warning("paths of dataset %s are not served: %s", place.name, problem)
        return None
    folder = source.removeprefix("file://").rstrip("/")
    if folder.startswith("/") and "\n" not in folder:
        return PackedRoot(folder, place.name, version)
    if named:
        raise DeepLinkError(
            f"dataset {place.name!r} was packed from {source}: no path leads there",
            remedy="Read it by `deeplink.Dataset`, or as deeplink:// (docs/reading.md).",
            exit_code=2,
        )
    return None


def memory_file(data: Buffer, name: str, mtime_ns: int | None = None) -> int:
    """Return a descriptor of a read-only file in memory that holds these bytes."""
    shown = os.fsdecode(os.fsencode(os.path.basename(name))[:100])  # noqa: PTH119 - a name of any bytes
    made = os.memfd_create(shown or "sample")
    try:
        left = memoryview(data).cast("B")
        while len(left):
            left = left[os.write(made, left) :]
        os.fchmod(made, 0o444)
        if mtime_ns is not None:
            os.utime(made, ns=(mtime_ns, mtime_ns))
        descriptor = os.open(f"/proc/self/fd/{made}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)
    return descriptor


class _WithDescriptor(io.IOBase):
    """A file with a descriptor for who needs one (mmap, numpy.fromfile, C code), opened when it is asked for."""

    mode, closefd, _descriptor = "rb", True, -1

    def _open_descriptor(self) -> int:
        raise NotImplementedError

    @override
    def fileno(self) -> int:
        if self._descriptor < 0:
            self._descriptor = self._open_descriptor()
            os.lseek(self._descriptor, self.tell(), os.SEEK_SET)
        return self._descriptor

    @override
    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()

    __del__ = close


class _RawSample(_WithDescriptor, io.BytesIO):
    """A sample's bytes where an open file has its descriptor."""

    def __init__(self, name: str, data: bytes, mtime_ns: Callable[[], int | None]) -> None:
        super().__init__(data)
        self.name, self._mtime_ns = name, mtime_ns

    @override
    def _open_descriptor(self) -> int:
        return memory_file(self.getvalue(), self.name, self._mtime_ns())

    @override
    def writable(self) -> bool:
        return False

    @override
    def write(self, _data: Any) -> int:
        raise io.UnsupportedOperation("write")

    @override
    def truncate(self, _size: int | None = None) -> int:
        raise io.UnsupportedOperation("truncate")


class _RawLongSample(_WithDescriptor, RangedFile):
    """The same of a sample of many MiB: its pieces come when they are read. Its descriptor is the file's own."""

    def __init__(self, name: str, sample: LongSample, path: str) -> None:
        super().__init__()
        self.name, self._sample, self._path = name, sample, path
        self.size, self._is_real = sample.bytes, False

    @override
    def _open_descriptor(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    @override
    def fetch(self, start: int, length: int) -> bytes:
        if not self._is_real:
            try:
                return self._sample.read(start, start + length)
            except DeepLinkError as problem:
                log.warning("%s is read itself: %s", self._path, problem)
                self._is_real = True
        return os.pread(self.fileno(), length, start)


class _FoundSample(NamedTuple):
    reader: Reader
    row: int
    bytes: int


class PackedFolder:
    """A packed folder, whose dataset is opened when a path below it is first asked for; for all threads and forks.

    Every answer may be None: then the real file system is to be asked.
    """

    def __init__(self, root: PackedRoot, config: Config | None, real_stat: Callable[..., os.stat_result]) -> None:
        self.root, self._config, self._stat = root, config, real_stat
        self._open: dict[PackedRoot, Reader] = {}
        self._marks: np.ndarray | None = None
        self._listed_unix = 0.0
        self._of_root: os.stat_result | None = None
        self._said = self._off = False
        self._given_up = Counter[int]()  # samples that the cache could not give, by process

    def _opened(self) -> Reader | None:
        if not self._open and not self._off:
            config = self._config or load_config()
            try:
                reader = Reader.open(
                    self.root.name, version=Version(self.root.version), config=config, vouch=vouch
                )
                record = Catalog(config.catalog).record(self.root.name, reader.version)
            except Exception:
                self._off = True  # each path below it would wait for the same error
                raise
            self._config, self._listed_unix = config, record.listed_unix if record else 0.0
            # Of threads that come at once, all go on with what the first one opened.
            self._open.setdefault(self.root, reader)
        return self._open.get(self.root)

    def _sample(self, inner: str) -> _FoundSample | None:
        reader = self._opened()
        try:
            row = reader.index.row(inner) if reader is not None else -1
        except KeyMissingError:
            return None
        if reader is None:
            return None
        return _FoundSample(reader, row, int(reader.index.column("lengths", range(row, row + 1))[0]))

    def open_raw(self, inner: str, name: str) -> io.BytesIO | io.RawIOBase | None:
        """Return a sample as what stands below a buffered file."""
        found = self._sample(inner)
        if found is None or self._config is None:
            return None
        if found.bytes > SPAN:
            place = DatasetPath(self.root.name, self.root.version, inner)
            sample = LongSample(PathEntry(place, found.reader, TreeEntry(inner, found.row)), self._config)
            return _RawLongSample(name, sample, f"{self.root.folder}/{inner}")
        return _RawSample(name, bytes(found.reader.read([found.row])[0]), partial(self._mtime_ns, found))

    def descriptor(self, inner: str) -> int | None:
        """Return an open descriptor of a sample, unless it is very long."""
        found = self._sample(inner)
        if found is None or found.bytes > SPAN:
            return None
        return memory_file(found.reader.read([found.row])[0], inner, self._mtime_ns(found))

    def stat(self, inner: str) -> os.stat_result | None:
        """Return a sample's stat: the file's size and time of change, the folder's owner, to be read only."""
        found = self._sample(inner)
        mtime_ns = self._mtime_ns(found) if found is not None else None
        if found is None or mtime_ns is None:
            return None
        if self._of_root is None:
            self._of_root = self._stat(self.root.folder)
        above, seconds = self._of_root, mtime_ns // _NS
        fields = (
            stat.S_IFREG | 0o444,
            _FAKE_INODE | block.checksum(f"{self.root.folder}/{inner}".encode(errors="surrogatepass")),
            *(above.st_dev, 1, above.st_uid, above.st_gid, found.bytes),
            *(seconds, seconds, seconds),
        )
        named: dict[str, float] = {
            "st_blksize": above.st_blksize,
            "st_blocks": -(-found.bytes // 512),
            "st_rdev": 0,
        }
        for kind in ("st_atime", "st_mtime", "st_ctime"):
            named |= {kind: seconds + 1e-9 * (mtime_ns % _NS), f"{kind}_ns": mtime_ns}
        return os.stat_result(fields, named)

    def listing(self, inner: str) -> list[tuple[str, bool]] | None:
        """Return the names in a folder, and whether each is a folder, unless names came or went since the pack."""
        reader = self._opened()
        if reader is None or (inner and not reader.index.rows_below(inner)):
            return None
        found = [
            (entry.path.rpartition("/")[2], entry.is_folder) for entry in DatasetTree(reader.index).entries(inner)
        ]
        try:
            facts = self._stat(f"{self.root.folder}/{inner}" if inner else self.root.folder)
        except OSError as problem:
            return found if problem.errno in _OUT_OF_ORDER else None
        # A folder without files is not packed. Most file systems count folders as links; of others nobody knows.
        is_whole = _OWN_LINKS <= facts.st_nlink <= _OWN_LINKS + sum(is_folder for _, is_folder in found)
        return found if is_whole and facts.st_mtime < self._listed_unix - _CLOCKS_S else None

    def _mtime_ns(self, found: _FoundSample) -> int | None:
        if self._marks is None:
            index = found.reader.index
            kept = kept_marks(index) if len(index) <= _MOST_MARKS else None
            self._marks = np.empty(0, np.int64) if kept is None else kept.view(np.int64)
        return int(self._marks[found.row]) if len(self._marks) else None

    def failed(self, problem: Exception, *, samples: int) -> None:
        """Note that the cache could not answer, and say so the first time."""
        self._given_up[os.getpid()] += samples
        if not self._said:
            self._said = True
            text = "paths below %s are read from the files themselves where the cache fails: %s"
            log.warning(text, self.root.folder, problem)

    def stats(self) -> ReadStats:
        """Return where the samples came from that this process read."""
        found = summed(reader.stats() for reader in self._open.values())
        return replace(found, source_samples=found.source_samples + self._given_up[os.getpid()])
