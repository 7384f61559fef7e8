"""`deeplink plan`: look after waiting jobs, so that a wish for good nodes never holds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.scheduler.planner.loop import Planner, Round
    from deeplink.scheduler.planner.reconcile import HintChange

_EPILOG = """
`deeplink sbatch` wishes for good nodes when a job is submitted, and starts this in the background (unless
DEEPLINK_PLAN=off). Each round asks Slurm once for the queue and once for the nodes, however many jobs wait. A wish
for nodes that are not free any more is moved to others or dropped; a wish that holds a job is dropped; nodes that
nobody before the job may be given are wished while they are free. What was changed and why is kept in
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
@click.option("--once", is_flag=True, help="One look; then end.")
@click.option("--dry-run", is_flag=True, help="Only say what would be changed.")
@click.option("--job", type=click.IntRange(1), metavar="ID", help="This job alone; ends when it waits no more.")
@click.option(
    "--interval",
    type=FiniteRange(1.0, 3600.0),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds between two rounds while jobs wait.",
)
@click.option("--watch", "watching", is_flag=True, help="Until SIGTERM; this is the default.")
@click.option("--until-idle", is_flag=True, help="End once no job has needed it for a minute.")
@click.option("--prefetch", is_flag=True, help="Warm the wished nodes' SSDs for jobs with data (standing agents).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per decision instead of sentences.")
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
    """Look after waiting jobs: their wishes for nodes are kept, mended or dropped."""
    if sum((once, watching, until_idle)) > 1:
        raise click.UsageError("--once, --watch and --until-idle contradict each other")
    from deeplink.cli.plan_life import PlannerLifetime, live

    say = _printed_once if once else _speaker(as_json=as_json)
    planner = _planner(say, job=job, interval=interval, act=not dry_run, prefetch=prefetch)
    if once:
        _once(planner, job, dry_run=dry_run, as_json=as_json)
    else:
        live(planner, PlannerLifetime(job=job, until_idle=until_idle, locked=not dry_run))


def _planner(
    say: Callable[[str], None], *, job: int | None, interval: float, act: bool, prefetch: bool
) -> Planner:
    from deeplink.cli.plan_life import user_name
    from deeplink.cli.plan_surveying import surveyed
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.planner.loop import Planner
    from deeplink.scheduler.slurm.client import Slurm

    config = load_config()
    planner = Planner(
        slurm=Slurm(),
        user=user_name(),
        state=config.state,
        ground=lambda jobs: surveyed(config, jobs),
        clock=SystemClock(),
        say=say,
        act=act,
        only=job,
        interval_s=interval,
    )
    if prefetch:
        from deeplink.cli.plan_surveying import BackgroundPrefetch

        planner.wished = BackgroundPrefetch(config, say)
    return planner


def _once(planner: Planner, job: int | None, *, dry_run: bool, as_json: bool) -> None:
    import contextlib

    from deeplink.cli.plan_life import alone

    with contextlib.nullcontext() if dry_run else alone(planner):
        done = planner.look()
    if job is not None and not done.moves:
        click.echo(f"job {job} does not wait, or was not submitted with `deeplink sbatch`", err=True)
        click.get_current_context().exit(1)
    _say(done, dry_run=dry_run, as_json=as_json)
    if done.problems:
        click.get_current_context().exit(1)


def _say(done: Round, *, dry_run: bool, as_json: bool) -> None:
    import json

    if as_json:
        for move in done.moves:
            click.echo(json.dumps(_document(move, done, dry_run=dry_run)))
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


def _printed_once(_line: str) -> None:
    """Say nothing: all is printed at the end."""


def _speaker(*, as_json: bool) -> Callable[[str], None]:
    import json
    import time

    def say(line: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        click.echo(json.dumps({"time": now, "said": line}) if as_json else f"{now} {line}")

    return say
