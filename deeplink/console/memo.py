"""What is made from the same parts as at the last look is not made again: most nodes and jobs stay the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")


@dataclass(slots=True)
class Memo:
    """What was made at the last look and at this one, by kind and key. One thread only."""

    _before: dict[tuple[str, object], tuple[tuple[object, ...], Any]] = field(default_factory=dict)
    _now: dict[tuple[str, object], tuple[tuple[object, ...], Any]] = field(default_factory=dict)

    def look(self) -> None:
        """Begin another look: what the one before did not ask for is forgotten."""
        self._before, self._now = self._now, {}

    def of(self, kind: str, key: object, parts: tuple[object, ...], make: Callable[..., Made]) -> Made:
        """Return `make(*parts)`; the very object that it was for equal parts at the last look."""
        have = self._before.get((kind, key))
        if have is None or (have[0] is not parts and have[0] != parts):
            have = (parts, make(*parts))
        self._now[kind, key] = have
        made: Made = have[1]
        return made
