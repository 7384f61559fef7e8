"""A straggler's other half: stops processes and lets them go on, by turns, until told to end or none is left.

python -m deeplink.scheduler.sandbox.lab.duty SHARE PERIOD_S PID:START...
"""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.processes import ProcessId

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

LONGEST_S = 3600.0


def processes_of(words: Sequence[str]) -> list[ProcessId]:
    """Return the processes that `PID:START` words name.

    >>> processes_of(["17:4711"])
    [ProcessId(pid=17, start=4711)]
    """
    pairs = (word.partition(":") for word in words)
    return [ProcessId(int(pid), int(start)) for pid, _, start in pairs]


def main(words: Sequence[str]) -> int:
    """Take turns; 0 once it is over, with every process going on."""
    share, period_s, those = float(words[0]), float(words[1]), processes_of(words[2:])
    ended = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        ended = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    deadline = time.monotonic() + LONGEST_S
    while not ended and time.monotonic() < deadline:
        stopped = [who.send(signal.SIGSTOP) for who in those]
        time.sleep(share * period_s)
        for who in those:
            who.send(signal.SIGCONT)
        if not any(stopped):
            break
        time.sleep((1 - share) * period_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
