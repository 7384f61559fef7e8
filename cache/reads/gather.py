"""Copies many pieces of mapped files into an arena by system calls, which fail where a load would kill.

Touching a mapping of a file that was cut short, or whose disk fails, is SIGBUS: no Python program survives it. A
system call that meets such a page returns EFAULT instead. `vmsplice` puts the pages of a whole list of pieces into
a pipe, `readv` copies them out of it: a few calls for a batch of 256 samples, where `preadv` is 256. Measured with
4 KiB, in memory: 190 us a batch, `process_vm_readv` 260, `preadv` 300, a plain copy 140, which is not safe.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

import numpy as np

from deeplink.iovec import IOV_MAX, PAIR, pairs

_PIPE_BYTES = 512 << 10
"""In one smaller than half of that the calls are so many that `preadv` does as well."""
_NONBLOCK = 2  # SPLICE_F_NONBLOCK

_library = ctypes.CDLL(None, use_errno=True)
_vmsplice = getattr(_library, "vmsplice", None)
if _vmsplice is not None:
    _vmsplice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    _vmsplice.restype = ctypes.c_ssize_t
_readv = _library.readv
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_readv.restype = ctypes.c_ssize_t


class _Pipe:
    """A pipe for one batch: making it takes a twentieth of the batch's time, and none is ever left half full.

    None is kept: the pages of all of a user's pipes count against one limit (64 MiB), and beyond it each new one
    has two pages, torch's queues too.

    Raises:
        OSError: there are no descriptors left, or the user's pipes have as many pages as they may (EPERM).
    """

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.reads, self.writes = self._ends
        _pipes.add(self)
        try:
            fcntl.fcntl(self.writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the pipe, and what is in it."""
        _pipes.discard(self)
        for descriptor in self._ends:
            os.close(descriptor)


_pipes: set[_Pipe] = set()
_usable = _vmsplice is not None


def _let_go() -> None:
    for pipe in list(_pipes):
        pipe.close()


# Those that other threads were using at the moment of a fork are of no use to the child.
os.register_at_fork(after_in_child=_let_go)


def is_available() -> bool:
    """Tell whether this machine has the call, and no sandbox has refused it so far."""
    return _usable


def gather(sources: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> int:
    """Copy `lengths[i]` bytes from `sources[i]` to `targets[i]`; return how many pieces were copied.

    Pieces are copied in order; the one after those that were copied cannot be read. Fewer than all, and
    `is_available` false from then on, where the machine does not let us.

    Args:
        sources: uint64 addresses within mappings that outlive the call.
        lengths: int64, bytes.
        targets: uint64 addresses of writable memory that outlives the call.
    """
    if not len(sources) or not is_available():
        return 0
    try:
        pipe = _Pipe()
    except OSError:  # there may be room again for the next batch
        return 0
    try:
        return _copied(pipe, sources, lengths, targets)
    finally:
        pipe.close()


def _copied(pipe: _Pipe, sources: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> int:
    ends = np.cumsum(lengths)
    whole, done, piece = int(ends[-1]), 0, 0
    remote, local = pairs(sources, lengths), pairs(targets, lengths)
    while done < whole:
        at, count = piece * PAIR.itemsize, min(IOV_MAX, len(lengths) - piece)
        moved = _moved(pipe, remote.ctypes.data + at, local.ctypes.data + at, count)
        if moved <= 0:
            break
        done += moved
        piece = int(np.searchsorted(ends, done, side="right"))
        if done < whole:
            _shorten(remote, local, piece, done - (int(ends[piece - 1]) if piece else 0), lengths)
    return int(np.searchsorted(ends, done, side="right"))


def _moved(pipe: _Pipe, remote: int, local: int, count: int) -> int:
    """Copy what the pipe takes in one go of `count` pieces; return how many bytes that was, 0 where none can."""
    global _usable  # noqa: PLW0603 - what a sandbox refuses once it refuses always
    if _vmsplice is None:
        return 0
    moved: int = _vmsplice(pipe.writes, remote, count, _NONBLOCK)
    if moved < 0:
        if ctypes.get_errno() in {errno.ENOSYS, errno.EPERM}:
            _usable = False
        return 0
    if moved and _readv(pipe.reads, local, count) != moved:
        raise OSError(errno.EIO, "a pipe gave other bytes than it took")
    return moved


def _shorten(remote: np.ndarray, local: np.ndarray, piece: int, copied: int, lengths: np.ndarray) -> None:
    """Let a piece begin behind so many bytes that were copied."""
    before = int(lengths[piece]) - int(remote["length"][piece])
    for pieces in (remote, local):
        pieces["base"][piece] += np.uintp(copied - before)
        pieces["length"][piece] -= np.uintp(copied - before)
