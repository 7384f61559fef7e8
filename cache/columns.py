"""Arrow columns of numbers and bytes at hand.

Not by `pa.array`: where pandas is installed that imports it, to ask whether what it was given is its own. Of a
command that packs a folder this is most of the time, and 60 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def numbers(values: Iterable[int] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return whole numbers as a column of `kind`; an array of that type is shared, not copied.

    Raises:
        TypeError: an array's numbers may not fit that type.
    """
    dtype = np.dtype(str(kind))
    held = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype)
    held = np.ascontiguousarray(held).astype(dtype, casting="safe", copy=False)
    return pa.Array.from_buffers(kind, len(held), [None, pa.py_buffer(held)])


def strings(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """Return runs of bytes as a column of `kind`: large_binary, or large_string of what is known to be UTF-8."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))])


def fixed(values: Sequence[bytes], size: int) -> pa.Array:
    """Return runs of `size` bytes each as a column.

    Raises:
        ValueError: one is not of that size.
    """
    if any(len(value) != size for value in values):
        raise ValueError(f"each is to be of {size} bytes")
    return pa.Array.from_buffers(pa.binary(size), len(values), [None, pa.py_buffer(b"".join(values))])
