"""An index of ten million samples: its size, opening it, looking up in it, and what use by eight workers costs.

The samples are made up, the index is not: it is written, opened and read as `deeplink pack` and the Dataset do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from benchmarks.rows import Row, make_row, table, write_rows
from deeplink.cache.index import Index, IndexContent, ShardEntry, write_index
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, SpawnContext

    from deeplink.types import Version

SAMPLES = 10_000_000
WORKERS = 8
_IN_A_CLASS = 1_000
_IN_A_SHARD = 1_000
"""4 MiB of 4 KiB samples: ten thousand shards, the most that a dataset of ten million should have."""
_SAMPLE_BYTES = 4_096
_IN_A_BLOCK = 255
_RUNS = 5
_LOOKUPS = 20_000
_READ_ROWS = 200_000
_MIB = 1 << 20


def _keys(samples: int) -> pa.LargeStringArray:
    """Return `train/CCCCCC/IIIIIIII.jpg` for each sample: 26 bytes, in order."""
    pattern = np.frombuffer(b"train/000000/00000000.jpg", np.uint8)
    text = np.tile(pattern, (samples, 1))
    for start, digits, value in ((6, 6, np.arange(samples) // _IN_A_CLASS), (13, 8, np.arange(samples))):
        rest = value
        for place in range(start + digits - 1, start - 1, -1):
            text[:, place] += (rest % 10).astype(np.uint8)
            rest = rest // 10
    ends = np.arange(samples + 1, dtype=np.int64) * len(pattern)
    return pa.LargeStringArray.from_buffers(samples, pa.py_buffer(ends), pa.py_buffer(text))


def content(samples: int) -> IndexContent:
    """Return what an index of so many samples of 4 KiB is made of."""
    row = np.arange(samples)
    inside = row % _IN_A_SHARD
    shards = -(-samples // _IN_A_SHARD)
    blocks = -(-_IN_A_SHARD // _IN_A_BLOCK) + 1
    offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(_MIB) + np.uint64(8192)
    return IndexContent(
        source="/data/made-up",
        shards=[
            ShardEntry(id=ShardId(f"{number:040x}"), bytes=5 * _MIB, samples=_IN_A_SHARD, blocks=blocks)
            for number in range(shards)
        ],
        block_offsets=[offsets] * shards,
        keys=_keys(samples),
        shard=(row // _IN_A_SHARD).astype(np.uint32),
        block=(inside // _IN_A_BLOCK).astype(np.uint32),
        offset=(inside % _IN_A_BLOCK * _SAMPLE_BYTES).astype(np.uint32),
        length=np.full(samples, _SAMPLE_BYTES, np.uint64),
        checksum=np.random.default_rng(0).integers(0, 1 << 63, samples, np.uint64),
    )


def _written(pipe: Connection, path: Path, samples: int) -> None:
    """Write the index; say its version, the seconds and the most memory it took, in MiB."""
    made = content(samples)
    began = time.perf_counter()
    version = write_index(path, made)
    pipe.send((version, time.perf_counter() - began, _status("VmHWM") / 1024))


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
    _read_nothing = np.random.default_rng(0).integers(0, 9, 256)  # what numpy sets up at first use is not ours
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
    yield make_row(f"index: list a folder of {_IN_A_CLASS:,} samples", listed, "ms")
    top = _timed(lambda: index.listing("train"), 1, 1e-3)
    yield make_row(f"index: list {len(index) // _IN_A_CLASS:,} folders of {_IN_A_CLASS:,}", top, "ms")
    yield make_row("index: read all of it and compare its digest", _timed(index.verify, 1, 1.0)[:1], "s")


def measure(work: Path, samples: int = SAMPLES) -> list[Row]:
    """Return the figures of an index of so many samples, made below `work` and removed at the end.

    Raises:
        OSError: there is no room for it (about 75 bytes per sample).
    """
    path = work / "index.arrow"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    writer = context.Process(target=_written, args=(there, path, samples))
    writer.start()
    try:
        version, write_s, most_mib = here.recv()
        writer.join()
        rows = [
            make_row("index: write", [write_s], "s"),
            make_row("index: most memory while writing, its columns included", [most_mib], "MiB", at_most=1024),
        ]
        rows += _opens(path, version)  # first: pages of a file that is mapped stay in memory
        index = Index(path, version)
        text = len(index.key(0)) * samples
        each = (path.stat().st_size - text) / samples
        rows.append(make_row("index: bytes per sample without the key", [each], "B", at_most=64))
        rows += _lookups(index)
        rows += [
            make_row(f"index: {WORKERS} workers, {how}", [_workers_mib(start, opened)], "MiB", at_most=50)
            for how, start, opened in (
                ("each opens it", context, (path, version)),
                ("forked with it open", multiprocessing.get_context("fork"), index),
            )
        ]
    finally:
        path.unlink(missing_ok=True)
    return rows


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
