"""What the DataLoaders of several sides share; imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import Dataset
from typing_extensions import override

from benchmarks.cache.sides.base import read_file

if TYPE_CHECKING:
    from collections.abc import Sequence


class Files(Dataset[bytes]):
    """A dataset of files, one read at a time, as torchvision's ImageFolder does it."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    @override
    def __getitem__(self, index: int) -> bytes:
        return read_file(*self._files[index])


def as_it_is(batch: list[bytes]) -> list[bytes]:
    """Return the batch as the dataset gave it; the cheapest way to collate."""
    return batch
