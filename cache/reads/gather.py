"""Copies many pieces of mapped files into one arena with one system call, which fails where a load would kill.

Touching a mapping of a file that was cut short, or whose disk fails, is SIGBUS: no Python program survives it. A
system call that meets such a page returns EFAULT instead. `process_vm_readv`, of this very process, takes a list
of pieces, so a batch of 256 samples is one call that lets other threads run once, where `preadv` is 256.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

import numpy as np

from deeplink.iovec import IOV_MAX, pairs

if TYPE_CHECKING:
    from collections.abc import Callable

_UNAVAILABLE = {errno.ENOSYS, errno.EPERM}
_usable = True


def _readv() -> Callable[..., int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        call = library.process_vm_readv
    except AttributeError:  # a C library without it
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    found: Callable[..., int] = call
    return found


_call = _readv()


def is_available() -> bool:
    """Tell whether this machine has the call, and no sandbox has refused it so far."""
    return _call is not None and _usable


def gather(sources: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> int:
    """Copy `lengths[i]` bytes from `sources[i]` to `targets[i]`; return how many pieces were copied.

    Pieces are copied in order; the one after those that were copied cannot be read. Fewer than all, and
    `is_available` false from then on, where the machine does not let us.

    Args:
        sources: uint64 addresses within mappings that outlive the call.
        lengths: int64, bytes.
        targets: uint64 addresses of writable memory that outlives the call.
    """
    local, remote = pairs(targets, lengths), pairs(sources, lengths)
    done = 0
    while done < len(sources) and is_available():
        count = min(IOV_MAX, len(sources) - done)
        copied = _copied(local[done : done + count], remote[done : done + count])
        wanted = int(lengths[done : done + count].sum())
        if copied != wanted:
            ends = np.cumsum(lengths[done : done + count])
            return done + int(np.searchsorted(ends, copied, side="right"))
        done += count
    return done


def _copied(local: np.ndarray, remote: np.ndarray) -> int:
    global _usable  # noqa: PLW0603 - what a sandbox refuses once it refuses always
    if _call is None:
        return 0
    copied = _call(os.getpid(), local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if copied < 0:
        if ctypes.get_errno() in _UNAVAILABLE:
            _usable = False
        return 0
    return copied
