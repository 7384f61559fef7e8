"""One piece of work beside the training loop, at most; its failure is told, never lost."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Background:
    """Does one piece of work at a time in a thread of its own.

    The thread is no daemon: a process that ends, also by Ctrl-C, finishes what is under way. One that is killed
    leaves a draft, which nobody takes for a checkpoint. Meant for one caller at a time.

    Args:
        doing: what is done, for the log.
    """

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._process = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        self._forget_in_child()
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`, once what is under way has ended; a failure stays to be raised."""
        self._join(None)
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"deeplink-{self.doing}")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True once nothing is under way, False after `timeout_s`.

        Raises:
            BaseException: something failed so since the last time.
        """
        ended = self._join(timeout_s)
        if ended:
            self.raise_failure()
        return ended

    def note(self, problem: BaseException) -> None:
        """Keep a failure, to be raised where the caller waits; the first of several."""
        log.error("%s failed: %s", self.doing, problem)
        self._failed = self._failed or problem

    def _join(self, timeout_s: float | None) -> bool:
        self._forget_in_child()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing.

        Raises:
            BaseException: it failed so.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _forget_in_child(self) -> None:
        if self._process != os.getpid():  # forked: the thread is the parent's, and so is its failure
            self._process, self._thread, self._failed = os.getpid(), None, None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - whatever it is, the training loop gets it
            self.note(problem)
