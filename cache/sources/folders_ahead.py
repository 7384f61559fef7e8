"""Lists folders of a slow source ahead of the walk that goes through them one after another."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from deeplink.cache.sources.origin import Entry

_AHEAD = 16


class ListingAhead:
    """Gives what `entries` gives, for folders in the order of `origin.walk`; sixteen are asked for at once.

    Use `with`: at its end no thread works any more.
    """

    def __init__(self, entries: Callable[[str], Sequence[Entry]]) -> None:
        self._entries = entries
        self._asked: dict[str, Future[Sequence[Entry]]] = {}
        self._next: list[str] = []  # the last one is needed first
        self._pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="deeplink-list")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __call__(self, folder: str) -> Sequence[Entry]:
        """Return what is in a folder; raises what `entries` raises for it."""
        if folder not in self._asked:
            if self._next and self._next[-1] == folder:
                self._next.pop()
            self._ask(folder)
        found = self._asked.pop(folder).result()
        below = sorted((folder + name for name, _, _ in found if name.endswith("/")), reverse=True)
        self._next.extend(below)
        while self._next and len(self._asked) < _AHEAD:
            self._ask(self._next.pop())
        return found

    def _ask(self, folder: str) -> None:
        self._asked[folder] = self._pool.submit(self._entries, folder)
