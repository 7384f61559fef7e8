"""Reads as training does: a step at a time, the batches of the next ones read ahead by a thread."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cache.sides.base import Batches, Side

AHEAD = 4
_END = None


class Pace:
    """Hands out a side's batches in steps.

    Args:
        side: what is read.
        step_s: what a step takes once its batch is there.

    Attributes:
        longest_s: the longest that a step waited for its batch.
        failed: batches that could not be read; they are left out.
        why: of the first of them.
    """

    def __init__(self, side: Side, step_s: float) -> None:
        self._side, self._step_s = side, step_s
        self.longest_s, self.failed, self.why = 0.0, 0, ""
        self._ahead: queue.Queue[Sequence[bytes | memoryview] | None] = queue.Queue(AHEAD)

    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        """Yield each batch; after it, wait until its step is over."""
        reader = threading.Thread(target=self._read_ahead, args=(wanted,))
        reader.start()
        asked = time.perf_counter()
        while (batch := self._ahead.get()) is not _END:
            came = time.perf_counter()
            self.longest_s = max(self.longest_s, came - asked)
            yield batch
            time.sleep(max(0.0, came + self._step_s - time.perf_counter()))
            asked = time.perf_counter()
        reader.join()

    def _read_ahead(self, wanted: Sequence[Sequence[int]]) -> None:
        for rows in wanted:
            try:
                (batch,) = self._side.read([rows])
            except Exception as problem:  # noqa: BLE001 - counted; the run goes on, as a careful training would
                traceback.print_exc(file=sys.stderr)
                self.failed += 1
                self.why = self.why or f"{type(problem).__name__}: {problem}"
            else:
                self._ahead.put(batch)
        self._ahead.put(_END)
