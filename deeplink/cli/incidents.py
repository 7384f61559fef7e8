"""`deeplink incidents` and `incident`: list or show what went wrong, how it ended, and what it cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from deeplink.cli.options import Since, flag, integer, journal_option, journal_paths, json_option, option
from deeplink.cli.output import moment, print_facts, print_json, print_table
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, printable
from deeplink.scheduler.jobs.job_names import JobName, no_job
from deeplink.scheduler.journal.incident_json import cost, document, totals, week_of, whole_document
from deeplink.scheduler.journal.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.scheduler.recovery.records import ActionRecord, Incident, RankStack

_MOST = 100_000
_MOST_OFFERED = 50
_LIST_EPILOG = """
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
_ONE_EPILOG = """
N is the number that `deeplink incidents` lists, JOB.N for the journal of a job of yours, or the incident's id.

\b
Examples:
  deeplink incident 12
  deeplink incident 12 --stacks           with where each rank hung
  deeplink incident 4711.2 --json         number 2 of job 4711's own journal, for programs
"""


@dataclass(frozen=True, slots=True)
class IncidentFound:
    """One incident with all that is on record of it, and what it is called here."""

    label: str
    incident: Incident
    actions: tuple[ActionRecord, ...]
    stacks: tuple[RankStack, ...]


@dataclass(frozen=True, slots=True)
class JournalSet:
    """The journals to read: one, or one per job; in those of jobs, numbers begin again."""

    paths: tuple[Path, ...]
    per_job: bool

    @classmethod
    def found(cls, named: Path | None) -> JournalSet:
        """Return what is to be read: the file that was named, the watchdog's, or those of the user's jobs."""
        paths, per_job = journal_paths(named)
        return cls(paths, per_job=per_job)

    def label(self, incident: Incident) -> str:
        """Return what people call it: its number, with its job's before it where numbers begin again."""
        if self.per_job and incident.attempt:
            return f"{incident.attempt.job}.{incident.number}"
        return str(incident.number)

    def one(self, name: str) -> IncidentFound:
        """Return the incident of this label or id."""
        for path in self.paths:
            # "17.2" is number 2 of job 17's own journal; an id is unique in all of them.
            prefix = f"{path.parent.name}."
            number = name.removeprefix(prefix) if self.per_job and name.startswith(prefix) else ""
            with Journal(path, read_only=True) as journal:
                hit = journal.incident(number if number.isdigit() else name)
                if hit is not None and not (self.per_job and name.isdigit()):
                    actions, stacks = journal.actions(incident=hit.id), journal.stacks(hit.id)
                    return IncidentFound(self.label(hit), hit, actions, stacks)
        where = str(self.paths[0])
        if len(self.paths) > 1:  # one folder per job, all in one
            where = f"the journals of {len(self.paths)} jobs below {self.paths[0].parents[1]}"
        raise DeepLinkError(f"no incident {name!r} in {where}", remedy="`deeplink incidents` lists them.")

    def newest(self, *, limit: int, job: str | None = None, **wanted: Any) -> list[Incident]:
        """Return the newest incidents of all journals, newest first, as far as they are asked for."""
        if job is not None and not JobName.parse(job).single:
            raise no_job(job, "one job is wanted")
        found: list[Incident] = []
        for path in self.paths:
            with Journal(path, read_only=True) as journal:
                number = _number_of(job, journal)
                if number != 0:
                    found += journal.incidents(job=number, limit=limit, **wanted)
        return sorted(found, key=lambda incident: incident.began_unix, reverse=True)[:limit]


def _number_of(job: str | None, journal: Journal) -> int | None:
    """Return the raw id of a job; 0 where the journal does not know it, None where none is asked for."""
    if job is None or job.isdigit():
        return None if job is None else int(job)
    return next((one.job for one in journal.jobs() if one.label == job), 0)


