"""Ten million files: the memory it takes to list, plan and index them, then the index.

Its size, opening it, looking up in it, and what use by eight workers costs. The files are made up, the rest is
not: they are listed, planned and indexed as `deeplink pack` does it, and looked up as the Dataset does.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from benchmarks.rows import Row, make_row, table, write_rows
from deeplink.cache.catalog import Catalog
from deeplink.cache.format import block
from deeplink.cache.format.index import Index
from deeplink.cache.format.index_format import write_index
from deeplink.cache.format.names import NameCollector
from deeplink.cache.pack.building import Piece
from deeplink.cache.pack.plan import PackJob, planned_job
from deeplink.cache.source.selection import Picker, Selection
from deeplink.cache.source.source import EVERYTHING, Listing, Source
from deeplink.cache.store.index_copies import IndexCopies
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock
from deeplink.core.config import Config
from deeplink.core.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, SpawnContext

    from deeplink.core.types import Version

SAMPLES = 10_000_000
WORKERS = 8
_IN_A_FOLDER = 1_000
_SHARD_BYTES = 4 << 20
"""Ten thousand shards, the most that a dataset of ten million samples of 4 KiB should have."""
_RUNS = 5
_LOOKUPS = 20_000
_READ_ROWS = 200_000


class _NamesAlone(Source):
    """A source of as many files as wanted, named like ImageNet's, without a byte in any."""

    url = "generated://names"
    local = False

    def __init__(self, files: int) -> None:
        self._files = files

    @override
    def check(self) -> None:
        return

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        found = NameCollector()
        for first in range(0, self._files, _IN_A_FOLDER):
            numbers = range(first, min(first + _IN_A_FOLDER, self._files))
            folder = f"n{first // _IN_A_FOLDER:08d}"
            sizes = [4096 + number % 512 for number in numbers]
            found.add(
                f"train/{folder}/", [f"{folder}_{n:08d}.JPEG" for n in numbers], sizes, (n + 1 for n in numbers)
            )
        return Listing.of(self.url, found, Picker(wanted))

    @override
    def stat(self, key: str) -> tuple[int, int]:
        return len(key), 1

    @override
    def read(self, key: str, size: int) -> bytes:
        return bytes(size)

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(length)


def _planned(work: Path, files: int) -> PackJob:
    config = Config(catalog=work / "catalog", store=work / "store", state=work / "state", shard_bytes=_SHARD_BYTES)
    catalog = Catalog(config.catalog)
    list_source = _NamesAlone(files).listing
    job = planned_job(
        _NamesAlone(files), catalog, "names", config, list_source=list_source, members=0, append=False
    )
    job.put_aside(work)
    return job


def _pieces(job: PackJob) -> dict[int, Piece]:
    """Return what would be known of the shards if they had been packed."""
    draw, found = np.random.default_rng(0), {}
    for number, shard in enumerate(job.plan.shards):
        _, _, payloads = block.arrange(job.listing.sizes[shard.rows])
        offsets = np.cumsum([0, *payloads[:-1]], dtype=np.uint64)
        checksums = draw.integers(0, 1 << 63, shard.stop - shard.start, np.uint64)
        found[number] = job.kept(number, Piece(ShardId(f"{number:040x}"), 5 << 20, offsets, checksums))
    return found


