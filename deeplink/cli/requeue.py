"""`deeplink requeue`: have a running job started again, as far as that is safe."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deeplink.scheduler.slurm.parse import JobRow
    from deeplink.scheduler.view.requeue import Requeued
    from deeplink.types import NodeName

MOST_NODES = 65_533
"""Slurm itself holds no more."""

_EPILOG = """
The same job id starts again, from its last checkpoint if its script resumes. Slurm's hold after a requeue (2
minutes by default) is cleared. While a node of the job does not answer and Slurm has not given it up, the job is
not requeued: that would wait for Slurm's own timeout, and a job with GPUs would be lost.

\b
Examples:
  deeplink requeue 12
  deeplink requeue 12 --exclude n3        not on n3 again; what --exclude it has stays
  deeplink requeue 12_7 --dry-run         is it safe now, and what would be done?
"""


@click.command("requeue", epilog=_EPILOG)
@click.argument("job")
@click.option("--exclude", metavar="NODES", default="", help="Nodes it is not to run on any more: n3 or n[1-4].")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for Slurm to end the old run and start the new one.",
)
@click.option("--dry-run", is_flag=True, help="Check whether it is safe, print the commands; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def command(*, job: str, exclude: str, wait_s: float, dry_run: bool, as_json: bool) -> None:
    """Have a running job started again, as far as that is safe, on other nodes if wanted."""
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.view.identity import the_one
    from deeplink.scheduler.view.look import JobUnknownError, me
    from deeplink.scheduler.view.requeue import Requeuer, RequeueUnfinishedError
    from deeplink.scheduler.watch.probe import TcpProber

    config, clock, slurm = load_config(), SystemClock(), Slurm()
    nodes = _nodes(exclude)
    row = the_one(job, slurm.jobs())
    if row is None:
        raise JobUnknownError(job, config.state, asked=True)
    requeuer = Requeuer(
        slurm=slurm, prober=TcpProber(clock), clock=clock, say=_speaker(as_json=as_json), wait_s=wait_s
    )
    requeuer.check(row, nodes)
    commands = requeuer.commands(row, nodes)
    if dry_run:
        if as_json:
            click.echo(json.dumps({"job": row.label, "commands": commands}))
        else:
            for argv in commands:
                click.echo(shlex.join(argv))
        return
    asked_unix = clock.unix()

    def noted() -> None:
        if row.shares_id:
            return  # it has no folder of its own yet
        _note(config.state / "jobs" / str(row.id), asked_unix, me(), nodes)

    try:
        done = requeuer.requeue(row, nodes)
    except KeyboardInterrupt:
        click.echo(f"deeplink: interrupted; what may be left to do: {shlex.join(commands[-1])}", err=True)
        raise
    except RequeueUnfinishedError:
        noted()
        raise
    noted()
    _tell(row, done, as_json=as_json)


def _nodes(text: str) -> tuple[NodeName, ...]:
    """Return the nodes to exclude.

    Raises:
        UsageError: they are more than any cluster has.
        NodeSetError: they are none.
    """
    from deeplink.scheduler.slurm.nodeset import at_most, unfold

    if at_most(text) > MOST_NODES:
        raise click.UsageError(f"--exclude {text}: no cluster has so many nodes")
    return unfold(text)


def _note(folder: Path, unix: float, by: str, nodes: Sequence[NodeName]) -> None:
    from deeplink.scheduler.view.notes import note

    try:
        note(folder, "requeued", unix, by=by, exclude=list(nodes))
    except OSError as problem:
        click.echo(f"deeplink: that cannot be noted: {problem}", err=True)


def _speaker(*, as_json: bool) -> Callable[[str], None]:
    return lambda line: click.echo(line, err=as_json)


def _tell(row: JobRow, done: Requeued, *, as_json: bool) -> None:
    if as_json:
        facts = {
            "running": done.running,
            "nodes": done.nodes,
            "reason": done.reason or None,
            "took_s": done.took_s,
        }
        click.echo(json.dumps({"job": row.label, **facts}))
        return
    from deeplink.scheduler.slurm.nodeset import fold

    if done.running:
        click.echo(f"job {row.label} runs again on {fold(done.nodes)} after {done.took_s:.1f} s")
    else:
        click.echo(f"job {row.label} waits in the queue: {done.reason or 'no reason given'}")
