"""Sides without a library: the small files themselves, one flat file, GNU tar, SQLite."""

from __future__ import annotations

import mmap
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from benchmarks.cache.order import batches
from benchmarks.cache.sides.base import Side, paths_of, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.cache.sides.base import Batches


class RawFiles(Side):
    """The small files themselves."""

    name = "raw files"
    kept = "raw"
    settings = (
        "os.open, os.read, os.close; paths and sizes known up front; its DataLoader: __getitem__, no collating"
    )

    def __init__(self) -> None:
        self._files: list[tuple[str, int]] = []

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        packed.mkdir()

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._files = [(path, Path(path).stat().st_size) for path in paths_of(source)]

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        files = self._files
        for rows in wanted:
            yield [read_file(*files[row]) for row in rows]

    @override
    def epoch(self, seed: int) -> Batches:
        return self.read(batches(seed, len(self._files), len(self._files)))

    @override
    def loader(self, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
        from benchmarks.cache.sides.torches import file_loader  # noqa: PLC0415 - most of this side needs no torch

        return file_loader(self._files, seed, workers, decode=decode)


class FlatMap(Side):
    """All samples in one file, mapped: the practical limit."""

    name = "flat mmap"
    kept = "flat"
    settings = "one file, MADV_RANDOM, a list of offsets; cold: WILLNEED for each sample of the batch first"
    samples_per_s = 1_000_000

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._offsets: list[int] = []

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        packed.mkdir()
        offsets = [0]
        with (packed / "flat").open("wb") as out:
            for path in paths_of(source):
                data = read_file(path)
                out.write(data)
                offsets.append(offsets[-1] + len(data))
        (packed / "offsets").write_text("\n".join(map(str, offsets)), encoding="ascii")

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._offsets = [int(line) for line in (packed / "offsets").read_text(encoding="ascii").splitlines()]
        with (packed / "flat").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self._view = memoryview(self._map)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        view, offsets = self._view, self._offsets
        for rows in wanted:
            self._fetch(rows)
            yield [view[offsets[row] : offsets[row + 1]] for row in rows]

    def _fetch(self, rows: Sequence[int]) -> None:
        """Tell the kernel of nothing: all is in memory."""

    @override
    def epoch(self, seed: int) -> Batches:
        samples = len(self._offsets) - 1
        return self.read(batches(seed, samples, samples))

    @override
    def close(self) -> None:
        self._view.release()
        self._view = memoryview(b"")
        if self._map is not None:
            self._map.close()
            self._map = None


class FlatAhead(FlatMap):
    """The flat file when it is not in memory."""

    name = "flat mmap with WILLNEED"

    @override
    def _fetch(self, rows: Sequence[int]) -> None:
        if self._map is None:
            raise RuntimeError("not opened")
        offsets, ahead, page = self._offsets, self._map.madvise, mmap.PAGESIZE
        for row in rows:
            start = offsets[row] // page * page
            ahead(mmap.MADV_WILLNEED, start, offsets[row + 1] - start)


class Tar(Side):
    """GNU tar, which only packs."""

    name = "GNU tar"
    kept = "tar"
    settings = "tar --sort=name, one file"

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        packed.mkdir()
        subprocess.run(["tar", "--sort=name", "-cf", packed / "all.tar", "-C", source, "."], check=True)


class Sqlite(Side):
    """A blob per row."""

    name = "SQLite"
    kept = "sqlite"
    is_listed = True
    settings = "one table, INTEGER PRIMARY KEY, pages of 8 KiB, mmap_size of 4 GiB; one SELECT per sample by rowid"

    def __init__(self) -> None:
        self._base = sqlite3.connect(":memory:")

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        packed.mkdir()
        base = sqlite3.connect(packed / "all.sqlite")
        base.executescript(
            "PRAGMA page_size=8192; PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE samples (id INTEGER PRIMARY KEY, data BLOB);"
        )
        rows = ((row, read_file(path)) for row, path in enumerate(paths_of(source)))
        base.executemany("INSERT INTO samples VALUES (?, ?)", rows)
        base.commit()
        base.close()

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._base = sqlite3.connect(f"file:{packed / 'all.sqlite'}?mode=ro&immutable=1", uri=True)
        self._base.execute(f"PRAGMA mmap_size={4 << 30}")

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        ask = self._base.cursor().execute
        for rows in wanted:
            yield [ask("SELECT data FROM samples WHERE id=?", (row,)).fetchone()[0] for row in rows]

    @override
    def epoch(self, seed: int) -> Batches:
        samples = self._base.execute("SELECT count(*) FROM samples").fetchone()[0]
        return self.read(batches(seed, samples, samples))

    @override
    def close(self) -> None:
        self._base.close()
