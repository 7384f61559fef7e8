"""`deeplink incidents`: what went wrong, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from deeplink.scheduler.watch.records import ActionRecord, Incident

_EPILOG = """
Without a watchdog's journal on this machine name one: that of a job lies in its state folder.

\b
Examples:
  deeplink incidents                      the newest, one line each
  deeplink incidents 12                   one, with its evidence, times and actions
  deeplink incidents --open --json        those without an end, for programs
  deeplink incidents --journal watch.sqlite
"""


class IncidentUnknown(click.ClickException):
    """No incident of this number or id is on record."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(f"no incident {name!r} in {path}; `deeplink incidents` lists them")


@click.command("incidents", epilog=_EPILOG)
@click.argument("name", metavar="[N]", required=False)
@click.option(
    "--journal",
    "journal_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Which journal. [default: watch.sqlite below config state]",
)
@click.option("--job", type=click.IntRange(min=1), metavar="ID", help="Only of this job.")
@click.option("--open", "only_open", is_flag=True, help="Only those without an end.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="JSON: a list, or one object for one incident.")
def command(
    *, name: str | None, journal_file: Path | None, job: int | None, only_open: bool, limit: int, as_json: bool
) -> None:
    """List incidents, the newest first, or show incident N (its number, or its id)."""
    import json

    from deeplink.config import load_config
    from deeplink.scheduler.watch.journal import Journal, default_journal

    path = (journal_file or default_journal(load_config().state)).absolute()
    with Journal(path, read_only=True) as journal:
        if name is not None:
            incident = journal.incident(name)
            if incident is None:
                raise IncidentUnknown(name, path)
            actions = journal.actions(incident=incident.id)
            if as_json:
                click.echo(json.dumps(_detail(incident, actions), indent=2))
            else:
                _show(incident, actions)
            return
        incidents = journal.incidents(job=job, only_open=only_open, limit=limit)
    if as_json:
        click.echo(json.dumps([_fields(incident) for incident in incidents], indent=2))
    else:
        _list(incidents)


def _fields(incident: Incident) -> dict[str, Any]:
    import dataclasses

    fields = dataclasses.asdict(incident)
    fields["attempt"] = str(incident.attempt) if incident.attempt else None
    fields["outcome"] = incident.outcome.value
    return fields


def _detail(incident: Incident, actions: tuple[ActionRecord, ...]) -> dict[str, Any]:
    import dataclasses

    told = []
    for action in actions:
        fields = dataclasses.asdict(action)
        fields["attempt"] = str(action.attempt) if action.attempt else None
        told.append(fields)
    return {**_fields(incident), "actions": told}


def _list(incidents: tuple[Incident, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not incidents:
        click.echo("no incidents")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("N", "began", "attempt", "kind", "node", "action", "back after", "outcome"):
        table.add_column(title, justify="right" if title in {"N", "back after"} else "left", no_wrap=True)
    for incident in incidents:
        table.add_row(
            str(incident.number),
            _time(incident.began_unix)[5:],
            str(incident.attempt or "-"),
            incident.kind,
            incident.node or "-",
            incident.action,
            _since(incident, incident.recovered_unix) or "-",
            incident.outcome.value,
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # into a pipe or a file: nothing cut off
    console.print(table)


def _show(incident: Incident, actions: tuple[ActionRecord, ...]) -> None:
    click.echo(f"incident {incident.number}: {incident.id}")
    lines = [
        ("kind", incident.kind),
        ("outcome", incident.outcome.value),
        ("attempt", str(incident.attempt or "-")),
        ("node", incident.node or "-"),
        ("action", incident.action),
        ("began", _time(incident.began_unix)),
        ("detected", f"{_time(incident.detected_unix)} {_since(incident, incident.detected_unix)}"),
        ("acted", f"{_time(incident.acted_unix)} {_since(incident, incident.acted_unix)}"),
        ("training again", f"{_time(incident.recovered_unix)} {_since(incident, incident.recovered_unix)}"),
        ("steps repeated", str(incident.steps_repeated)),
        ("evidence", incident.evidence or "-"),
    ]
    for name, value in lines:
        click.echo(f"  {name + ':':16}{value}".rstrip())
    for action in actions:
        state = action.result if action.done_unix else "under way"
        click.echo(f"  {_time(action.began_unix)} {action.remedy} {action.node or ''}: {state}")


def _time(unix: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if unix else "-"


def _since(incident: Incident, unix: float) -> str:
    return f"+{max(0.0, unix - incident.began_unix):.1f} s" if unix else ""
