"""`deeplink plan`: look after waiting jobs, so that a hint for good nodes never holds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, integer, json_option, real
from deeplink.cli.output import print_json, speaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.placement.hint.planner import Planner, Round
    from deeplink.scheduler.placement.hint.reconcile import HintChange

_EPILOG = """
`deeplink sbatch` hints at good nodes when a job is submitted, and starts this in the background (unless
DEEPLINK_PLAN=off). Each round asks Slurm once for the queue and once for the nodes, however many jobs wait. A hint
for nodes that are not free any more is moved to others or dropped; a hint that holds a job is dropped; nodes that
no job before it may be given are hinted while they are free. What was changed and why is kept in
decisions.jsonl in the job's folder. One runs for each user and cluster.

\b
Examples:
  deeplink plan                        look after all your waiting jobs, until SIGTERM
  deeplink plan --dry-run --once       what it would do now
  deeplink plan --job 4711             until that job has started
  deeplink plan --once --json          one look, for scripts

\b
Exit codes: 0 done; 1 Slurm does not answer, or another planner runs; 2 wrong usage.
"""


@click.command("plan", epilog=_EPILOG)
@flag("--once", "One look; then end.")
@flag("--dry-run", "Only say what would be changed.")
@integer("--job ID", "This job alone; ends when it waits no more.", 1)
@real("--interval S", "Seconds between two rounds while jobs wait.", 1.0, 3600.0, default=10.0)
@flag("--watch", "Until SIGTERM; this is the default.", name="watching")
@flag("--until-idle", "End once no job has needed it for a minute.")
@flag("--prefetch", "Warm the hinted nodes' SSDs for jobs with data (standing agents).")
@json_option("One JSON object per decision instead of sentences.")
def command(
    *,
    once: bool,
    dry_run: bool,
    job: int | None,
    interval: float,
    watching: bool,
    until_idle: bool,
    prefetch: bool,
    as_json: bool,
) -> None:
    """Look after waiting jobs: their hints are kept, mended or dropped."""
    if sum((once, watching, until_idle)) > 1:
        raise click.UsageError("--once, --watch and --until-idle contradict each other")
    from deeplink.scheduler.placement.hint.planner import live

    say = (lambda _line: None) if once else speaker(as_json=as_json)  # one look prints all at its end
    planner = _planner(say, job=job, interval=interval, act=not dry_run, prefetch=prefetch)
    if once:
        _once(planner, job, dry_run=dry_run, as_json=as_json)
    else:
        live(planner, until_idle=until_idle)


def _planner(
    say: Callable[[str], None], *, job: int | None, interval: float, act: bool, prefetch: bool
) -> Planner:
    from deeplink.core.clock import SystemClock
    from deeplink.core.config import load_config
    from deeplink.ops.submit import surveyed
    from deeplink.scheduler.jobs.job_view import me
    from deeplink.scheduler.placement.hint.planner import Planner
    from deeplink.scheduler.slurm.client import Slurm

    config = load_config()
    planner = Planner(
        slurm=Slurm(),
        user=me(),
        state=config.state,
        survey=lambda jobs: surveyed(config, jobs),
        clock=SystemClock(),
        say=say,
        act=act,
        only=job,
        interval_s=interval,
    )
    if prefetch:
        from deeplink.ops.submit import BackgroundPrefetch

        planner.wished = BackgroundPrefetch(config, say)
    return planner


def _once(planner: Planner, job: int | None, *, dry_run: bool, as_json: bool) -> None:
    import contextlib

    from deeplink.scheduler.placement.hint.planner import alone

    with contextlib.nullcontext() if dry_run else alone(planner):
        done = planner.look()
    if job is not None and not done.moves:
        click.echo(f"job {job} does not wait, or was not submitted with `deeplink sbatch`", err=True)
        raise click.exceptions.Exit(1)
    _say(done, dry_run=dry_run, as_json=as_json)
    if done.problems:
        raise click.exceptions.Exit(1)


def _say(done: Round, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        for move in done.moves:
            print_json(_document(move, done, dry_run=dry_run))
        return
    if not done.moves:
        click.echo("no job of yours waits that was submitted with `deeplink sbatch`")
    for move in done.moves:
        problem = done.problems.get(move.job.row.id)
        refused = f" - Slurm refused: {problem}" if problem else ""
        click.echo(f"{move.job.row.label:>10}  {move.deed.value:<5}  {move.decision.words}{refused}")


def _document(move: HintChange, done: Round, *, dry_run: bool) -> dict[str, object]:
    return {
        "job": move.job.row.label,
        "deed": move.deed.value,
        "why": move.decision.why.value,
        "words": move.decision.words,
        "nodes": list(move.decision.nodes),
        "changes": move.fields,
        "reason": move.job.row.reason,
        "done": not dry_run and move.job.row.id not in done.problems,
        "problem": done.problems.get(move.job.row.id, ""),
    }
