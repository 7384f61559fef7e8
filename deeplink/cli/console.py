"""`deeplink console`: serve the operator's page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from deeplink.console.collect import Collector


@click.command(
    epilog="""\b
Examples:
  deeplink console                              the page at http://127.0.0.1:8642/
  deeplink console --bind 127.0.0.1:0 --open    any free port, and open a browser
  deeplink console --json | jq .headline        how is it? once, for scripts
  ssh -L 8642:127.0.0.1:8642 HEADNODE           see it from your own machine
  deeplink console --bind 0.0.0.0:8642 --token-file /etc/deeplink/console.token
"""
)
@click.option(
    "--bind",
    metavar="HOST:PORT",
    help="Where to listen [config: console_bind, 127.0.0.1:8642]; port 0 takes any free one.",
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    help="The watchdog's journal [default: the one of this user's state folder].",
)
@click.option(
    "--interval",
    type=FiniteRange(0.2, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look; one look for all browsers.",
)
@click.option("--no-slurm", is_flag=True, help="Ask Slurm nothing: show the journal alone.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="0600 file with the token that every request must carry; needed beyond loopback.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A name this console is also called by (Host header); may be repeated.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one snapshot as JSON and exit.")
def command(
    *,
    bind: str | None,
    journal: Path | None,
    interval: float,
    no_slurm: bool,
    token_file: Path | None,
    allow_host: tuple[str, ...],
    open_page: bool,
    as_json: bool,
) -> None:
    """Serve the operator's page: nodes on the switch tree, jobs, shards, incidents, live.

    It only reads: Slurm's state (one question of each kind per interval, however many look) and the watchdog's
    journal. It listens on this machine alone unless it has a token file. Stop it with Ctrl-C.
    """
    from deeplink.config import load_config
    from deeplink.console.collect import Collector, ConsoleSettings
    from deeplink.console.errors import ExtraMissingError
    from deeplink.console.guard import Access
    from deeplink.scheduler.watch.journal import default_journal

    config = load_config()
    settings = ConsoleSettings(
        journal=journal or default_journal(config.state), interval_s=interval, slurm=not no_slurm
    )
    if as_json:
        click.echo(_snapshot(Collector(settings)))
        return
    try:
        from deeplink.console.run import run
    except ModuleNotFoundError as missing:
        raise ExtraMissingError(missing.name or "") from missing
    token = _token(token_file)

    def started(url: str) -> None:
        click.echo(f"console: {url}   (Ctrl-C ends it)")
        if open_page:
            click.launch(url)

    run(
        Collector(settings),
        bind or config.console_bind,
        Access(token, frozenset(name.lower() for name in allow_host)),
        started,
    )


def _snapshot(collector: Collector) -> str:
    import json
    from contextlib import closing

    from deeplink.console.snapshot import build

    with closing(collector):
        collector.refresh_slurm()
        return json.dumps(build(collector.readings()).document(), indent=2, ensure_ascii=False, allow_nan=False)


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    from deeplink.tokens import read_token

    return read_token(path)
