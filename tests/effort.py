"""How many examples a property is tried on: a quarter in `make test`, all of them in `make thorough`."""

from __future__ import annotations

from hypothesis import settings

ALL = 100
"""What the profile `thorough` has for a property that names no number; `untimed` has a quarter of it."""


def examples(number: int) -> int:
    """Return how many of `number` examples this run tries."""
    return max(min(number, 5), number * settings().max_examples // ALL)
