"""`deeplink status`: how jobs are, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from typing_extensions import override

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deeplink.scheduler.view.look import Viewer

DEFAULT_S = 2.0

_EPILOG = """
Slurm is asked one question of a kind per interval, however many of your commands are open on this host; the rest
is read from the job's folder (docs/jobs.md). What nobody said is "unknown". Where Slurm does not answer, what it
said last is shown with its age.

\b
Examples:
  deeplink status                  your jobs, one line each
  deeplink status 12               one job on one screen
  deeplink status 12_3 --watch     a task of an array, again every 2 s until it has ended or Ctrl-C
  deeplink status 12 --watch=10
  deeplink status --all            everybody's jobs, those without DeepLink too
  deeplink status 12 --json | jq .step
"""


class _OptionalSeconds(click.Command):
    """`--watch` takes its value after `=` alone: in `--watch 12` the 12 is a job."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"--watch={DEFAULT_S:g}" if word == "--watch" else word for word in args])


@click.command("status", cls=_OptionalSeconds, epilog=_EPILOG)
@click.argument("job", required=False)
@click.option(
    "--all", "everything", is_flag=True, help="Everybody's jobs, and those that DeepLink knows nothing of."
)
@click.option(
    "--watch",
    "watch_s",
    type=FiniteRange(0.5, 3600),
    metavar="[=SECONDS]",
    help=f"Look again and again until Ctrl-C, or until the job has ended. [every {DEFAULT_S:g} s]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line.")
def command(*, job: str | None, everything: bool, watch_s: float | None, as_json: bool) -> None:
    """Show how your jobs are, or one of them on one screen."""
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.view.look import Viewer, me, shared

    if job is not None and everything:
        raise click.UsageError("--all lists jobs; leave it out to look at one")
    config, clock = load_config(), SystemClock()
    asked = shared(config.state, clock, watch_s or DEFAULT_S)
    viewer = Viewer(asked=asked, state=config.state, clock=clock, user=me())
    if as_json:
        _print_json(viewer, job, watch_s, everything=everything)
    elif watch_s is None:
        from deeplink.cli.status_live import patiently
        from deeplink.cli.status_screen import console

        console().print(patiently(lambda: _screen(viewer, job, everything=everything))[0])
    else:
        from deeplink.cli.status_live import repaint

        repaint(lambda: _screen(viewer, job, everything=everything), watch_s, clock)


def _screen(viewer: Viewer, job: str | None, *, everything: bool) -> tuple[RenderableType, bool]:
    """Return what is to be shown, and whether there will be nothing new."""
    from deeplink.cli.status_screen import of_job, of_table

    if job is None:
        return of_table(viewer.table(everything=everything), viewer.clock.unix()), False
    one = viewer.one(job)
    return of_job(one, viewer.clock.unix()), one.picture.final


def _print_json(viewer: Viewer, job: str | None, watch_s: float | None, *, everything: bool) -> None:
    import json

    from deeplink.cli.status_json import document_of_one, document_of_table

    while True:
        if job is None:
            document, over = document_of_table(viewer.table(everything=everything)), False
        else:
            one = viewer.one(job)
            document, over = document_of_one(one), one.picture.final
        click.echo(json.dumps(document, indent=None if watch_s else 2, ensure_ascii=False, allow_nan=False))
        if watch_s is None or over:
            return
        viewer.clock.sleep(watch_s)
