"""`deeplink cancel`: scancel, with a note in the job's folder that its user ended it."""

from __future__ import annotations

import contextlib
import json
import shlex
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.view.look import Viewer
    from deeplink.scheduler.view.queue import Queued

CANCEL_S = 30.0
_ENDING = frozenset({"", "KILL", "SIGKILL", "9"})

_EPILOG = """
What is said, and the exit code, are scancel's own. A job that `deeplink run` supervises gets a note in its folder,
so that everybody who looks at it later sees that its user ended it. Neither the watchdog nor the planner touches a
job that Slurm calls CANCELLED.

\b
Examples:
  deeplink cancel 12 13
  deeplink cancel 12_3              one task of an array
  deeplink cancel '12_[1-4]'
  deeplink cancel --signal USR1 12  have it save a checkpoint, say; nothing is ended
  deeplink cancel --dry-run 12_*    what it would do
"""


@click.command("cancel", epilog=_EPILOG)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("-s", "--signal", metavar="SIGNAL", default="", help="Send this signal in place of ending it.")
@click.option("-b", "--batch", is_flag=True, help="Signal the batch script alone.")
@click.option("-f", "--full", is_flag=True, help="Signal the batch script and its children too.")
@click.option("--dry-run", is_flag=True, help="Print the command, and the jobs it means; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def command(*, jobs: tuple[str, ...], signal: str, batch: bool, full: bool, dry_run: bool, as_json: bool) -> None:
    """Cancel jobs, tasks of arrays or steps, or send them a signal."""
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.slurm import command as processes
    from deeplink.scheduler.slurm.states import JobState
    from deeplink.scheduler.view.identity import JobName
    from deeplink.scheduler.view.look import Viewer, me, shared

    names = {word: JobName.parse(word) for word in jobs}
    if signal and not signal.isalnum():
        raise click.UsageError(f"--signal {signal!r} is neither a signal's name nor its number")
    words = [f"--signal={signal}"] * bool(signal) + ["--batch"] * batch + ["--full"] * full
    argv = ["scancel", *words, *dict.fromkeys(jobs)]
    config, clock = load_config(), SystemClock()
    meant: dict[str, list[Queued]] = {}
    viewer = Viewer(asked=shared(config.state, clock, 2.0), state=config.state, clock=clock, user=me())
    with contextlib.suppress(processes.CommandError, processes.CommandTimeoutError):
        # Where Slurm does not answer, scancel has words for it.
        meant = viewer.every(jobs)
    rows = {one.job.label: one.job for found in meant.values() for one in found if not one.job.state.final}
    if dry_run:
        _show(
            argv, [f"{row.label} ({row.state.value}, {row.name})" for row in rows.values()], None, as_json=as_json
        )
        return
    done = processes.finish(argv, timeout_s=CANCEL_S)
    if signal.upper() in _ENDING and not batch:
        whole = {
            one.job.label
            for word, found in meant.items()
            if not names[word].step
            for one in found
            # A task that has not started has no folder: its raw id is the array's, and will be another task's.
            if one.job.label in rows and not one.job.shares_id
        }
        if done.code:  # it may have ended some of several
            whole &= _ending(viewer, jobs) - {job for job, row in rows.items() if row.state is JobState.COMPLETING}
        _note(config.state, [rows[label] for label in sorted(whole)], clock.unix(), me())
    if as_json:
        _show(argv, [row.label for row in rows.values()], (done.code, done.stderr.strip()), as_json=True)
    else:
        click.echo(done.stdout, nl=False)
        click.echo(done.stderr, nl=False, err=True)
    if done.code:
        raise click.exceptions.Exit(done.code)


def _ending(viewer: Viewer, jobs: Sequence[str]) -> set[str]:
    """Return the labels of those that are cancelled now, or about to be; none where it does not answer."""
    from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
    from deeplink.scheduler.slurm.states import JobState

    try:
        found = viewer.every(jobs)
    except (CommandError, CommandTimeoutError):
        return set()
    ended = {JobState.CANCELLED, JobState.COMPLETING}
    return {one.job.label for several in found.values() for one in several if one.job.state in ended}


def _show(argv: list[str], labels: list[str], ended: tuple[int, str] | None, *, as_json: bool) -> None:
    if as_json:
        said = {"code": ended[0], "said": ended[1]} if ended else {}
        click.echo(json.dumps({"argv": argv, "jobs": labels, **said}, ensure_ascii=False))
        return
    from deeplink.text import printable

    click.echo(shlex.join(argv))
    for label in labels:
        click.echo(f"  {printable(label)}")
    if not labels:
        click.echo("  no job that Slurm knows of and that has not ended")


def _note(state: Path, jobs: list[JobRow], unix: float, by: str) -> None:
    from deeplink.scheduler.view.notes import note

    for job in jobs:
        try:
            note(state / "jobs" / str(job.id), "cancelled", unix, by=by)
        except OSError as problem:
            click.echo(f"deeplink: job {job.label} is cancelled, and that cannot be noted: {problem}", err=True)
