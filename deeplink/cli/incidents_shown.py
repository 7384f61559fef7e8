"""Incidents as tables, as one in detail, as totals, and as JSON."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from deeplink.cli.incidents_reading import IncidentFound
    from deeplink.scheduler.watch.records import Incident, RankStack


def listed(incidents: Mapping[str, Incident]) -> None:
    """Print a line for each incident, by label."""
    from deeplink.scheduler.watch.costs import cost

    if not incidents:
        click.echo("no incidents")
        return
    table = _table("N", "began", "attempt", "kind", "node", "action", "GPU-hours", "back after", "outcome")
    for label, incident in incidents.items():
        table.add_row(
            label,
            _moment(incident.began_unix)[5:],
            incident.attempt_name or "-",
            incident.kind,
            incident.node or "-",
            incident.action,
            _hours(cost(incident).total_h),
            _since(incident, incident.recovered_unix) or "-",
            incident.outcome.value,
        )
    _print(table)


def shown(found: IncidentFound, *, stacks: bool, as_json: bool) -> None:
    """Print one incident: what, evidence, course, actions, cost; the stacks in full in JSON, or if asked to."""
    if as_json:
        click.echo(json.dumps(found.document(), indent=2))
        return
    incident = found.incident
    click.echo(f"incident {found.label}: {incident.id}")
    lines = [
        ("kind", incident.kind),
        ("outcome", incident.outcome.value),
        ("attempt", incident.attempt_name or "-"),
        ("node", incident.node or "-"),
        ("action", incident.action),
        ("began", _moment(incident.began_unix)),
        ("detected", f"{_moment(incident.detected_unix)} {_since(incident, incident.detected_unix)}"),
        ("acted", f"{_moment(incident.acted_unix)} {_since(incident, incident.acted_unix)}"),
        ("training again", f"{_moment(incident.recovered_unix)} {_since(incident, incident.recovered_unix)}"),
        ("steps repeated", str(incident.steps_repeated)),
        ("cost", _cost(incident)),
        ("evidence", printable(incident.evidence) or "-"),
    ]
    for name, value in lines:
        click.echo(f"  {name + ':':16}{value}".rstrip())
    if incident.timeline:
        click.echo("  course:")
    for moment in incident.timeline:
        click.echo(
            f"    {_clock(moment.unix)} {moment.unix - incident.began_unix:+9.1f} s  {printable(moment.what)}"
        )
    if found.actions:
        click.echo("  actions:")
    for action in found.actions:
        state = printable(action.result) if action.done_unix else "under way"
        took = f" ({action.done_unix - action.began_unix:.1f} s)" if action.done_unix else ""
        node = f" {action.node}" if action.node else ""
        click.echo(f"    {_clock(action.began_unix)} {action.remedy}{node}: {state}{took}")
    _stacks(found, whole=stacks)


def _stacks(found: IncidentFound, *, whole: bool) -> None:
    if not found.stacks:
        return
    click.echo(f"  where {counted(len(found.stacks), 'rank')} stood:")
    for stack in found.stacks:
        click.echo(f"    {_where(stack)}")
        if whole:
            text = stack.text.splitlines()
            text += ["collectives (torch's flight recorder):", stack.flight] if stack.flight else []
            for line in text:
                click.echo(f"      {printable(line)}")
    if not whole:
        click.echo(f"    (in full: deeplink incident {found.label} --stacks)")


def _where(stack: RankStack) -> str:
    process = f"process {stack.pid} {stack.state or 'gone'}" if stack.pid else "no process"
    newest = next((line.strip() for line in stack.text.splitlines() if line.strip()), "no stack")
    source = f", by {stack.source}" if stack.source else ""
    return f"rank {stack.rank}: {process}{source}" + (f": {printable(newest)[:100]}" if not stack.source else "")


def summary(incidents: Sequence[Incident]) -> dict[str, Any]:
    """Return what incidents cost together, by kind, node and week, as JSON has it."""
    import dataclasses

    from deeplink.scheduler.watch.costs import totals, week_of

    def of(name: Any) -> list[dict[str, Any]]:
        return [dataclasses.asdict(total) for total in totals(incidents, name)]

    whole = of(lambda _: "all")
    return {
        "all": whole[0] if whole else None,
        "kind": of(lambda incident: incident.kind),
        "node": of(lambda incident: incident.node or "-"),
        "week": sorted(of(week_of), key=lambda total: str(total["name"])),
    }


def summarized(incidents: Sequence[Incident]) -> None:
    """Print what incidents cost together, by kind, node and week."""
    if not incidents:
        click.echo("no incidents")
        return
    told = summary(incidents)
    whole = told.pop("all")
    for title, each in told.items():
        table = _table(title, "incidents", "open", "failed", "GPU-hours", "cost unknown")
        for total in each:
            table.add_row(
                total["name"] or "-",
                str(total["incidents"]),
                str(total["open"]),
                str(total["failed"]),
                _hours(total["lost_h"]),
                str(total["unknown"]),
            )
        _print(table)
    unknown = f", and what {counted(whole['unknown'], 'incident')} cost is not known" if whole["unknown"] else ""
    click.echo(f"{counted(whole['incidents'], 'incident')}: {_hours(whole['lost_h'])} GPU-hours{unknown}")


_LEFT = frozenset({"began", "attempt", "kind", "node", "week", "action", "outcome"})


def _table(*titles: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in titles:
        table.add_column(title, justify="left" if title in _LEFT else "right", no_wrap=True)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # into a pipe or a file: nothing cut off
    console.print(table)


def _cost(incident: Incident) -> str:
    from deeplink.scheduler.watch.costs import cost

    if incident.attempt is None:
        return "none: it was about no job"
    spent = cost(incident)
    if spent.total_h is None and incident.outcome.value == "open":
        return "not known before it has ended"
    of = f"{_hours(spent.standing_h)} standing still + {_hours(spent.repeated_h)} repeated steps"
    ranks = f"{counted(incident.ranks, 'rank')}" if incident.ranks else "ranks unknown"
    step = f", {incident.step_s:.3g} s a step" if incident.step_s else ""
    total = "not known" if spent.total_h is None else f"{_hours(spent.total_h)} GPU-hours"
    return f"{total} ({of}; {ranks}{step})"


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:,.2f}" if hours >= 0.01 or not hours else f"{hours:.1g}"  # noqa: PLR2004 - one GPU for half a minute


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix)) if unix else "-"


def _clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix)) if unix else "--:--:--"


def _since(incident: Incident, unix: float) -> str:
    return f"+{max(0.0, unix - incident.began_unix):.1f} s" if unix else ""
