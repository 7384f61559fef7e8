"""A bounded wait for what may hang: a dead mount, a name server, a frozen controller."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.clock import Clock

T = TypeVar("T")

NEVER = float("-inf")
PROBE_WAIT_S = 0.2
"""A `CachedProbe` is waited for so long; after that its caller gets the last value."""


def start_call(work: Callable[[], T]) -> Future[T]:
    """Do `work` in a daemon thread; return where what it returns or raises will be."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(problem)

    threading.Thread(target=run, name="deeplink-bounded", daemon=True).start()
    return future


def call_with_timeout(work: Callable[[], T], longest_s: float) -> T:
    """Return or raise what `work` does; TimeoutError after `longest_s`, with a daemon thread left behind."""
    future = start_call(work)
    try:
        return future.result(longest_s)
    except TimeoutError:
        if future.done():  # the work's own
            raise
        raise TimeoutError(f"not done within {longest_s:g} s") from None


class LastAnswer(Generic[T]):
    """A question that may hang, asked in a thread, one at a time, and its last answer. One thread asks."""

    def __init__(self, question: Callable[[], T | None], clock: Clock, name: str, first: T | None = None) -> None:
        self._question, self._clock, self._name = question, clock, name
        self._thread: threading.Thread | None = None
        self.value = first  # the last answer that was not None
        self.answered = NEVER  # when the question that `value` answers was asked
        self.asked = NEVER  # when the newest question that has come back was asked
        self.began = self.ended = NEVER  # of the newest question, and of the newest that has come back

    @property
    def is_under_way(self) -> bool:
        """Whether a question has not come back."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self) -> None:
        """Ask now, unless a question is under way; does not wait."""
        if self.is_under_way:
            return
        self.began = self._clock.monotonic()
        thread = threading.Thread(target=self._run, args=(self.began,), name=self._name, daemon=True)
        with suppress(RuntimeError):  # no more threads: the last answer has to do
            thread.start()
            self._thread = thread

    def wait(self, longest_s: float) -> None:
        """Wait for the question that is under way."""
        if self._thread is not None:
            self._thread.join(longest_s)

    def _run(self, began: float) -> None:
        try:
            answer = self._question()
            if answer is not None:
                self.value, self.answered = answer, began
            self.asked = began
        finally:
            self.ended = self._clock.monotonic()


class CachedProbe(Generic[T]):
    """The last value of a probe that may hang and returns no None. Thread-safe.

    It is not repeated for `kept_s` seconds, nor for `share` times as long as it took.
    """

    def __init__(self, probe: Callable[[], T], first: T, clock: Clock, *, kept_s: float, share: float) -> None:
        self._last = LastAnswer(probe, clock, "deeplink-look", first)
        self._first, self._clock = first, clock
        self._kept_s, self._share = kept_s, share
        self._lock = threading.Lock()

    def __call__(self) -> T:
        """Return the last value, within about PROBE_WAIT_S."""
        last = self._last
        with self._lock:
            now = self._clock.monotonic()
            pause_s = max(self._kept_s, self._share * (last.ended - last.began)) if last.ended > NEVER else 0.0
            if not last.is_under_way and now > last.ended + pause_s:
                last.ask()
            left_s = last.began + PROBE_WAIT_S - now
        if left_s > 0:
            last.wait(left_s)
        return self._first if last.value is None else last.value
