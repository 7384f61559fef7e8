"""One shard made again from its source's small files, where no copy is left. Readers do this too: no grpc here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.format import block
from deeplink.cache.format.names import Names
from deeplink.cache.pack.building import FileReader, ShardBuilder, build_shard
from deeplink.cache.pack.plan import kept_marks
from deeplink.core.types import SampleKey

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.cache.source.source import Source
    from deeplink.core.clock import Clock


def rows_of(index: Index, number: int) -> np.ndarray:
    """Return the rows of a shard in the order in which it holds them; int64."""
    rows = np.flatnonzero(index.column("shard", range(len(index))) == number)
    # Empty samples share their place with the next one: the rows' own order tells which comes first.
    return rows[np.lexsort((rows, np.asarray(index.offset)[rows], np.asarray(index.block)[rows]))]


def rebuild_shard(index: Index, number: int, source: Source, draft: Path, clock: Clock) -> None:
    """Write shard `number` of a version to `draft`, which must not exist, from the files of `source`."""
    rows = rows_of(index, number)
    sizes = np.asarray(index.lengths)[rows].astype(np.int64)
    keys = [SampleKey(index.key(int(row))) for row in rows]
    with FileReader(source, clock) as reader:
        built = build_shard(
            ShardBuilder(source, reader, Names.of(keys), sizes, lambda _files, _bytes: None), draft
        )
    changed = np.flatnonzero(built.checksums != np.asarray(index.checksums)[rows])
    if len(changed):
        draft.unlink(missing_ok=True)
        raise SourceChangedError(index.source, keys[int(changed[0])], "its bytes are not those that were packed")
    wanted = index.shards[number].id
    if built.id != wanted:
        draft.unlink(missing_ok=True)
        raise SourceChangedError(
            index.source, keys[0], f"with the files of its shard it makes {built.id} instead of {wanted}"
        )


def is_unchanged(index: Index, number: int, source: Source) -> bool:
    """Tell whether all files of a shard are at the source as they were packed.

    Files of a local source are looked at: their sizes, and that they have the very times of change that were
    listed and kept beside the index. Those of any other, or where no times were kept, are read and compared:
    nothing less proves it.
    """
    rows = rows_of(index, number)
    marks = kept_marks(index, rows) if source.local else None
    if marks is not None:
        return all(
            _is_as_listed(source, index, row, mark)
            for row, mark in zip(rows.tolist(), marks.tolist(), strict=True)
        )
    return all(_is_same(source, index, row) for row in rows.tolist())


def _is_as_listed(source: Source, index: Index, row: int, mark: int) -> bool:
    try:
        return source.stat(index.key(row)) == (int(index.lengths[row]), mark)
    except SourceError as problem:
        if isinstance(problem, SourceChangedError) or isinstance(problem.__cause__, FileNotFoundError):
            return False
        raise


def _is_same(source: Source, index: Index, row: int) -> bool:
    key, size = index.key(row), int(index.lengths[row])
    whole = xxhash.xxh3_64()
    try:
        for start in range(0, max(size, 1), block.SPAN):
            whole.update(source.read_range(key, start, min(block.SPAN, size - start)))
    except SourceChangedError:
        return False
    return whole.intdigest() == int(index.checksums[row])
