"""`deeplink console`: serve the operator's page."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, grouped, json_option, option, path_option, real
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.console.collect import Collector


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Where the page is served, and to whom."""

    bind: str | None = None
    token_file: Path | None = None
    allow_host: tuple[str, ...] = ()
    proxy: tuple[str, ...] = ()
    operator_token_file: Path | None = None
    open_page: bool = False


@click.command(
    epilog="""\b
Examples:
  deeplink console                              the page at http://127.0.0.1:8642/
  deeplink console --bind 127.0.0.1:0 --open    any free port, and open a browser
  deeplink console --demo --open                a recorded day of 256 nodes, without any cluster
  deeplink console --json | jq .headline        how is it? once, for scripts
  ssh -L 8642:127.0.0.1:8642 HEADNODE           see it from your own machine
  deeplink console --bind 0.0.0.0:8642 --token-file /etc/deeplink/console.token
  deeplink console --proxy 127.0.0.1 --token-file /etc/deeplink/console.token --allow-host console.site
"""
)
@grouped(
    "page",
    PageOptions,
    option(
        "--bind HOST:PORT", "Where to listen [config: console_bind, 127.0.0.1:8642]; port 0 takes any free one."
    ),
    path_option("--token-file", "0600 file with the token that every request must carry; needed beyond loopback."),
    option(
        "--allow-host NAME",
        "A name this console is also called by (Host header); may be repeated.",
        multiple=True,
    ),
    option(
        "--proxy ADDRESS",
        "Believe this reverse proxy's X-Remote-User and X-Deeplink-Role: operator; it must send the token of "
        "--token-file. May be repeated.",
        multiple=True,
    ),
    path_option(
        "--operator-token-file",
        "0600 file with the token by which the console asks the watchdog for operators of a proxy [else MUNGE].",
    ),
    flag("--open", "Open the page in a browser.", name="open_page"),
)
@path_option("--journal", "The watchdog's journal [default: the one of this user's state folder].")
@real("--interval SECONDS", "How often to look; one look for all browsers.", 0.2, 3600, default=2.0)
@flag("--no-slurm", "Ask Slurm nothing: show the journal alone.")
@flag("--demo", "Show a recorded day of 256 nodes with faults; no cluster is needed.")
@json_option("Print one snapshot as JSON and exit.")
def command(
    page: PageOptions, *, journal: Path | None, interval: float, no_slurm: bool, demo: bool, as_json: bool
) -> None:
    """Serve the operator's page, live: what needs a hand now, fabric, jobs, cache, incidents.

    It reads Slurm's state (one question of each kind per interval, however many look) and the watchdog's journal.
    The watchdog carries out what operators order there; everybody else only looks. It listens on this machine
    alone unless it has a token file. Stop it with Ctrl-C.
    """
    if as_json and page != PageOptions():
        raise click.UsageError("--json serves no page: leave out what says where, and to whom, it is served")
    if demo and (journal or no_slurm):
        raise click.UsageError("--demo has a journal and a Slurm of its own: leave --journal and --no-slurm out")
    if demo and (page.proxy or page.operator_token_file):
        raise click.UsageError("--demo has no watchdog: leave --proxy and --operator-token-file out")
    with _collector(journal, interval, slurm=not no_slurm, demo=demo) as collector:
        if as_json:
            _print_snapshot(collector)
        else:
            _serve(collector, page, acts=not demo)


@contextmanager
def _collector(journal: Path | None, interval: float, *, slurm: bool, demo: bool) -> Iterator[Collector]:
    from deeplink.console.collect import Collector, ConsoleSettings
    from deeplink.scheduler.journal.journal import default_journal

    if demo:
        from deeplink.console.demo_sources import DemoDay

        with (
            TemporaryDirectory(prefix="deeplink-demo-") as folder,
            closing(DemoDay(Path(folder), interval)) as day,
        ):
            yield day.collector
        return
    config = load_config()
    journal = journal or default_journal(config.state)
    settings = ConsoleSettings(journal=journal, interval_s=interval, slurm=slurm, catalog=config.catalog)
    with closing(Collector(settings)) as collector:
        yield collector


def _print_snapshot(collector: Collector) -> None:
    from deeplink.console.jobs import MOST_JOBS
    from deeplink.console.journal_queries import JournalQueries
    from deeplink.console.snapshot import build, job_document

    collector.refresh_slurm()
    collector.refresh_datasets()
    made = build(collector.readings())
    document = made.document()
    document["jobs"] = {str(job.id): job_document(job) for job in made.jobs[:MOST_JOBS]}
    history = JournalQueries(collector.settings.journal)
    document["curves"] = {job: curve for job in document["jobs"] if (curve := history.curve(int(job)))}
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _serve(collector: Collector, page: PageOptions, *, acts: bool) -> None:
    from deeplink.rpc.tokens import read_token

    try:
        from deeplink.console.actions import ConsoleActions
        from deeplink.console.request_guard import Access, Roles, check_proxies, parse_networks
        from deeplink.console.serve import run
        from deeplink.scheduler.watch.operator_requests import DEFAULT_WATCH, OperatorClient
    except ModuleNotFoundError as missing:
        raise DeepLinkError(
            f"the console needs the package {missing.name}, which is not installed",
            remedy="pip install 'deeplink[console]'; `deeplink console --json` works without it.",
        ) from missing

    def started(url: str) -> None:
        click.echo(f"console: {url}   (Ctrl-C ends it)")
        if page.open_page:
            click.launch(url)

    config = load_config()
    hosts = frozenset(name.lower() for name in page.allow_host)
    access = Access(read_token(page.token_file) if page.token_file else "", hosts)
    check_proxies(page.proxy, access.token)
    actions = None
    if acts:
        watchdog = OperatorClient(config.watch or DEFAULT_WATCH, token_file=page.operator_token_file)
        actions = ConsoleActions(watchdog, Roles(parse_networks(page.proxy)), collector.settings.journal, hosts)
    run(collector, page.bind or config.console_bind, access, started, actions)
