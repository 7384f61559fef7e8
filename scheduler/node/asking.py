"""How a rank is asked for its stacks: what agent and rank must agree on. Imported by training processes: light."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ASKING = int(signal.SIGRTMAX) - 5
"""The signal that makes a rank write its stacks down. USR1 and USR2 are taken by Slurm's scripts, Lightning,
submitit and NCCL; of the real-time ones the lowest are used by C libraries, runtimes and debuggers."""


def answer_file(folder: Path, pid: int) -> Path:
    """Return where the rank with this process id, as it knows itself, writes its stacks."""
    return folder / f"stacks-{pid}"


def catches(status: Iterable[str], number: int) -> bool:
    r"""Whether a process minds a signal, by the lines of its /proc/PID/status: who does not is ended by it.

    >>> catches(["Name:\tpython", "SigCgt:\t0000000000000002"], 2)
    True
    """
    masks = [line.split(":", 1)[1].strip() for line in status if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
