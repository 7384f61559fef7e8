"""What to ask a disk for ahead: places in a file, joined where they follow one another. Pure."""

from __future__ import annotations

import numpy as np

_GAP = 64 << 10
"""Bytes between two places that are read along with them: a disk takes longer for a second request."""
_MOST = 256 << 10
"""Bytes of one request: Linux cuts a longer one off at the device's read-ahead (`force_page_cache_readahead`)."""


def joined(offsets: np.ndarray, lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Return offsets and lengths of the requests that cover all of the places, ascending.

    >>> joined(np.array([0, 4096, 1 << 20]), np.array([4096, 100, 8]))
    ([0, 1048576], [4196, 8])

    Args:
        offsets: int64, where in the file, in any order.
        lengths: int64, bytes.
    """
    if not len(offsets):
        return [], []
    order = np.argsort(offsets, kind="stable")
    begins = offsets[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    is_first = np.append(True, begins[1:] > ends[:-1] + _GAP)
    is_last = np.append(is_first[1:], True)
    starts, sizes = begins[is_first], ends[is_last] - begins[is_first]
    parts = -(-np.maximum(sizes, 1) // _MOST)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = np.repeat(starts, parts) + number * _MOST
    return cut.tolist(), np.minimum(np.repeat(starts + sizes, parts) - cut, _MOST).tolist()