def _written(pipe: Connection, path: Path, files: int) -> None:
    """Make an index as a packing does; say its version, the seconds to write it, and the most memory in MiB."""
    job = _planned(path.parent, files)
    made = job.content(_pieces(job), home="")
    began = time.perf_counter()
    version = write_index(path, made)
    seconds = time.perf_counter() - began
    job.keep_marks(path)
    pipe.send((version, seconds, _status("VmHWM") / 1024))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def _own_kib() -> int:
    """Return the KiB that are this process's alone and could not be had again from a file, page tables too."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    dirty = next(line for line in text.splitlines() if line.startswith("Private_Dirty:"))
    return int(dirty.split()[1]) + _status("VmPTE")


def _read(index: Index, seed: int) -> int:
    """Read random rows as a training does, a few keys too; return the bytes they stand for."""
    rng = np.random.default_rng(seed)
    total = 0
    for _ in range(_READ_ROWS // 256):
        rows = rng.integers(0, len(index), 256)
        total += int(index.file_offsets(rows).max()) + int(index.lengths[rows].sum())
        total += int((index.checksums[rows] & np.uint64(1)).sum())
    for row in rng.integers(0, len(index), 1_000).tolist():
        total += index.row(index.key(row))
    return total


def _worker(pipe: Connection, opened: Index | tuple[Path, Version], seed: int) -> None:
    """Open the index, unless the parent has, read in it, say how many KiB that took, and wait to be ended."""
    np.random.default_rng(0).integers(0, 9, 256)  # what numpy sets up at first use is not ours
    before = _own_kib()
    index = opened if isinstance(opened, Index) else Index(*opened)
    _read(index, seed)
    pipe.send(_own_kib() - before)
    pipe.recv()


def _workers_mib(context: SpawnContext | ForkContext, opened: Index | tuple[Path, Version]) -> float:
    """Return the MiB that the workers together took, all of them alive at once."""
    pipes = [context.Pipe() for _ in range(WORKERS)]
    workers = [
        context.Process(target=_worker, args=(there, opened, seed)) for seed, (_, there) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    extra = sum(here.recv() for here, _ in pipes)
    for here, _ in pipes:
        here.send(None)
    for worker in workers:
        worker.join()
    return float(extra) / 1024


def _bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    said = Path("/proc/self/io").read_text(encoding="ascii")
    return int(said.partition("rchar: ")[2].split()[0])


def _in_memory(path: Path) -> int:
    """Return how many bytes of a file are in the page cache: of one that was dropped, those read since."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum()) * mmap.PAGESIZE


def _rank(pipe: Connection, root: Path, version: Version, seed: int) -> None:
    """Open the index from its copy and read in it.

    Says the seconds to open it, the bytes read by system calls for it, and the KiB of memory: this rank's own, and
    of mapped files.
    """
    np.random.default_rng(0).integers(0, 9, 256)
    own, mapped, read, began = _own_kib(), _status("RssFile"), _bytes_read(), time.perf_counter()
    store = Store(root / "store", make=False)
    index = IndexCopies(store, Catalog(root / "catalog"), SystemClock()).open_copy("names", version)
    if not index.path.is_relative_to(store.root):
        raise AssertionError("there is no copy")
    seconds, read = time.perf_counter() - began, _bytes_read() - read
    _read(index, seed)
    pipe.send((seconds, read, _own_kib() - own, _status("RssFile") - mapped))


