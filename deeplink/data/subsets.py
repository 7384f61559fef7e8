"""Parts of a dataset: which of its items they have, and how a dataset is split at random."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplink.data.order import permuted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_CLOSE = 1e-6
"""So far from 1 may the sum of fractions be."""


def picked(indices: Any, length: int) -> NDArray[np.int64]:
    """Return the positions, int64, that some indices of a dataset of `length` items mean; a mask is refused."""
    found = np.asarray(indices)
    if found.ndim != 1 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"a subset takes one or more whole numbers, not {found.dtype} of shape {found.shape}")
    found = found.astype(np.int64)
    low, high = int(found.min()), int(found.max())
    if not -length <= low <= high < length:
        raise IndexError(f"items {low} to {high} of {length}")
    found[found < 0] += length
    return found


def digest_of(positions: NDArray[np.int64]) -> str:
    """Return what stands for some positions, in their order, in a sampler's state."""
    return hashlib.blake2b(positions.astype("<i8").tobytes(), digest_size=8).hexdigest()


def split_at_random(length: int, lengths: Sequence[float], *, version: str, seed: int) -> list[NDArray[np.int64]]:
    """Return the positions of each part of a split, ascending: a function of these arguments alone."""
    sizes = _sizes(length, lengths)
    if min(sizes, default=0) < 1:
        raise ValueError(f"lengths {list(lengths)} of {length} items make parts of {sizes}: each needs an item")
    order = permuted(np.arange(length), length, f"deeplink split-1 {version} {seed}")
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def _sizes(length: int, lengths: Sequence[float]) -> list[int]:
    """Return how many items each part has; what fractions leave over goes to the first parts, one each.

    >>> _sizes(11, [0.5, 0.5]), _sizes(11, [10, 1])
    ([6, 5], [10, 1])
    """
    if all(isinstance(size, (int, np.integer)) for size in lengths) and sum(lengths) == length:
        return [int(size) for size in lengths]
    if min(lengths, default=0) < 0 or abs(sum(lengths) - 1) > _CLOSE:
        raise ValueError(f"lengths {list(lengths)}: give fractions that add up to 1, or {length} items in all")
    sizes = [int(length * fraction) for fraction in lengths]
    return [size + (number < length - sum(sizes)) for number, size in enumerate(sizes)]


def resolved(dataset: Any) -> Any:
    """Return what torch's Subset of a dataset of ours is: that dataset's own subset; anything else as it is."""
    kind = type(dataset)  # not a class of the user's below it: what that does to items would be lost
    if (kind.__module__, kind.__name__) != ("torch.utils.data.dataset", "Subset"):
        return dataset
    whole = resolved(dataset.dataset)
    return whole.subset(dataset.indices) if hasattr(whole, "subset") else dataset
