"""A screen that repaints, and listens to keys meanwhile; the terminal is left as it was."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.live import Live

from deeplink.cli.status_live import Glance
from deeplink.scheduler.slurm.command import end_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from deeplink.cli.top_screen import ScreenChoice


SLICE_S = 0.5


def run(
    look: Callable[[ScreenChoice], RenderableType], choice: ScreenChoice, every_s: float, out: Console
) -> None:
    """Show what `look` returns every so often and after each key, until q or Ctrl-C."""
    shown = look(choice)
    try:
        with keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
            live.update(shown, refresh=True)
            while not choice.over:
                changed = _after(choice, pressed(every_s))
                if changed.over:
                    break
                glance = Glance(partial(look, changed))
                while (seen := glance.wait(SLICE_S)) is None and not changed.over:
                    live.update(glance.over(shown), refresh=True)
                    changed = _after(changed, pressed(SLICE_S))
                choice, shown = changed, seen or shown
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass  # as good a way to end it as q
    end_unfinished()
    out.print(shown)


def _after(choice: ScreenChoice, pressed: str) -> ScreenChoice:
    for key in pressed:
        choice = choice.pressed(key)
    return choice


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Give what waits so long for keys and returns those pressed; without echo, and without Enter."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        if not ready:
            return ""
        # Nothing at all: the terminal is gone.
        return os.read(terminal, 64).decode(errors="replace") or "q"

    try:
        tty.setcbreak(terminal)
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