class IncidentName(click.ParamType[str]):
    """A number or id of an incident; the shell offers the newest."""

    name = "incident"

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            readable = JournalSet.found(ctx.params.get("journal_file"))
            newest = readable.newest(limit=_MOST_OFFERED)
        except (DeepLinkError, OSError):
            return []  # a shell that completes shows no errors
        labels = {readable.label(each): f"{each.kind} {each.node or ''}".strip() for each in newest}
        return [CompletionItem(label, help=text) for label, text in labels.items() if label.startswith(incomplete)]


def _kinds(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from deeplink.scheduler.recovery.records import IncidentKind

    return [kind.value for kind in IncidentKind if kind.value.startswith(incomplete)]


@click.command("incidents", epilog=_LIST_EPILOG)
@click.argument("name", metavar="[N]", type=IncidentName(), required=False)
@journal_option
@option("--job ID", "Only of this job: 12, or 12_3 for a task of an array.")
@option("--kind KIND", "Only of this kind: node-dead, ranks-hung ...", shell_complete=_kinds)
@option("--node NODE", "Only with this node to blame.")
@option(
    "--since WHEN", "Only those begun since: 12h, 7d, 2026-11-22.", show_default=False, type=Since(), default=0.0
)
@flag("--open", "Only those without an end.", name="only_open")
@integer("--limit", "List at most so many.", 1, _MOST, default=50)
@flag("--summary", "What they cost together, by kind, node and week.")
@json_option("JSON: a list, or one object for one incident.")
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
    readable = JournalSet.found(journal_file)
    if name is not None:
        _show(readable.one(name), stacks=False, as_json=as_json)
        return
    incidents = readable.newest(
        job=job, kind=kind, node=node, since_unix=since, only_open=only_open, limit=_MOST if summary else limit
    )
    if summary:
        _summarize(incidents, as_json=as_json)
    elif as_json:
        print_json([document(incident) for incident in incidents], indent=2)
    elif not incidents:
        click.echo("no incidents")
    else:
        rows = [("N", "began", "attempt", "kind", "node", "action", "rank-hours", "back after", "outcome")]
        for incident in incidents:
            label, began = readable.label(incident), moment(incident.began_unix)[5:]
            what = (incident.attempt_name or "-", incident.kind, incident.node or "-", incident.action)
            back = _since(incident, incident.recovered_unix) or "-"
            rows.append((label, began, *what, _hours(cost(incident).total_h), back, incident.outcome.value))
        print_table(rows, right=(0, 6, 7))


@click.command("incident", epilog=_ONE_EPILOG)
@click.argument("name", metavar="N", type=IncidentName())
@journal_option
@flag("--stacks", "Print the stacks of the ranks in full.")
@json_option("One JSON object, with the stacks.")
def incident(*, name: str, journal_file: Path | None, stacks: bool, as_json: bool) -> None:
    """Show one incident: evidence, timeline, actions, cost, and where the ranks hung."""
    _show(JournalSet.found(journal_file).one(name), stacks=stacks, as_json=as_json)


def _show(found: IncidentFound, *, stacks: bool, as_json: bool) -> None:
    one = found.incident
    if as_json:
        print_json(whole_document(one, found.actions, found.stacks), indent=2)
        return
    click.echo(f"incident {found.label}: {one.id}")
    facts = [
        ("kind", one.kind),
        ("outcome", one.outcome.value),
        ("attempt", one.attempt_name or "-"),
        ("node", one.node or "-"),
        ("action", one.action),
        ("began", moment(one.began_unix)),
        ("detected", f"{moment(one.detected_unix)} {_since(one, one.detected_unix)}"),
        ("acted", f"{moment(one.acted_unix)} {_since(one, one.acted_unix)}"),
        ("training again", f"{moment(one.recovered_unix)} {_since(one, one.recovered_unix)}"),
        ("steps repeated", str(one.steps_repeated)),
        ("cost", _cost(one)),
        ("evidence", printable(one.evidence) or "-"),
    ]
    print_facts(facts, 16)
    if one.timeline:
        click.echo("  timeline:")
    for at in one.timeline:
        click.echo(f"    {_clock(at.unix)} {at.unix - one.began_unix:+9.1f} s  {printable(at.what)}")
    if found.actions:
        click.echo("  actions:")
    for action in found.actions:
        state = printable(action.result) if action.done_unix else "under way"
        took = f" ({action.done_unix - action.began_unix:.1f} s)" if action.done_unix else ""
        node = f" {action.node}" if action.node else ""
        click.echo(f"    {_clock(action.began_unix)} {action.remedy}{node}: {state}{took}")
    if found.stacks:
        _show_stacks(found, whole=stacks)


def _show_stacks(found: IncidentFound, *, whole: bool) -> None:
    click.echo(f"  where {counted(len(found.stacks), 'rank')} stood:")
    for stack in found.stacks:
        click.echo(f"    {_stack_line(stack)}")
        if whole:
            text = stack.text.splitlines()
            text += ["collectives (torch's flight recorder):", stack.flight] if stack.flight else []
            for line in text:
                click.echo(f"      {printable(line)}")
    if not whole:
        click.echo(f"    (in full: deeplink incident {found.label} --stacks)")


def _stack_line(stack: RankStack) -> str:
    process = f"process {stack.pid} {stack.state or 'gone'}" if stack.pid else "no process"
    if stack.source:
        return f"rank {stack.rank}: {process}, by {stack.source}"
    newest = next((line.strip() for line in stack.text.splitlines() if line.strip()), "no stack")
    return f"rank {stack.rank}: {process}: {printable(newest)[:100]}"


def _summarize(incidents: Sequence[Incident], *, as_json: bool) -> None:
    def of(name: Any) -> list[dict[str, Any]]:
        return [dataclasses.asdict(total) for total in totals(incidents, name)]

    whole = next(iter(of(lambda _: "all")), None)
    by = {
        "kind": of(lambda incident: incident.kind),
        "node": of(lambda incident: incident.node or "-"),
        "week": sorted(of(week_of), key=lambda total: str(total["name"])),
    }
    if as_json:
        print_json({"all": whole, **by}, indent=2)
    elif whole is None:
        click.echo("no incidents")
    else:
        for title, each in by.items():
            rows = [(title, "incidents", "open", "failed", "rank-hours", "cost unknown")]
            for total in each:
                counts = [str(total[key]) for key in ("incidents", "open", "failed")]
                rows.append((total["name"] or "-", *counts, _hours(total["lost_h"]), str(total["unknown"])))  # type: ignore[arg-type]
            print_table(rows, right=range(1, 6))
            click.echo()
        unknown = whole["unknown"]
        rest = f", and what {counted(unknown, 'incident')} cost is not known" if unknown else ""
        click.echo(f"{counted(whole['incidents'], 'incident')}: {_hours(whole['lost_h'])} rank-hours{rest}")


def _cost(incident: Incident) -> str:
    if incident.attempt is None:
        return "none: it was about no job"
    spent = cost(incident)
    if spent.total_h is None and incident.outcome.value == "open":
        return "not known before it has ended"
    of = f"{_hours(spent.standing_h)} standing still + {_hours(spent.repeated_h)} repeated steps"
    ranks = counted(incident.ranks, "rank") if incident.ranks else "ranks unknown"
    step = f", {incident.step_s:.3g} s a step" if incident.step_s else ""
    total = "not known" if spent.total_h is None else f"{_hours(spent.total_h)} rank-hours"
    return f"{total} ({of}; {ranks}{step})"


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:,.2f}" if hours >= 0.01 or not hours else f"{hours:.1g}"  # noqa: PLR2004 - one GPU for half a minute


def _clock(unix: float) -> str:
    return moment(unix)[11:] or "--:--:--"


def _since(incident: Incident, unix: float) -> str:
    return f"+{max(0.0, unix - incident.began_unix):.1f} s" if unix else ""
