"""`deeplink cancel` and `requeue`: end jobs by scancel, or have one started again as far as that is safe."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import flag, json_option, option, real
from deeplink.cli.output import job_viewer, print_json, warn
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.text import printable
from deeplink.scheduler.slurm.nodeset import at_most, fold, unfold
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.core.types import JobId, NodeName
    from deeplink.scheduler.jobs.job_view import Queued, Viewer
    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.watch.requeue import Requeued

CANCEL_S = 30.0
_ENDING = frozenset({"", "KILL", "SIGKILL", "9"})
_MOST_NODES = 65_533  # Slurm itself holds no more

_CANCEL_EPILOG = """
Messages and exit code are scancel's own. A job that `deeplink run` supervises gets a note in its folder, which
says later that its user ended it. Neither the watchdog nor the planner touches a job that Slurm calls CANCELLED.

\b
Examples:
  deeplink cancel 12 13
  deeplink cancel 12_3              one task of an array
  deeplink cancel '12_[1-4]'
  deeplink cancel --signal USR1 12  have it save a checkpoint, say; nothing is ended
  deeplink cancel --dry-run 12_*    what it would do
"""
_REQUEUE_EPILOG = """
The same job id starts again, from its last checkpoint if its script resumes. Slurm's hold after a requeue (2
minutes by default) is cleared. While a node of the job does not answer and Slurm has not given it up, the job is
not requeued: that would wait for Slurm's own timeout, and a job with GPUs would be lost.

\b
Examples:
  deeplink requeue 12
  deeplink requeue 12 --exclude n3        not on n3 again; what --exclude it has stays
  deeplink requeue 12_7 --dry-run         is it safe now, and what would be done?
"""


@click.command("cancel", epilog=_CANCEL_EPILOG)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@option("-s --signal SIGNAL", "Send this signal in place of ending it.", default="")
@flag("-b --batch", "Signal the batch script alone.")
@flag("-f --full", "Signal the batch script and its children too.")
@flag("--dry-run", "Print the command, and the jobs it means; do nothing.")
@json_option("Print what was done as JSON.")
def command(*, jobs: tuple[str, ...], signal: str, batch: bool, full: bool, dry_run: bool, as_json: bool) -> None:
    """Cancel jobs, tasks of arrays or steps, or send them a signal."""
    from deeplink.scheduler.jobs.job_names import JobName
    from deeplink.scheduler.slurm.command import finish

    names = {word: JobName.parse(word) for word in jobs}
    if signal and not signal.isalnum():
        raise click.UsageError(f"--signal {signal!r} is neither a signal's name nor its number")
    words = [f"--signal={signal}"] * bool(signal) + ["--batch"] * batch + ["--full"] * full
    argv = ["scancel", *words, *dict.fromkeys(jobs)]
    viewer = job_viewer()
    meant = _meant(viewer, jobs)
    rows = {one.job.label: one.job for found in meant.values() for one in found if not one.job.state.final}
    if dry_run:
        _show(argv, [f"{row.label} ({row.state.value}, {row.name})" for row in rows.values()], as_json=as_json)
        return
    done = finish(argv, timeout_s=CANCEL_S)
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
            ended = {JobState.CANCELLED, JobState.COMPLETING}
            now = [one.job for found in _meant(viewer, jobs).values() for one in found]
            ending = {job.label for job in now if job.state in ended}
            whole &= ending - {job for job, row in rows.items() if row.state is JobState.COMPLETING}
        for label in sorted(whole):
            problem = f"job {label} is cancelled, and that cannot be noted"
            _note(viewer.state, rows[label].id, viewer.clock.unix(), problem, "cancelled")
    if as_json:
        said = {"code": done.code, "said": done.stderr.strip()}
        print_json({"argv": argv, "jobs": [row.label for row in rows.values()], **said})
    else:
        click.echo(done.stdout, nl=False)
        click.echo(done.stderr, nl=False, err=True)
    if done.code:
        raise click.exceptions.Exit(done.code)


def _meant(viewer: Viewer, jobs: Sequence[str]) -> dict[str, list[Queued]]:
    """Return the jobs that each word means; none where Slurm does not answer: scancel has words for that."""
    from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError

    try:
        return viewer.every(jobs)
    except (CommandError, CommandTimeoutError):
        return {}


def _show(argv: list[str], labels: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"argv": argv, "jobs": labels})
        return
    click.echo(shlex.join(argv))
    for label in labels:
        click.echo(f"  {printable(label)}")
    if not labels:
        click.echo("  no job that Slurm knows of and that has not ended")


def _note(state: Path, job: JobId, unix: float, problem: str, what: str, **more: Any) -> None:
    """Note in a job's folder what its user did."""
    from deeplink.scheduler.jobs.job_folder import note
    from deeplink.scheduler.jobs.job_view import me

    try:
        note(state / "jobs" / str(job), what, unix, by=me(), **more)
    except OSError as refused:
        warn(f"{problem}: {refused}")


