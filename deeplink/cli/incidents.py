"""`deeplink incidents`: what went wrong, how it ended, and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.cli.incidents_reading import IncidentName, JournalSet, Since, journal_option

if TYPE_CHECKING:
    from pathlib import Path

MOST = 100_000

_EPILOG = """
Read from the watchdog's journal; where this machine has none, from those of your own jobs, and then N is JOB.N.
`deeplink incident N` shows one.

\b
Examples:
  deeplink incidents                      the newest, one line each
  deeplink incidents --node n3 --since 7d
  deeplink incidents --open --json        those without an end, for programs
  deeplink incidents --summary --since 4w what they cost, by kind, node and week
  deeplink incidents --journal watch.sqlite
"""


def _kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from deeplink.scheduler.watch.records import IncidentKind

    return [kind.value for kind in IncidentKind if kind.value.startswith(incomplete)]


@click.command("incidents", epilog=_EPILOG)
@click.argument("name", metavar="[N]", type=IncidentName(), required=False)
@journal_option
@click.option("--job", metavar="ID", help="Only of this job: 12, or 12_3 for a task of an array.")
@click.option("--kind", metavar="KIND", shell_complete=_kinds, help="Only of this kind: node-dead, ranks-hung ...")
@click.option("--node", metavar="NODE", help="Only with this node to blame.")
@click.option(
    "--since", type=Since(), default=0.0, metavar="WHEN", help="Only those begun since: 12h, 7d, 2026-11-22."
)
@click.option("--open", "only_open", is_flag=True, help="Only those without an end.")
@click.option("--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="List at most so many.")
@click.option("--summary", is_flag=True, help="What they cost together, by kind, node and week.")
@click.option("--json", "as_json", is_flag=True, help="JSON: a list, or one object for one incident.")
def command(
    *,
    name: str | None,
    journal_file: Path | None,
    job: str | None,
    kind: str | None,
    node: str | None,
    since: float,
    only_open: bool,
    limit: int,
    summary: bool,
    as_json: bool,
) -> None:
    """List what went wrong, and how it ended: the newest first."""
    import json

    from deeplink.cli import incidents_shown
    from deeplink.scheduler.watch.incident_json import document

    readable = JournalSet.found(journal_file)
    if name is not None:
        incidents_shown.shown(readable.one(name), stacks=False, as_json=as_json)
        return
    incidents = readable.newest(
        job=job, kind=kind, node=node, since=since, only_open=only_open, limit=MOST if summary else limit
    )
    if summary and as_json:
        click.echo(json.dumps(incidents_shown.summary(incidents), indent=2))
    elif summary:
        incidents_shown.summarized(incidents)
    elif as_json:
        click.echo(json.dumps([document(incident) for incident in incidents], indent=2))
    else:
        incidents_shown.listed({readable.label(incident): incident for incident in incidents})
