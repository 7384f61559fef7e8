"""Runs calls that may block for ever (a dead file system) in a thread and waits a bounded time."""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")


@dataclass(slots=True)
class _Question(Generic[T]):
    work: Callable[[], T]
    answered: threading.Event = field(default_factory=threading.Event)
    answer: list[T] = field(default_factory=list)
    problem: BaseException | None = None

    def put(self) -> None:
        try:
            self.answer.append(self.work())
        except BaseException as problem:  # noqa: BLE001 - whoever asked gets it
            self.problem = problem
        self.answered.set()


class BlockingIo:
    """Asks one thing at a time about `path`; whoever asks while an answer is overdue is told so at once.

    Safe to use from several threads. The thread is a daemon, made when first needed: none is begun anew when the
    process ends, which Python refuses from 3.12 on. It ends with this object.

    Attributes:
        path: what may not answer, for the error.
        patience_s: how long an answer is waited for.
        signs: how often `stir` was called: a question that reads much is waited for while it goes on.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self.path, self.patience_s = path, patience_s
        self.signs = 0
        self._lock = threading.Lock()
        self._late: _Question[Any] | None = None
        self._questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether an answer was due that has not come yet."""
        return self._late is not None and not self._late.answered.is_set()

    def stir(self, _size: int = 0) -> None:
        """Note that the question under way goes on."""
        self.signs += 1

    def ask(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """Return what `work` returns.

        Raises:
            TimeoutError: it takes longer without a `stir`; it may still be done later.
            BaseException: it raised that.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        if not self._lock.acquire(timeout=patience_s):
            raise self._overdue(patience_s)
        try:
            question = _Question(work)
            if self.is_overdue or not self._begin(question):
                raise self._overdue(patience_s)
            self._late = None
            while True:
                seen = self.signs
                if question.answered.wait(patience_s):
                    break
                if self.signs == seen:
                    self._late = question
                    if self.is_overdue:  # else the answer has come just now
                        raise self._overdue(patience_s)
        finally:
            self._lock.release()
        if question.problem is not None:
            raise question.problem
        return question.answer[0]

    def _overdue(self, patience_s: float) -> TimeoutError:
        return TimeoutError(f"{self.path} does not answer (waited {patience_s:g} s)")

    def _begin(self, question: _Question[Any]) -> bool:
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
        self._questions.put(question)
        return True


def _answer(questions: queue.SimpleQueue[_Question[Any] | None]) -> None:
    """Put one question after the other, up to None; holds nothing that would keep whoever asks alive."""
    while (question := questions.get()) is not None:
        question.put()
        del question
