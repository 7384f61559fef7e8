"""Calls a function that may hang in the kernel (a dead mount, a name server) and waits a bounded time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


def call_with_timeout(work: Callable[[], Value], longest_s: float) -> Value:
    """Return what `work` returns, or raise what it raises.

    Raises:
        TimeoutError: it took longer; its thread is left behind, and ends with the process at the latest.
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(problem)

    threading.Thread(target=run, name="deeplink-bounded", daemon=True).start()
    return future.result(longest_s)
