"""A screen that repaints, and listens to keys meanwhile; the terminal is left as it was."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from deeplink.cli.top_screen import Choice


def run(look: Callable[[Choice], RenderableType], choice: Choice, every_s: float, out: Console) -> None:
    """Show what `look` returns every so often and after each key, until q or Ctrl-C."""
    shown = look(choice)
    with keys() as wait, Live(console=out, screen=True, auto_refresh=False) as live:
        try:
            while not choice.over:
                live.update(shown, refresh=True)
                end = time.monotonic() + every_s
                while (left := end - time.monotonic()) > 0:
                    pressed = wait(left)
                    before, choice = choice, _after(choice, pressed)
                    if choice != before or choice.over:
                        break
                if not choice.over:
                    shown = look(choice)
        except KeyboardInterrupt:
            pass  # as good a way to end it as q
    out.print(shown)


def _after(choice: Choice, pressed: str) -> Choice:
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
