"""Places in memory that are sent one after another, without Python touching or even naming each of them."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


IOV_MAX = 1024
"""Places in one call (Linux: UIO_MAXIOV)."""


PAIR = np.dtype([("base", np.uintp), ("length", np.uintp)])
"""struct iovec."""


def pairs(addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return an array of PAIR of these addresses and lengths (both integers, shape (places,))."""
    found = np.empty(len(addresses), PAIR)
    found["base"], found["length"] = addresses, lengths
    return found


class _Header(ctypes.Structure):  # struct msghdr
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_sendmsg = ctypes.CDLL(None, use_errno=True).sendmsg
_sendmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_sendmsg.restype = ctypes.c_ssize_t


class Scattered:
    """Bytes that lie at several places; their length and a slice of them are had as of any buffer.

    256 memoryviews take some 50 us to make, which is as long as the kernel takes to send them.
    """

    __slots__ = ("_owners", "_pairs", "_size")

    def __init__(self, addresses: np.ndarray, lengths: np.ndarray, owners: Sequence[object]) -> None:
        self._pairs, self._owners = pairs(addresses, lengths), owners
        self._size = int(lengths.sum())

    @classmethod
    def _of(cls, found: np.ndarray, owners: Sequence[object]) -> Self:
        return cls(found["base"], found["length"], owners)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Self:
        """Return the bytes from one place to another, both of the whole."""
        start, stop, _ = part.indices(self._size)
        ends = np.cumsum(self._pairs["length"], dtype=np.int64)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        if start >= stop:
            return self._of(self._pairs[:0], ())
        found = self._pairs[first : last + 1].copy()
        found["length"][-1] -= np.uintp(int(ends[last]) - stop)
        skipped = np.uintp(start - (int(ends[first - 1]) if first else 0))
        found["base"][0] += skipped
        found["length"][0] -= skipped
        return self._of(found, self._owners)

    @property
    def pairs(self) -> np.ndarray:
        """The places in order, an array of PAIR."""
        return self._pairs


def joined_places(pieces: Sequence[bytes | memoryview | Scattered], count: int) -> np.ndarray:
    """Return the `count` places of pieces in order, an array of PAIR; the pieces must outlive it."""
    found, at = np.empty(count, PAIR), 0
    bases, lengths = found["base"], found["length"]
    for piece in pieces:
        if isinstance(piece, Scattered):
            found[at : (at := at + len(piece.pairs))] = piece.pairs
        else:
            bases[at] = np.frombuffer(piece, np.uint8).ctypes.data
            lengths[at] = len(piece)
            at += 1
    return found


def send_places(descriptor: int, some: np.ndarray, flags: int) -> int:
    """Send what a socket takes of at most IOV_MAX places in one call; return how many bytes that was."""
    header = _Header(iov=some.ctypes.data, iov_length=len(some))
    while True:
        sent: int = _sendmsg(descriptor, ctypes.addressof(header), flags)
        if sent >= 0:
            return sent
        code = ctypes.get_errno()
        if code != errno.EINTR:  # a signal, or this process was stopped and goes on
            raise OSError(code, os.strerror(code))
