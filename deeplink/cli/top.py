"""`deeplink top`: jobs live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from rich.console import RenderableType


_EPILOG = """
Keys: q ends it; j, s, r, l, n sort by job, step, rate, loss, nodes, and once more turns the order; a shows
everybody's jobs, or only yours. Where standard output or input is no terminal, one table is printed.

\b
Examples:
  deeplink top
  deeplink top --sort rate
  deeplink top --all --once      one table, and exit
"""


@click.command("top", epilog=_EPILOG)
@click.option(
    "--all", "everything", is_flag=True, help="Everybody's jobs, and those that DeepLink knows nothing of."
)
@click.option(
    "--sort",
    type=click.Choice(["job", "step", "rate", "loss", "nodes"]),
    default="job",
    show_default=True,
    help="What comes first.",
)
@click.option(
    "--interval",
    type=FiniteRange(0.5, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often.",
)
@click.option("--once", is_flag=True, help="Print one table and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one table as JSON and exit.")
def command(*, everything: bool, sort: str, interval: float, once: bool, as_json: bool) -> None:
    """Show jobs live, sorted as you like."""
    import sys

    from deeplink.cli.status_screen import console
    from deeplink.cli.top_screen import ScreenChoice, of_top
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.view.look import Viewer, me, shared

    config, clock = load_config(), SystemClock()
    viewer = Viewer(asked=shared(config.state, clock, interval), state=config.state, clock=clock, user=me())
    choice = ScreenChoice(sort=sort, everything=everything)
    if as_json:
        import json

        from deeplink.cli.status_json import document_of_table

        table = document_of_table(viewer.table(everything=everything))
        click.echo(json.dumps(table, indent=2, ensure_ascii=False, allow_nan=False))
        return
    out = console()

    def look(now: ScreenChoice) -> RenderableType:
        return of_top(viewer.table(everything=now.everything), now, clock.unix())

    if once or not (out.is_terminal and sys.stdin.isatty()):
        from deeplink.cli.status_live import patiently

        out.print(patiently(lambda: look(choice)))
        return
    from deeplink.cli.top_keys import run

    run(look, choice, interval, out)
