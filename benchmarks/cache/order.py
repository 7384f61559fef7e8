"""In which order samples are read, and what their bytes come to: the same in every side's process."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Buffers = Iterable[Sequence[bytes | memoryview]]

BATCH = 256
_MASK = (1 << 64) - 1


def batches(seed: int, samples: int, count: int) -> list[list[int]]:
    """Return the first `count` rows of a random order of all `samples`, each once, in batches."""
    rows = list(range(samples))
    random.Random(seed).shuffle(rows)  # noqa: S311 - an order, no secret
    rows = rows[:count]
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def consume(found: Buffers) -> tuple[int, int]:
    """Return how many samples there are, and the sum of the xxh3-64 of each modulo 2^64, whatever their order."""
    samples, total = 0, 0
    of: Callable[[bytes | memoryview], int] = xxhash.xxh3_64_intdigest
    for batch in found:
        samples += len(batch)
        total += sum(map(of, batch))
    return samples, total & _MASK


def locate(found: Buffers) -> tuple[int, int]:
    """Return how many samples there are, and the sum of their lengths; no byte is touched."""
    samples, total = 0, 0
    for batch in found:
        samples += len(batch)
        total += sum(map(len, batch))
    return samples, total


def expected(digests: Sequence[int], rows: Iterable[int]) -> int:
    """Return what `consume` must come to for these rows."""
    return sum(digests[row] for row in rows) & _MASK
