"""`deeplink incidents`: what went wrong, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.scheduler.watch.records import ActionRecord, Incident

_EPILOG = """
Read from the watchdog's journal; where this machine has none, from those of your own jobs, and then N is JOB.N.

\b
Examples:
  deeplink incidents                      the newest, one line each
  deeplink incidents 12                   one, with its evidence, times and actions
  deeplink incidents --open --json        those without an end, for programs
  deeplink incidents --journal watch.sqlite
"""


class IncidentUnknownError(DeepLinkError):
    """No incident of this number or id is on record."""

    def __init__(self, name: str, paths: tuple[Path, ...]) -> None:
        where = str(paths[0])
        if len(paths) > 1:
            # One folder per job, all in one.
            where = f"the journals of {len(paths)} jobs below {paths[0].parents[1]}"
        super().__init__(f"no incident {name!r} in {where}", remedy="`deeplink incidents` lists them.")
        self.name, self.paths = name, paths


@click.command("incidents", epilog=_EPILOG)
@click.argument("name", metavar="[N]", required=False)
@click.option(
    "--journal",
    "journal_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Which journal. [default: the watchdog's, else those of your jobs, below config state]",
)
@click.option("--job", type=click.IntRange(min=1), metavar="ID", help="Only of this job.")
@click.option("--open", "only_open", is_flag=True, help="Only those without an end.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="JSON: a list, or one object for one incident.")
def command(
    *, name: str | None, journal_file: Path | None, job: int | None, only_open: bool, limit: int, as_json: bool
) -> None:
    """List what went wrong, and how it ended: the newest first, or one incident with its evidence."""
    import json

    from deeplink.config import load_config

    readable = _Readable.found(journal_file, load_config().state)
    if name is not None:
        incident, actions = readable.one(name)
        if as_json:
            click.echo(json.dumps(_detail(incident, actions), indent=2))
        else:
            _show(readable.label(incident), incident, actions)
        return
    incidents = readable.newest(job=job, only_open=only_open, limit=limit)
    if as_json:
        click.echo(json.dumps([_fields(incident) for incident in incidents], indent=2))
    else:
        _list({readable.label(incident): incident for incident in incidents})


@dataclass(frozen=True, slots=True)
class _Readable:
    """The journals to read: one, or one per job; in those of jobs, numbers begin anew."""

    paths: tuple[Path, ...]
    per_job: bool

    @classmethod
    def found(cls, named: Path | None, state: Path) -> _Readable:
        from deeplink.scheduler.watch.journal import default_journal

        watchdog = default_journal(state)
        jobs = tuple(sorted((state / "jobs").glob("*/journal.sqlite")))
        if named is not None or watchdog.exists() or not jobs:
            return cls(((named or watchdog).absolute(),), per_job=False)
        return cls(jobs, per_job=True)

    def label(self, incident: Incident) -> str:
        if self.per_job and incident.attempt:
            return f"{incident.attempt.job}.{incident.number}"
        return str(incident.number)

    def one(self, name: str) -> tuple[Incident, tuple[ActionRecord, ...]]:
        from deeplink.scheduler.watch.journal import Journal

        for path in self.paths:
            # "17.2" is number 2 of job 17's own journal; an id is unique in all of them.
            prefix = f"{path.parent.name}."
            number = name.removeprefix(prefix) if self.per_job and name.startswith(prefix) else ""
            with Journal(path, read_only=True) as journal:
                incident = journal.incident(number if number.isdigit() else name)
                if incident is not None and not (self.per_job and name.isdigit()):
                    return incident, journal.actions(incident=incident.id)
        raise IncidentUnknownError(name, self.paths)

    def newest(self, *, job: int | None, only_open: bool, limit: int) -> list[Incident]:
        from deeplink.scheduler.watch.journal import Journal

        found: list[Incident] = []
        for path in self.paths:
            with Journal(path, read_only=True) as journal:
                found += journal.incidents(job=job, only_open=only_open, limit=limit)
        return sorted(found, key=lambda incident: incident.began_unix, reverse=True)[:limit]


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


def _list(incidents: dict[str, Incident]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not incidents:
        click.echo("no incidents")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("N", "began", "attempt", "kind", "node", "action", "back after", "outcome"):
        table.add_column(title, justify="right" if title in {"N", "back after"} else "left", no_wrap=True)
    for label, incident in incidents.items():
        table.add_row(
            label,
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


def _show(label: str, incident: Incident, actions: tuple[ActionRecord, ...]) -> None:
    click.echo(f"incident {label}: {incident.id}")
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