@click.command("requeue", epilog=_REQUEUE_EPILOG)
@click.argument("job")
@option("--exclude NODES", "Nodes it is not to run on any more: n3 or n[1-4].", default="")
@real(
    "--wait SECONDS",
    "How long to wait for Slurm to end the old run and start the new one.",
    1,
    name="wait_s",
    default=60.0,
)
@flag("--dry-run", "Check whether it is safe, print the commands; do nothing.")
@json_option("Print what was done as JSON.")
def requeue(*, job: str, exclude: str, wait_s: float, dry_run: bool, as_json: bool) -> None:
    """Have a running job started again, as far as that is safe, on other nodes if wanted."""
    from deeplink.scheduler.jobs.job_names import the_one, unknown_job
    from deeplink.scheduler.liveness.probe import TcpProber
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.watch.requeue import RequeueError, Requeuer

    state, clock, slurm = load_config().state, SystemClock(), Slurm()
    if at_most(exclude) > _MOST_NODES:
        raise click.UsageError(f"--exclude {exclude}: no cluster has so many nodes")
    nodes = unfold(exclude)
    row = the_one(job, slurm.jobs())
    if row is None:
        raise unknown_job(job, state, asked=True)

    def say(line: str) -> None:
        click.echo(line, err=as_json)

    requeuer = Requeuer(slurm=slurm, prober=TcpProber(clock), clock=clock, say=say, wait_s=wait_s)
    requeuer.check(row, nodes)
    commands = requeuer.commands(row, nodes)
    if dry_run and as_json:
        print_json({"job": row.label, "commands": commands})
    elif dry_run:
        click.echo("\n".join(map(shlex.join, commands)))
    if dry_run:
        return
    asked_unix = clock.unix()
    try:
        done = requeuer.requeue(row, nodes)
    except KeyboardInterrupt:
        warn(f"interrupted; what may be left to do: {shlex.join(commands[-1])}")
        raise
    except RequeueError as problem:
        if problem.begun:
            _note_requeued(state, row, asked_unix, nodes)
        raise
    _note_requeued(state, row, asked_unix, nodes)
    _say(row.label, done, as_json=as_json)


def _note_requeued(state: Path, row: JobRow, unix: float, nodes: Sequence[NodeName]) -> None:
    if not row.shares_id:  # else it has no folder of its own yet
        _note(state, row.id, unix, "that cannot be noted", "requeued", exclude=list(nodes))


def _say(label: str, done: Requeued, *, as_json: bool) -> None:
    if as_json:
        facts = {"running": done.running, "nodes": done.nodes, "reason": done.reason or None}
        print_json({"job": label, **facts, "took_s": done.took_s})
    elif done.running:
        click.echo(f"job {label} runs again on {fold(done.nodes)} after {done.took_s:.1f} s")
    else:
        click.echo(f"job {label} waits in the queue: {done.reason or 'no reason given'}")
