"""`deeplink console`: serve the operator's page."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, json_option, option, path_option, real
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    epilog="""\b
Examples:
  deeplink console                              the page at http://127.0.0.1:8642/
  deeplink console --bind 127.0.0.1:0 --open    any free port, and open a browser
  deeplink console --json | jq .headline        how is it? once, for scripts
  ssh -L 8642:127.0.0.1:8642 HEADNODE           see it from your own machine
  deeplink console --bind 0.0.0.0:8642 --token-file /etc/deeplink/console.token
  deeplink console --proxy 127.0.0.1 --allow-host console.site    behind a proxy that knows who is an operator
"""
)
@option("--bind HOST:PORT", "Where to listen [config: console_bind, 127.0.0.1:8642]; port 0 takes any free one.")
@path_option("--journal", "The watchdog's journal [default: the one of this user's state folder].")
@real("--interval SECONDS", "How often to look; one look for all browsers.", 0.2, 3600, default=2.0)
@flag("--no-slurm", "Ask Slurm nothing: show the journal alone.")
@path_option("--token-file", "0600 file with the token that every request must carry; needed beyond loopback.")
@option(
    "--allow-host NAME", "A name this console is also called by (Host header); may be repeated.", multiple=True
)
@option(
    "--proxy ADDRESS",
    "Believe this reverse proxy's X-Remote-User and X-Deeplink-Role: operator; may be repeated.",
    multiple=True,
)
@path_option(
    "--operator-token-file",
    "0600 file with the token by which the console asks the watchdog for a proxy's operators [default: MUNGE].",
)
@flag("--open", "Open the page in a browser.", name="open_page")
@json_option("Print one snapshot as JSON and exit.")
def command(
    *,
    bind: str | None,
    journal: Path | None,
    interval: float,
    no_slurm: bool,
    token_file: Path | None,
    allow_host: tuple[str, ...],
    proxy: tuple[str, ...],
    operator_token_file: Path | None,
    open_page: bool,
    as_json: bool,
) -> None:
    """Serve the operator's page, live: what needs a hand now, fabric, jobs, cache, incidents.

    It reads Slurm's state (one question of each kind per interval, however many look) and the watchdog's journal.
    What an operator has done there the watchdog does; everybody else only looks. It listens on this machine alone
    unless it has a token file. Stop it with Ctrl-C.
    """
    if as_json and (bind or token_file or allow_host or open_page):
        raise click.UsageError("--json serves no page: leave --bind, --token-file, --allow-host and --open out")
    from deeplink.console.collect import Collector, ConsoleSettings
    from deeplink.console.jobs import MOST_JOBS
    from deeplink.console.journal_queries import JournalQueries
    from deeplink.console.snapshot import build, job_document
    from deeplink.rpc.tokens import read_token
    from deeplink.scheduler.journal.journal import default_journal

    config = load_config()
    journal = journal or default_journal(config.state)
    settings = ConsoleSettings(journal=journal, interval_s=interval, slurm=not no_slurm, catalog=config.catalog)
    collector = Collector(settings)
    if as_json:
        with closing(collector):
            collector.refresh_slurm()
            collector.refresh_datasets()
            made = build(collector.readings())
        document = made.document()
        document["jobs"] = {str(job.id): job_document(job) for job in made.jobs[:MOST_JOBS]}
        history = JournalQueries(journal)
        document["curves"] = {job: curve for job in document["jobs"] if (curve := history.curve(int(job)))}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    try:
        from deeplink.console.actions import ConsoleActions
        from deeplink.console.request_guard import Access
        from deeplink.console.roles import Roles, parse_networks
        from deeplink.console.serve import run
        from deeplink.scheduler.watch.operator_client import DEFAULT_WATCH, OperatorClient
    except ModuleNotFoundError as missing:
        raise DeepLinkError(
            f"the console needs the package {missing.name}, which is not installed",
            remedy="pip install 'deeplink[console]'; `deeplink console --json` works without it.",
        ) from missing

    def started(url: str) -> None:
        click.echo(f"console: {url}   (Ctrl-C ends it)")
        if open_page:
            click.launch(url)

    hosts = frozenset(name.lower() for name in allow_host)
    access = Access(read_token(token_file) if token_file else "", hosts)
    watchdog = OperatorClient(config.watch or DEFAULT_WATCH, token_file=operator_token_file)
    actions = ConsoleActions(watchdog, Roles(parse_networks(proxy)), journal, hosts)
    run(collector, bind or config.console_bind, access, started, actions)
