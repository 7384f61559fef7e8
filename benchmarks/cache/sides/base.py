"""What a side is: one way to keep small files and to read them, in a process of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Batches = Iterator[Sequence[bytes | memoryview]]


class Side:
    """One way to keep small files and to read them; what it does not offer is NotImplementedError.

    Row i is the i-th path of the source, sorted.

    Attributes:
        name: what rows of the table call it.
        kept: name of the folder of what it packs; sides with one format share it.
        is_peer: whether it lives in the peers' virtual environment.
        is_listed: whether the issue names it among the peers that the best is chosen from.
        settings: how it is used, for the reader of the table.
        lingers: files stay mapped when it is closed, so its process must end for them to leave memory.
        samples_per_s: about how fast random reads are, to bound how many are asked of it.
    """

    name: ClassVar[str]
    kept: ClassVar[str]
    is_peer: ClassVar[bool] = False
    is_listed: ClassVar[bool] = False
    settings: ClassVar[str]
    lingers: ClassVar[bool] = False
    samples_per_s: ClassVar[int] = 100_000

    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        """Write the source's files into `packed`, a folder that is not there yet.

        Args:
            source: the folder of small files.
            packed: what is written.
            ordered: rows must be in order, at the price of speed where there is one.
        """
        raise NotImplementedError

    def open(self, source: Path, packed: Path) -> None:
        """Open what was packed, as far as a reader does before its first sample."""
        raise NotImplementedError

    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        """Yield batches by row."""
        raise NotImplementedError

    def epoch(self, seed: int) -> Batches:
        """Yield all samples once in its own shuffled order."""
        raise NotImplementedError

    def loader(self, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
        """Return what gives all samples once, shuffled, through its DataLoader, each time it is called.

        Args:
            seed: of the order.
            workers: processes, which stay between passes.
            decode: samples are JPEGs; their pixels are yielded.
        """
        raise NotImplementedError

    def from_source(self) -> int:
        """Return how many samples came from the source so far, where this side has one."""
        return 0

    def close(self) -> None:
        """Let go of every file and map."""


def paths_of(source: Path) -> list[str]:
    """Return the source's files, sorted: row i is the i-th of them."""
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(source) for name in names)  # noqa: PTH118


def read_file(path: str, size: int | None = None) -> bytes:
    """Return a file's bytes by as few system calls as may be: three, and one more where its size is not known."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size if size is None else size)
    finally:
        os.close(descriptor)
