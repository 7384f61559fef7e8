"""Threads for what may be long or hang: one save at a time, the newest of many copies, questions to storage."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_S: Final = 600.0
"""A thread without work ends after so long."""
EXIT_S: Final = 60.0
"""How long the end of the process waits for work under way."""

_queues: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()


class Background:
    """Does one piece of work at a time in a thread of its own.

    The thread is no daemon: a process that ends, also by Ctrl-C, finishes what is under way. One that is killed
    leaves a draft, which is no checkpoint. Meant for one caller at a time.
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
        thread = threading.Thread(target=self._run, args=(work,), name=f"deeplink-{self.doing}")
        thread.start()  # where the system gives no thread, the next call may try again
        self._thread = thread

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True once nothing is under way, False after `timeout_s`."""
        ended = self._join(timeout_s)
        if ended:
            self.raise_failure()
        return ended

    def _join(self, timeout_s: float | None) -> bool:
        self._forget_in_child()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing."""
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
            log.error("%s failed: %s", self.doing, problem)  # noqa: TRY400
            self._failed = self._failed or problem


class BackgroundQueue:
    """One thread that works on the newest of the names it is given. Safe to use from several threads.

    The thread is a daemon: storage that hangs must not keep a process from ending. The end of the process waits
    for it, for `EXIT_S` at most.
    """

    def __init__(self, doing: str, work: Callable[[str], None]) -> None:
        self.doing, self._work = doing, work
        self._changed = threading.Condition()
        self._waiting: str | None = None
        self.current: str | None = None  # the name that is being worked on
        self.failed: BaseException | None = None  # the first failure since `raise_failure`
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closing = False
        self.stopped = threading.Event()  # set when the process ends
        _queues.add(self)

    def begin(self) -> None:
        """Have a thread; Python begins none any more once the process ends."""
        with self._changed:
            if self._process != os.getpid():  # forked: the thread is the parent's, and so is what it does
                self._process, self._thread, self._waiting, self.current = os.getpid(), None, None, None
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=f"deeplink-{self.doing}", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as problem:
                    self._thread, skipped, self._waiting = None, self._waiting, None
                    self.failed = self.failed or problem
                    self._changed.notify_all()
                    log.error("%s skipped for %s: no thread can be begun (%s)", self.doing, skipped, problem)  # noqa: TRY400

    def offer(self, name: str) -> None:
        """Have a name worked on; it replaces one that waits."""
        with self._changed:
            self._waiting, displaced = name, self._waiting
            self._changed.notify_all()
        if displaced is not None:
            log.info("%s skipped for %s: %s is newer", self.doing, displaced, name)
        self.begin()

    def is_done(self, timeout_s: float | None = None) -> bool:
        """Wait until there is nothing to do, for so long; tell whether there is nothing."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self.current is None, timeout_s)

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

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting is not None or self._closing, IDLE_S):
                    self._closing = True
                name, self._waiting = self._waiting, None
                if name is None:
                    self._thread, self._closing = None, False
                    return
                self.current = name
            try:
                self._work(name)
            except BaseException as problem:  # noqa: BLE001 - the training loop gets it; the next may do well
                log.error("%s failed: %s", self.doing, problem)  # noqa: TRY400
                self.failed = self.failed or problem
            finally:
                with self._changed:
                    self.current = None
                    self._changed.notify_all()


def finish(timeout_s: float | None = None) -> bool:
    """Wait for all work under way, together for so long (None: `EXIT_S`); tell whether all is done."""
    until = time.monotonic() + (EXIT_S if timeout_s is None else timeout_s)
    done = True
    for one in list(_queues):
        if not one.is_done(max(0.0, until - time.monotonic())):
            done = False
            log.error("%s does not end: left behind", one.doing)
        one.stopped.set()
    return done


atexit.register(finish)


class BlockingIo:
    """Asks one thing at a time about `path` for a bounded time; raises at once while an answer is overdue.

    Safe to use from several threads. The thread is a daemon, made when first needed: none is begun again when the
    process ends, which Python refuses from 3.12 on. It ends with this object.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path, self.patience_s = path, patience_s
        self.signs = 0
        self._lock = threading.Lock()
        self._late: Future[Any] | None = None
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether an answer was due that has not come yet."""
        return self._late is not None and not self._late.done()

    def stir(self, _size: int = 0) -> None:
        """Note that the question under way goes on: one that reads much is waited for meanwhile."""
        self.signs += 1

    def ask(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """Return what `work` returns, or raise TimeoutError: it may still be done later."""
        patience_s = self.patience_s if patience_s is None else patience_s
        overdue = TimeoutError(f"{self.path} does not answer (waited {patience_s:g} s)")
        if not self._lock.acquire(timeout=patience_s):
            raise overdue
        try:
            answer: Future[T] = Future()
            if self.is_overdue or not self._begin(work, answer):
                raise overdue
            self._late = None
            while True:
                seen = self.signs
                if wait([answer], patience_s).done:
                    break
                if self.signs == seen:
                    self._late = answer
                    if self.is_overdue:  # else the answer has come just now
                        raise overdue
        finally:
            self._lock.release()
        return answer.result()

    def _begin(self, work: Callable[[], T], answer: Future[T]) -> bool:
        if self._thread is None or not self._thread.is_alive():  # none yet, or this process was forked
            self._questions = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_answer, args=(self._questions,), name="deeplink-patience", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the process ends: no thread can be begun any more
                self._thread = None
                return False
            weakref.finalize(self, self._questions.put, None).atexit = False
        self._questions.put((work, answer))
        return True


def _answer(questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    """Answer one question after the other, up to None; holds nothing that would keep its asker alive."""
    while (question := questions.get()) is not None:
        work, answer = question
        try:
            answer.set_result(work())
        except BaseException as problem:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(problem)
        del question, work, answer
