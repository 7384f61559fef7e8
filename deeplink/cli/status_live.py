"""A screen that is painted again and again, without flicker, and leaves the terminal as it was."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from deeplink.cli.status_screen import console
from deeplink.scheduler.slurm.command import end_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from deeplink.clock import Clock

Seen = TypeVar("Seen")
PATIENCE_S = 2.0
"""How long a command waits without a word; the question itself is bounded where it is asked."""


class Glance(Generic[Seen]):
    """One look, in a thread of its own: the screen and its keys do not wait for a Slurm that hangs."""

    def __init__(self, look: Callable[[], Seen]) -> None:
        self._look = look
        self._seen: list[Seen] = []
        self._problem: BaseException | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="deeplink-look", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._seen.append(self._look())
        except BaseException as problem:  # noqa: BLE001 - raised where it is waited for
            self._problem = problem

    def wait(self, seconds: float) -> Seen | None:
        """Return what was seen, or None where that takes longer; raises what the look raised."""
        self._thread.join(seconds)
        if self._problem is not None:
            raise self._problem
        return self._seen[0] if self._seen else None

    def over(self, shown: RenderableType) -> RenderableType:
        """Return what was shown before, and for how long the next look has been under way."""
        seconds = time.monotonic() - self._began
        return Group(
            shown, Text(f"older: no answer of Slurm or of the storage for {seconds:.0f} s", style="yellow")
        )


def patiently(look: Callable[[], Seen]) -> Seen:
    """Return what `look` returns; say on standard error that it is waited for, if that takes long."""
    glance = Glance(look)
    try:
        seen = glance.wait(PATIENCE_S)
        if seen is None:
            click.echo("waiting for an answer of Slurm ...", err=True)
        while seen is None:
            seen = glance.wait(PATIENCE_S)
    except KeyboardInterrupt:
        end_unfinished()
        raise
    return seen


def repaint(look: Callable[[], tuple[RenderableType, bool]], every_s: float, clock: Clock) -> None:
    """Show what `look` returns every so often, until it says that it is over, or until Ctrl-C (exit code 130).

    What was seen last stays on the terminal. Where standard output is no terminal, each look is printed below the
    one before.
    """
    out = console()
    shown, over = look()
    try:
        if not out.is_terminal:
            out.print(shown)
            while not over:
                clock.sleep(every_s)
                shown, over = look()
                out.print(shown)
            return
        # The alternate screen: rows of the terminal are overwritten, never cleared first.
        with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
            live.update(shown, refresh=True)
            while not over:
                clock.sleep(every_s)
                glance = Glance(look)
                while (seen := glance.wait(every_s)) is None:
                    live.update(glance.over(shown), refresh=True)
                shown, over = seen
                live.update(shown, refresh=True)
        out.print(shown)
    except KeyboardInterrupt:
        end_unfinished()
        if out.is_terminal:
            out.print(shown)
        raise click.exceptions.Exit(130) from None
