"""Copies samples out of datasets into a local folder: plans first, then copies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.format.names import checked_key
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_unsynced
from deeplink.fs.library import IsFolderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.reader import Reader
    from deeplink.fs.library import Library, PathEntry

_BATCH_BYTES, _BATCH_SAMPLES = 64 << 20, 1024


def _unfit(destination: Path, problem: str, remedy: str = "Name a new or an existing folder.") -> DeepLinkError:
    return DeepLinkError(f"{destination}: {problem}", remedy=remedy, exit_code=2)


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One sample to be copied."""

    reader: Reader
    row: int
    path: str  # where it is, as it was asked for
    bytes: int
    target: Path  # the file it becomes


def planned(library: Library, paths: Sequence[str], destination: str, *, recursive: bool) -> list[CopyTask]:
    """Return what is to be copied where, as `cp` has it; writes nothing.

    Several paths, or a destination that is a folder or ends in a slash: into that folder, under their own names.
    Else the one path becomes the destination itself.
    """
    target = Path(destination)
    into = len(paths) > 1 or destination.endswith("/") or target.is_dir()
    if into and target.exists() and not target.is_dir():
        raise _unfit(target, "it is a file, and several are to be copied")
    tasks: dict[Path, CopyTask] = {}
    for path in paths:
        found = library.at(path)
        name = (found.place.inner or found.place.name).rpartition("/")[2]
        for task in _tasks(found, target / name if into else target, recursive=recursive):
            other = tasks.setdefault(task.target, task)
            if (other.reader, other.row) != (task.reader, task.row):
                raise _unfit(task.target, f"both {other.path} and {task.path} would become this file")
    return list(tasks.values())


def _tasks(found: PathEntry, target: Path, *, recursive: bool) -> Iterator[CopyTask]:
    lengths = found.reader.index.lengths
    if not found.entry.is_folder:
        yield CopyTask(found.reader, found.entry.row, str(found.place), found.bytes, target)
        return
    if not recursive:
        raise IsFolderError(str(found.place), "-r copies it with all that is below.")
    skip = len(found.place.inner) + 1 if found.place.inner else 0
    for entry in found.below():
        if not entry.is_folder:
            # The index may come from anywhere: no name in it leads out of the folder.
            inner = checked_key(entry.path)[skip:]
            yield CopyTask(found.reader, entry.row, found.path_of(entry), int(lengths[entry.row]), target / inner)


def fetch(
    tasks: Sequence[CopyTask], *, progress: Callable[[int, int], None]
) -> Iterator[tuple[CopyTask, DeepLinkError]]:
    """Copy samples, many at once; each file appears whole or not at all. Yield those that could not be read."""
    for batch in _batches(tasks):
        reader = batch[0].reader
        try:
            data: list[memoryview | None] = list(reader.read([task.row for task in batch]))
        except DeepLinkError:  # which of them it was is found out one by one
            data = [None] * len(batch)
        for task, read in zip(batch, data, strict=True):
            try:
                sample = reader.read([task.row])[0] if read is None else read
            except DeepLinkError as problem:
                yield task, problem
            else:
                _write(task, sample)
        progress(len(batch), sum(task.bytes for task in batch))


def _write(task: CopyTask, data: memoryview) -> None:
    try:
        write_unsynced(task.target, data)
    except OSError as problem:
        why = problem.strerror or os.strerror(problem.errno or 0)
        raise _unfit(task.target, why, "Name a folder that you may write to, with room.") from problem


def _batches(tasks: Sequence[CopyTask]) -> Iterator[list[CopyTask]]:
    batch: list[CopyTask] = []
    size = 0
    for task in tasks:
        full = len(batch) == _BATCH_SAMPLES or size + task.bytes > _BATCH_BYTES
        if batch and (full or task.reader is not batch[0].reader):
            yield batch
            batch, size = [], 0
        batch.append(task)
        size += task.bytes
    if batch:
        yield batch
