"""`deeplink report`: what the hours that jobs held were for."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import Since, integer, journal_option, journal_paths, json_option, option
from deeplink.cli.output import UNKNOWN, moment, print_json, print_table, warn
from deeplink.scheduler.jobs.goodput import CAUSES, HOUR_S, Goodput, SiteReport, site_report

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deeplink.core.types import Attempt
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.recovery.records import Incident, JobRecord

_MOST_JOBS = 100_000
_MOST_INCIDENTS = 100_000
_DEFAULT = "7d"
_EPILOG = """
Hours are rank-hours (one hour of one rank, on one GPU): goodput is what moved training on, of all that is known.
Lost are

\b
  start     from a job's first heartbeat to its first step
  restart   from an attempt's last step to the next one's first, where something went wrong
  repeated  steps done again, because they came after the last checkpoint
  hang      from the last step of ranks that hung to the next attempt
  slow      what the others waited for a slow rank
  spare     nodes that rested, to take a lost one's place
  unknown   of jobs that report no steps

Read from the watchdog's journal; where this machine has none, from those of your own jobs. Jobs that no journal
has, then of yours alone, are counted by Slurm's accounting (`sacct`), in hours of nodes. docs/jobs.md says more.

\b
Examples:
  deeplink report                      the last seven days
  deeplink report --since 4w --user eva
  deeplink report --since 2026-11-01 --json | jq .whole.goodput

\b
Exit codes: 0 done, 1 the journal cannot be read, 2 wrong usage.
"""


def _users(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    import pwd

    return sorted({one.pw_name for one in pwd.getpwall() if one.pw_name.startswith(incomplete)})[:200]


@click.command("report", epilog=_EPILOG)
@journal_option
@option("--since WHEN", "From when on: 12h, 7d, 4w, 2026-11-22.", type=Since(), default=_DEFAULT)
@option("--user USER", "Only this user's jobs.", shell_complete=_users)
@integer("--limit", "List at most so many jobs, those that lost most.", 0, _MOST_JOBS, default=10)
@json_option("One JSON object, with all jobs.")
def command(*, journal_file: Path | None, since: float, user: str | None, limit: int, as_json: bool) -> None:
    """Show what the hours that jobs held were for: what moved training on, and what was lost, by cause."""
    now = time.time()
    paths, is_own = journal_paths(journal_file)
    with ExitStack() as opened:
        from deeplink.scheduler.journal.journal import Journal

        journals = [opened.enter_context(Journal(path, read_only=True)) for path in paths]
        known: set[int] = set()
        found = site_report(_jobs(journals, since, user, known), months_of(since, now))
    unwatched, problem = _unwatched(since, now, user, known, is_own=is_own)
    if as_json:
        told = {name: {"jobs": count, "node_h": seconds / HOUR_S} for name, (count, seconds) in unwatched.items()}
        document = {"since_unix": since, "until_unix": now, **found.document()}
        print_json(document | {"unwatched": None if problem else told}, indent=2)
        return
    click.echo(f"{moment(since)} to {moment(now)}")
    _print(found, limit)
    if problem:
        warn(f"jobs that no journal has are not counted: {problem}")
    for name, (count, seconds) in unwatched.items():
        click.echo(f"{name}: {count:,} more without DeepLink, {seconds / HOUR_S:,.1f} node hours")


def _jobs(
    journals: Iterable[Journal], since: float, user: str | None, known: set[int]
) -> Iterable[tuple[JobRecord, list[Incident], dict[Attempt, float]]]:
    """Yield the jobs heard since then; `known` gets the ids of all, other users' too."""
    for journal in journals:
        # Not by their beginning: one that began before may have ended its attempt since.
        incidents = journal.incidents(limit=_MOST_INCIDENTS)
        of_job: dict[int, list[Incident]] = {}
        for one in incidents:
            if one.attempt is not None:
                of_job.setdefault(one.attempt.job, []).append(one)
        for record in journal.jobs(limit=0, since_unix=since):
            known.add(record.job)
            if user is None or record.user == user:
                attempts = [each.attempt for each in record.attempts]
                yield record, of_job.get(record.job, []), journal.first_steps(attempts)


def _unwatched(
    since: float, now: float, user: str | None, known: set[int], *, is_own: bool
) -> tuple[dict[str, tuple[int, float]], str]:
    from deeplink.scheduler.jobs.goodput import accounted, without
    from deeplink.scheduler.slurm import command as slurm

    if is_own:  # other users' jobs have journals elsewhere
        from deeplink.scheduler.jobs.job_view import me

        user = user or me()
        if user != me():
            return {}, "there are journals of your own jobs alone"
    try:
        return without(accounted(slurm.run, since, now, user=user or ""), known), ""
    except (slurm.CommandError, slurm.CommandTimeoutError, slurm.CommandMissingError) as problem:
        return {}, str(problem)


def months_of(since: float, until: float) -> list[tuple[str, float, float]]:
    """Return a time cut where the months of this place begin: the month, from when, until when."""
    found, begin = [], since
    while begin < until:
        day = datetime.fromtimestamp(begin).astimezone()
        following = day.replace(year=day.year + day.month // 12, month=day.month % 12 + 1, day=1)
        # Without its zone: that of the month's first day may be another.
        midnight = datetime(following.year, following.month, 1).timestamp()  # noqa: DTZ001 - of this place
        end = min(max(midnight, begin + 1), until)
        found.append((f"{day:%Y-%m}", begin, end))
        begin = end
    return found


def _print(found: SiteReport, limit: int) -> None:
    if not found.jobs:
        click.echo("no jobs on record")
        return
    rows: list[tuple[str, ...]] = [("", "held (h)", "goodput", *CAUSES)]
    rows.append(_row("all", found.whole))
    if len(found.months) > 1:
        rows += [_row(month, one) for month, one in found.months.items() if one.held_s]
    rows += [_row(f"user {user}", one) for user, one in found.users.items()]
    rows += [_row(f"job {one.job} {one.name}".rstrip(), one.goodput) for one in found.jobs[:limit]]
    print_table(rows, right=range(1, len(rows[0])))
    if len(found.jobs) > limit:
        click.echo(f"{len(found.jobs) - limit:,} more jobs: --limit")


def _row(name: str, one: Goodput) -> tuple[str, ...]:
    share = UNKNOWN if one.share is None else f"{100 * one.share:.1f} %"
    lost = [f"{one.lost_s[cause] / HOUR_S:,.1f}" if one.lost_s.get(cause) else "-" for cause in CAUSES]
    return (name, f"{one.held_s / HOUR_S:,.1f}", share, *lost)