def _on_a_node(path: Path, version: Version) -> Iterator[Row]:
    """Open the index in one rank after another of a node, from a copy on its SSD."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        root = Path(folder)
        shared = Catalog(root / "catalog").path("names", version)
        shared.parent.mkdir(parents=True)
        shared.hardlink_to(path)
        context, found = multiprocessing.get_context("spawn"), []
        for seed in range(WORKERS):
            _drop(shared)
            here, there = context.Pipe()
            rank = context.Process(target=_rank, args=(there, root, version, seed))
            rank.start()
            there.close()
            seconds, read, own, mapped = here.recv()
            rank.join()
            # The copy is read by system calls; what is mapped is seen in the page cache.
            found.append((seconds, max(read if not seed else 0, _in_memory(shared)), own, mapped))
    seconds, read, own, mapped = zip(*found, strict=True)
    yield make_row("index: first rank of a node opens it, copying it", seconds[:1], "s")
    yield make_row("index: next rank opens the copy", [1e3 * each for each in seconds[1:]], "ms", at_most=20)
    yield make_row("index: read from shared storage, first rank", [read[0] / 2**20], "MiB")
    yield make_row("index: read from shared storage, eighth rank", [read[-1] / 2**20], "MiB", at_most=0)
    yield make_row("index: memory of a rank alone", [each / 1024 for each in own], "MiB")
    yield make_row("index: memory of a rank, shared with others", [each / 1024 for each in mapped], "MiB")


def _timed(what: Callable[[], object], times: int, unit: float) -> list[float]:
    """Return, per run, how long one of `times` took, in `unit` seconds."""
    runs = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        what()
        runs.append((time.perf_counter() - began) / times / unit)
    return runs


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _opens(path: Path, version: Version) -> Iterator[Row]:
    yield make_row("index: open", _timed(lambda: Index(path, version), 1, 1e-3), "ms", at_most=20)
    cold = []
    for _ in range(_RUNS):
        _drop(path)
        cold += _timed(lambda: Index(path, version), 1, 1e-3)[:1]
    yield make_row("index: open, file not in memory", cold, "ms", at_most=20)


def _lookups(index: Index) -> Iterator[Row]:
    rng = random.Random(0)  # noqa: S311 - a benchmark
    rows = [rng.randrange(len(index)) for _ in range(_LOOKUPS)]
    keys = [index.key(row) for row in rows]
    if [index.row(key) for key in keys] != rows:
        raise AssertionError("a key was found in another row than its own")
    by_key = _timed(lambda: [index.row(key) for key in keys], _LOOKUPS, 1e-6)
    yield make_row("index: look up by key, one at a time", by_key, "us", at_most=10)
    by_row = _timed(lambda: [index.key(row) for row in rows], _LOOKUPS, 1e-6)
    yield make_row("index: key of a row, one at a time", by_row, "us")
    batches = np.array(rows[: _LOOKUPS // 256 * 256]).reshape(-1, 256)
    places = _timed(lambda: [index.file_offsets(batch) for batch in batches], batches.size, 1e-6)
    yield make_row("index: place of a row, in batches of 256", places, "us")
    folder = keys[0].rpartition("/")[0]
    listed = _timed(lambda: index.listing(folder), 1, 1e-3)
    yield make_row(f"index: list a folder of {_IN_A_FOLDER:,} samples", listed, "ms")
    top = _timed(lambda: index.listing("train"), 1, 1e-3)
    yield make_row(f"index: list {len(index) // _IN_A_FOLDER:,} folders of {_IN_A_FOLDER:,}", top, "ms")
    yield make_row("index: read all of it and compare its digest", _timed(index.verify, 1, 1.0)[:1], "s")


def measure(work: Path, samples: int = SAMPLES) -> list[Row]:
    """Return the figures of an index of so many samples, made below `work` and removed at the end.

    Raises:
        OSError: there is no room for it (about 100 bytes per sample).
        EOFError: the process that makes it has failed, and said why.
    """
    with tempfile.TemporaryDirectory(dir=work) as folder:
        return list(_rows(Path(folder) / "index.arrow", samples))


def _rows(path: Path, samples: int) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    writer = context.Process(target=_written, args=(there, path, samples))
    writer.start()
    there.close()
    version, write_s, most_mib = here.recv()
    writer.join()
    yield make_row("index: write", [write_s], "s")
    yield make_row(f"index: list, plan and index {samples:,} files, most memory", [most_mib], "MiB", at_most=1024)
    # These first: pages of a file that is mapped stay in memory.
    yield from _opens(path, version)
    yield from _on_a_node(path, version)
    index = Index(path, version)
    each = (path.stat().st_size - len(index.key(0)) * samples) / samples
    yield make_row("index: bytes per sample without the key", [each], "B", at_most=64)
    yield from _lookups(index)
    for how, start, opened in (
        ("each opens it", context, (path, version)),
        ("forked with it open", multiprocessing.get_context("fork"), index),
    ):
        yield make_row(f"index: {WORKERS} workers, {how}", [_workers_mib(start, opened)], "MiB", at_most=50)


def main() -> None:
    """Measure, print, and leave the facts in build/bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where to make it [default: a new folder below TMPDIR]")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        rows = measure(Path(folder), args.samples)
    print(table(rows))
    print(write_rows("index", rows))


if __name__ == "__main__":
    main()
