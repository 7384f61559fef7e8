"""A background thread that works on the newest waiting item and does not keep the process alive."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

IDLE_S: Final = 600.0
"""A thread without work ends after so long."""
EXIT_S: Final = 60.0
"""How long the end of the process waits for work under way."""

_lines: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()


class BackgroundQueue:
    """One thread that works on the newest of the names it is given. Safe to use from several threads.

    The thread is a daemon: storage that hangs must not keep a process from ending. The end of the process waits
    for it, for `EXIT_S` at most.

    Args:
        doing: what is done, for the log.
        work: does it for a name.

    Attributes:
        failed: the first failure that nobody was told of.
        stopped: set when the process ends.
    """

    def __init__(self, doing: str, work: Callable[[str], None]) -> None:
        self.doing, self._work = doing, work
        self._changed = threading.Condition()
        self._waiting: str | None = None
        self._current: str | None = None
        self.failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closing = False
        self.stopped = threading.Event()
        _lines.add(self)

    @property
    def current(self) -> str | None:
        """The name that is being worked on."""
        return self._current

    def begin(self) -> None:
        """Have a thread; Python begins none any more once the process ends."""
        with self._changed:
            if self._process != os.getpid():  # forked: the thread is the parent's, and so is what it does
                self._process, self._thread, self._waiting, self._current = os.getpid(), None, None, None
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=f"deeplink-{self.doing}", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as problem:
                    self._thread, waiting, self._waiting = None, self._waiting, None
                    log.error("%s: not of %s, the process ends (%s)", self.doing, waiting, problem)  # noqa: TRY400

    def offer(self, name: str) -> None:
        """Have a name worked on; it replaces one that waits."""
        with self._changed:
            self._waiting, displaced = name, self._waiting
            self._changed.notify_all()
        if displaced is not None:
            log.info("%s: not of %s, %s is newer", self.doing, displaced, name)
        self.begin()

    def is_done(self, timeout_s: float | None = None) -> bool:
        """Wait until there is nothing to do, for so long; tell whether there is nothing."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._current is None, timeout_s)

    def close(self) -> None:
        """Let the thread end once it has nothing to do; a later offer begins another."""
        with self._changed:
            self._closing = self._thread is not None
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def forget_failure(self) -> None:
        """Take back what failed: it was made good."""
        self.failed = None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting is not None or self._closing, IDLE_S):
                    self._closing = True
                name, self._waiting = self._waiting, None
                if name is None:
                    self._thread, self._closing = None, False
                    return
                self._current = name
            try:
                self._work(name)
            except BaseException as problem:  # noqa: BLE001 - the training loop gets it; the next may do well
                log.error("%s failed: %s", self.doing, problem)  # noqa: TRY400
                self.failed = self.failed or problem
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()


def finish(timeout_s: float | None = None) -> bool:
    """Wait for all work under way, together for so long (None: `EXIT_S`); tell whether all is done."""
    until = time.monotonic() + (EXIT_S if timeout_s is None else timeout_s)
    done = True
    for line in list(_lines):
        if not line.is_done(max(0.0, until - time.monotonic())):
            done = False
            log.error("%s does not end: left behind", line.doing)
        line.stopped.set()
    return done


atexit.register(finish)
