"""A queue between two threads, bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

Value = TypeVar("Value", bound="Sized")


class AbandonedError(Exception):
    """Nobody takes the values any more; why, the taker's own error says."""


class BrokenOffError(Exception):
    """The maker ended before all values were there; why, its own error says."""


class Handover(Generic[Value]):
    """Values on their way: one thread gives and ends, another iterates and closes, each however it ends.

    Args:
        most_bytes: how much may wait to be taken; a value larger than that waits alone.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._waiting: deque[Value] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._ended = self._broken = self._closed = False

    def give(self, value: Value) -> None:
        """Hand over a value once there is room for it.

        Raises:
            AbandonedError: the taker has closed.
        """
        with self._changed:
            while self._waiting and self._bytes + len(value) > self._most and not self._closed:
                self._changed.wait()
            if self._closed:
                raise AbandonedError
            self._waiting.append(value)
            self._bytes += len(value)
            self._changed.notify_all()

    def end(self, *, broken: bool = False) -> None:
        """Say that no more values come; `broken`: although there should have been more."""
        with self._changed:
            self._ended, self._broken = True, self._broken or broken
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no more values are taken."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Value]:
        """Yield the values as they come.

        Raises:
            BrokenOffError: there should have been more.
        """
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if self._broken:
                    raise BrokenOffError
                if not self._waiting:
                    return
                value = self._waiting.popleft()
                self._bytes -= len(value)
                self._changed.notify_all()
            yield value
