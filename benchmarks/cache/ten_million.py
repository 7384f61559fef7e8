"""Plans and indexes ten million files that do not exist, and says how much memory the packer took at most.

.venv/bin/python -m benchmarks.cache.ten_million --files 10000000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from typing_extensions import override

from benchmarks.rows import BENCH
from deeplink.cache import block
from deeplink.cache.catalog import Catalog, PackRecord
from deeplink.cache.names import Gathering
from deeplink.cache.packing.jobs import planned_job
from deeplink.cache.packing.staging import Piece
from deeplink.cache.sources.origin import Listing, Source
from deeplink.config import Config
from deeplink.types import ShardId

PER_FOLDER = 1000


class NamesAlone(Source):
    """A source of as many files as wanted, named like ImageNet's, without a byte in any."""

    url = "generated://names"
    local = False

    def __init__(self, files: int) -> None:
        self._files = files

    @override
    def check(self) -> None:
        return

    @override
    def listing(self) -> Listing:
        found = Gathering()
        for first in range(0, self._files, PER_FOLDER):
            numbers = range(first, min(first + PER_FOLDER, self._files))
            folder = f"n{first // PER_FOLDER:08d}"
            sizes = [4096 + number % 512 for number in numbers]
            found.add(
                f"train/{folder}/", [f"{folder}_{n:08d}.JPEG" for n in numbers], sizes, (n + 1 for n in numbers)
            )
        return Listing.of(found)

    @override
    def mark(self, key: str) -> int:
        return 1

    @override
    def read(self, key: str, size: int) -> bytes:
        return bytes(size)

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(length)


def run(files: int, work: Path) -> None:
    """List, plan and index so many files below `work`; print what each step took."""
    began = time.perf_counter()

    def say(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{what:28} {time.perf_counter() - began:8.1f} s {peak:10,.0f} MiB at most so far")

    say("imports")
    config = Config(catalog=work / "catalog", store=work / "store", state=work / "state")
    catalog = Catalog(config.catalog)
    job = planned_job(NamesAlone(files), catalog, "names", config, members=0, append=False)
    job.put_aside(work)
    say("listed and planned")
    pieces = {}
    for number, shard in enumerate(job.plan.shards):
        payloads = block.arrange(job.listing.sizes[shard.rows])[2]
        checksums = np.arange(shard.start, shard.stop, dtype=np.uint64)
        piece = Piece(
            ShardId(f"{number:040x}"), shard.payload, np.arange(len(payloads), dtype=np.uint64), checksums
        )
        pieces[number] = job.kept(number, piece)
    say("all pieces held")
    record = PackRecord(
        source=job.source, plan=job.plan.digest, files=files, bytes=0, shards=len(pieces), packed_unix=0.0
    )
    version = catalog.publish("names", job.content(pieces, ""), record)
    job.keep_marks(catalog.path("names", version))
    say("index written")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000_000)
    asked = parser.parse_args()
    BENCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="names-", dir=BENCH) as work:
        run(asked.files, Path(work))


if __name__ == "__main__":
    main()
