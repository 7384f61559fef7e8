"""A look at a disk that does not end: the disk's fault, or that of a node with much to do.

Under a full load of training and checkpoints a small write may wait for minutes behind others'. What tells that
from a disk that hangs: the thread gets the processor, and the disk completes nothing for anybody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.reading import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

WAITS_INSIDE = frozenset({"D", "S"})
"""States, as in proc(5), of a thread that waits for something else than a processor."""
_READS, _WRITES, _DISCARDS, _FLUSHES = 0, 4, 11, 15  # requests completed, of Documentation/block/stat.rst


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """How a look that has not ended stands.

    Attributes:
        age_s: for how long it has been under way.
        state: of its thread, a letter as in proc(5); empty where unknown.
        starved_s: for how much of that it waited for a processor.
        goes_on: its disk has completed requests since it was last asked; None where that cannot be told.
    """

    age_s: float
    state: str
    starved_s: float = 0.0
    goes_on: bool | None = None

    @property
    def starved(self) -> str:
        """Why it says nothing of the disk; empty where it does."""
        if self.state in WAITS_INSIDE:
            return ""
        return "its thread is stopped" if self.state in {"T", "t"} else "its thread waits for a processor"

    @property
    def waited_s(self) -> float:
        """For how long it waited for the disk, and not for a processor."""
        return max(0.0, self.age_s - self.starved_s)


def starved_s(thread: int, proc: Path = Path("/proc")) -> float:
    """Return how long a thread of ours has waited for a processor in its life; 0 where the kernel does not say."""
    words = (text_of(proc / "self" / "task" / str(thread) / "schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) > 1 and words[1].isdigit() else 0.0


def state_of(thread: int, proc: Path = Path("/proc")) -> str:
    """Return the state of a thread of ours; empty where there is none such."""
    _, _, after = (text_of(proc / "self" / "task" / str(thread) / "stat") or "").rpartition(")")
    return after.split()[0] if after.split() else ""


def completed(device: int, sys: Path = Path("/sys")) -> int | None:
    """Return how many requests a block device has completed; None where the file system is on no single one."""
    text = text_of(sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}" / "stat")
    return total(text.split()) if text else None


def total(words: Sequence[str]) -> int | None:
    """Return the completed requests in the words of a device's `stat`; None where it is none.

    >>> total("10 0 80 1 5 0 40 2 1 3 3".split()), total([])
    (15, None)
    """
    numbers = [words[at] for at in (_READS, _WRITES, _DISCARDS, _FLUSHES) if at < len(words)]
    return sum(map(int, numbers)) if numbers and all(number.isdigit() for number in numbers) else None
