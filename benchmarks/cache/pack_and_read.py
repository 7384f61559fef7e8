"""Packs small files and reads them warm, against raw files and a flat mapped file, in turns within one run.

make bench-pack
.venv/bin/python -m benchmarks.cache.pack_and_read --files 12000 --repeats 7
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from benchmarks.rows import BENCH, Row, machine, make_row, ratios, table, write_rows
from deeplink.cache.packer import pack
from deeplink.cache.reader import Reader
from deeplink.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Batches = Iterator[Sequence[bytes | memoryview]]

SAMPLE = 4096
BATCH = 256
PER_FOLDER = 1000
PASSES = 3  # odd, or the digests would cancel out
WARM = "local warm random, 4 KiB"
SETTINGS = """\
settings: {files} files of {sample} bytes, {per_folder} in a folder, on the file system of build/, all in memory;
  {repeats} repeats. In each every side does the same work once, in an order drawn anew. A ratio is the peer's time
  over ours of that repeat; the value is the median, the spread the lowest and the highest.
  reads: each sample once, in random batches of {batch}. "consumed": every byte goes through xxh3. "verified at
  first touch": ours compares each sample's checksum besides; reader and map are opened anew in each repeat.
  "views": bytes are located, not touched; reader and map stay, and were gone through once; three passes in each.
  raw files: os.open, os.read, os.close on paths made up front. flat mmap: one file, MADV_RANDOM, offsets listed.
  packing: one process, no members, replicas 1; from the listing to the published index, all synced.
  one flat file: os.walk, sort, read each file, append, fsync; no checksum and no index.\
"""


@dataclass(frozen=True, slots=True)
class Tree:
    """The small files, and what was made of them.

    Attributes:
        root: the source's folder.
        paths: path of each sample, by row.
        flat: all samples in one file, by row.
        config: of the packed dataset `bench`.
    """

    root: Path
    paths: list[str]
    flat: Path
    config: Config


@dataclass(slots=True)
class Times:
    """Seconds of each side, one entry per repeat."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, sides: dict[str, Callable[[], int]], order: random.Random) -> dict[str, int]:
        """Run all sides once, in an order drawn anew; return what each came to."""
        names = list(sides)
        order.shuffle(names)
        results = {}
        for name in names:
            began = time.perf_counter()
            results[name] = sides[name]()
            self.of.setdefault(name, []).append(time.perf_counter() - began)
        return results


def write_source(root: Path, files: int) -> None:
    """Write the small files: random bytes, so that nothing can be compressed."""
    draw = np.random.default_rng(7)
    for number in range(files):
        folder = root / f"{number // PER_FOLDER:04d}"
        if number % PER_FOLDER == 0:
            folder.mkdir(parents=True)
        (folder / f"{number:07d}.bin").write_bytes(draw.bytes(SAMPLE))


def config_in(folder: Path) -> Config:
    """Return the configuration of a cache that lies in `folder` alone, whatever this machine's files say."""
    return Config(catalog=folder / "catalog", store=folder / "store", state=folder / "state", replicas=1)


def pack_into(root: Path, folder: Path) -> int:
    """Pack the source into a cache that is made for it; return how many bytes went in."""
    return pack(str(root), "bench", config=config_in(folder)).bytes


def write_flat(root: Path, flat: Path) -> int:
    """Write the source's files one after the other into one file; return its size."""
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)  # noqa: PTH118
    with flat.open("wb") as out:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            out.write(os.read(descriptor, SAMPLE))
            os.close(descriptor)
        out.flush()
        os.fsync(out.fileno())
        return out.tell()


def batches(files: int, order: random.Random) -> list[list[int]]:
    """Return each row once, in random batches."""
    rows = list(range(files))
    order.shuffle(rows)
    return [rows[start : start + BATCH] for start in range(0, files, BATCH)]


def raw_batches(tree: Tree, wanted: Sequence[list[int]]) -> Batches:
    """Yield batches read from the small files."""
    for rows in wanted:
        found = []
        for row in rows:
            descriptor = os.open(tree.paths[row], os.O_RDONLY)
            found.append(os.read(descriptor, SAMPLE))
            os.close(descriptor)
        yield found


def open_flat(tree: Tree) -> tuple[memoryview, list[int]]:
    """Return the flat file, mapped, and each row's offset in it."""
    with tree.flat.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole.madvise(mmap.MADV_RANDOM)
    return memoryview(whole), [row * SAMPLE for row in range(len(tree.paths))]


def flat_batches(flat: tuple[memoryview, list[int]], wanted: Sequence[list[int]]) -> Batches:
    """Yield batches out of the flat file."""
    view, offsets = flat
    for rows in wanted:
        yield [view[offset : offset + SAMPLE] for offset in [offsets[row] for row in rows]]


def our_batches(reader: Reader, wanted: Sequence[list[int]]) -> Batches:
    """Yield batches out of the cache."""
    for rows in wanted:
        yield reader.views(rows)


def consume(found: Batches) -> int:
    """Return a digest over every byte of every batch."""
    total = 0
    for batch in found:
        for sample in batch:
            total ^= xxhash.xxh3_64_intdigest(sample)
    return total


def locate(found: Batches) -> int:
    """Return how many bytes the batches have, touching none."""
    return sum(len(sample) for batch in found for sample in batch)


