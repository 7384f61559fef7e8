"""A screen that is painted again and again, without flicker, and leaves the terminal as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.live import Live

from deeplink.cli.status_screen import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.clock import Clock


def repaint(look: Callable[[], tuple[object, bool]], every_s: float, clock: Clock) -> None:
    """Show what `look` returns every so often, until it says that it is over, or until Ctrl-C (exit code 130).

    What was seen last stays on the terminal. Where standard output is no terminal, each look is printed below the
    one before.
    """
    out = console()
    shown, over = look()
    interrupted = False
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
            while True:
                live.update(shown, refresh=True)  # type: ignore[arg-type] # whatever rich can draw
                if over:
                    break
                clock.sleep(every_s)
                shown, over = look()
    except KeyboardInterrupt:
        interrupted = True
    if out.is_terminal:
        out.print(shown)
    if interrupted:
        raise click.exceptions.Exit(130)
