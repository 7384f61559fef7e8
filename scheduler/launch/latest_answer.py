"""Keeps the last answer to a question that may hang; a thread asks, one question at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock

T = TypeVar("T")


class LastAnswer(Generic[T]):
    """A question and its last answer. The supervising thread alone uses it.

    Args:
        question: asked in the thread; it returns None where nobody answers.
        clock: for every moment.
        name: the thread's.

    Attributes:
        value: the last answer; None while there is none.
        asked: when the newest question that has come back was asked; minus infinity before the first.
        answered: when the question that `value` answers was asked.
    """

    def __init__(self, question: Callable[[], T | None], clock: Clock, name: str) -> None:
        self._question, self._clock, self._name = question, clock, name
        self._thread: threading.Thread | None = None
        self.value: T | None = None
        self.asked = self.answered = float("-inf")

    def ask(self) -> None:
        """Ask now, unless a question is under way; does not wait."""
        if self._thread is None or not self._thread.is_alive():
            began = self._clock.monotonic()
            self._thread = threading.Thread(target=self._run, args=(began,), name=self._name, daemon=True)
            self._thread.start()

    def _run(self, began: float) -> None:
        answer = self._question()
        if answer is not None:
            self.value, self.answered = answer, began
        self.asked = began