def measure_packing(root: Path, work: Path, repeats: int, order: random.Random) -> Times:
    """Pack and write flat, so many times each."""
    times = Times()
    for repeat in range(repeats):
        folder, flat = work / f"cache-{repeat}", work / f"flat-{repeat}"
        times.measure({"ours": partial(pack_into, root, folder), "flat": partial(write_flat, root, flat)}, order)
        shutil.rmtree(folder)
        flat.unlink()
    return times


class Sides:
    """All three, opened: what each needs to read is made here, and is not measured."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.flat = tree, open_flat(tree)
        self.reader = Reader.open("bench", config=tree.config)
        self.reader.read([0])  # a reader opens its files when first used

    def read_all(self, use: Callable[[Batches], int], times: Times, order: random.Random, passes: int = 1) -> None:
        """Read everything by each side, so many times in one order; all must come to the same.

        Raises:
            RuntimeError: they do not.
        """
        wanted = batches(len(self.tree.paths), order) * passes
        sides = {
            "raw": lambda: use(raw_batches(self.tree, wanted)),
            "flat": lambda: use(flat_batches(self.flat, wanted)),
            "ours": lambda: use(our_batches(self.reader, wanted)),
        }
        results = times.measure(sides, order)
        stats = self.reader.stats()
        if len(set(results.values())) != 1 or stats.peer_samples or stats.source_samples:
            raise RuntimeError(f"the sides read different bytes, or ours not from its store: {results}, {stats}")


def measure_first_touch(tree: Tree, repeats: int, order: random.Random) -> Times:
    """Read and consume everything, so many times, each time by sides opened anew that have touched nothing."""
    times = Times()
    for _ in range(repeats):
        Sides(tree).read_all(consume, times, order)
    return times


def measure_again(tree: Tree, use: Callable[[Batches], int], repeats: int, order: random.Random) -> Times:
    """Read everything, so many times, by sides that have touched and verified all of it."""
    times, sides = Times(), Sides(tree)
    sides.read_all(consume, Times(), order)
    for _ in range(repeats):
        sides.read_all(use, times, order, PASSES)
    return times


def space(tree: Tree) -> float:
    """Return bytes on disk of shards and index, over the payload."""
    files = [*tree.config.store.glob("*.mdb"), *tree.config.catalog.rglob("*.arrow")]
    return sum(path.stat().st_size for path in files) / (len(tree.paths) * SAMPLE)


def run(work: Path, files: int, repeats: int) -> list[Row]:
    """Measure everything below `work`, which is this benchmark's own."""
    order = random.Random(7)  # noqa: S311 - an order, no secret
    root = work / "source"
    write_source(root, files)
    packing = measure_packing(root, work, repeats, order)
    tree = prepared(root, work)
    first = measure_first_touch(tree, repeats, order)
    again, views = (measure_again(tree, use, repeats, order) for use in (consume, locate))
    rates = [files / seconds for seconds in packing.of["ours"]]
    batch_us = [seconds / files * BATCH * 1e6 for seconds in first.of["ours"]]
    return [
        against(first, "raw", f"{WARM}, consumed and verified at first touch: raw files", 4),
        against(first, "flat", f"{WARM}, consumed and verified at first touch: flat mmap", 0.7),
        make_row(f"{WARM}, consumed and verified at first touch: a batch of {BATCH}", batch_us, "us"),
        against(again, "raw", f"{WARM}, consumed, verified before: raw files"),
        against(again, "flat", f"{WARM}, consumed, verified before: flat mmap"),
        against(views, "raw", f"{WARM}, views: raw files", 10),
        against(views, "flat", f"{WARM}, views: flat mmap", 0.7),
        against(packing, "flat", "packing, 4 KiB, warm source: one flat file", 0.8),
        make_row("packing, 4 KiB, warm source: files per second", rates, "1/s"),
        make_row("space, 4 KiB: shards and index over payload", [space(tree)], at_most=1.03),
    ]


def against(times: Times, peer: str, row: str, goal: float | None = None) -> Row:
    """Return the row that compares us with a peer."""
    return make_row(row, ratios(times.of[peer], times.of["ours"]), at_least=goal)


def prepared(root: Path, work: Path) -> Tree:
    """Make what is read from, and read it once, so that all of it is in memory."""
    config = config_in(work)
    pack_into(root, work)
    with Reader.open("bench", config=config) as reader:
        keys = reader.index.keys()
        paths = [str(root / key) for key in keys]
    tree = Tree(root, paths, work / "flat", config)
    write_flat(root, tree.flat)
    everything = [list(range(len(paths)))]
    consume(raw_batches(tree, everything))
    consume(flat_batches(open_flat(tree), everything))
    return tree


def main() -> None:
    """Run, print, write build/bench/pack.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=7, help="at least 5 say something about the spread")
    asked = parser.parse_args()
    BENCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pack-", dir=BENCH) as work:
        said = {"sample": SAMPLE, "per_folder": PER_FOLDER, "batch": BATCH}
        print(machine())
        print(SETTINGS.format(files=asked.files, repeats=asked.repeats, **said), flush=True)
        rows = run(Path(work), asked.files, asked.repeats)
    print(table(rows))
    print(f"written to {write_rows('pack', rows)}")


if __name__ == "__main__":
    main()
