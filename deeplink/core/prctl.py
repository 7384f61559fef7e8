"""What Linux does for a process about its parent and its descendants (prctl(2)); Python has no call for it."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """Be the parent of descendants whose own parent ends. Raises OSError."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process with `parent`, or at once where that has ended. Raises OSError."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
