"""Seeds for random transforms: the same for a sample and an epoch, whoever reads it and however often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable

_MASK = (1 << 32) - 1
"""What `numpy.random.seed` takes, too."""


class SampledBatch(list[int]):
    """Numbers of a batch's items, with the seed and the epoch that a sampler drew them for."""

    __slots__ = ("epoch", "seed")

    def __init__(self, items: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(items)
        self.seed, self.epoch = seed, epoch

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self), self.seed, self.epoch)


def sample_seed(seed: int, epoch: int, key: str) -> int:
    """Return the seed of a sample in an epoch, 0 to 2^32 - 1. It is part of what a run is, so it never changes.

    >>> sample_seed(0, 1, "train/7.jpg") == sample_seed(0, 1, "train/7.jpg") != sample_seed(0, 2, "train/7.jpg")
    True
    """
    return xxhash.xxh3_64_intdigest(f"deeplink sample-seed-1 {seed} {epoch} {key}".encode()) & _MASK
