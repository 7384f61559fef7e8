"""`deeplink.section`: the training loop says what it is about while it does something else than training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.progress import reporter

if TYPE_CHECKING:
    from types import TracebackType

LONGEST_NAME = 64
CHECKPOINT = "checkpoint"
"""What `deeplink.Checkpoints` enters by itself."""


class Section:
    """A section to be entered, as a context manager."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        ours = reporter()
        if ours is not None:
            ours.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ours = reporter()
        if ours is not None:
            ours.leave(self)


def section(name: str) -> Section:
    """Return a context manager for what takes another time than a step: `with deeplink.section("evaluation"):`.

    How long each section may take without news is learned apart. Outside of any it is training steps, and before
    the first of these "setup". Of nested ones the innermost counts; an error leaves it. Microseconds, never waits,
    nothing outside of a job. `deeplink.Checkpoints` enters "checkpoint" by itself.

    Args:
        name: setup, evaluation, checkpoint, or a word of your own.

    Raises:
        ValueError: the name is empty, or has over 64 characters.
    """
    if not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"a section's name has 1 to {LONGEST_NAME} characters")
    return Section(name)
