"""Lists of places in memory, as system calls take them (struct iovec)."""

from __future__ import annotations

import numpy as np

IOV_MAX = 1024
"""Places in one call (Linux: UIO_MAXIOV)."""
PAIR = np.dtype([("base", np.uintp), ("length", np.uintp)])
"""struct iovec."""


def pairs(addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return an array of PAIR of these addresses and lengths (both integers, shape (places,))."""
    found = np.empty(len(addresses), PAIR)
    found["base"], found["length"] = addresses, lengths
    return found
