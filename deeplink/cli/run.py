"""`deeplink run`: start and supervise a job's ranks, in place of srun or torchrun."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from deeplink.cli.run_recovery import recovery_options
from deeplink.ranges import FiniteRange
from deeplink.scheduler.launch.container import RUNTIMES
from deeplink.scheduler.launch.recipes import DEFAULT, RECIPES, Start

if TYPE_CHECKING:
    from deeplink.cli.run_recovery import RecoveryOptions
    from deeplink.config import Config
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.container import Container
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.site import SiteFabric

_EPILOG = """
Ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, numbered along the
fabric. Signals TERM, INT, USR1 and USR2 are passed on to them. Ranks that fail are started again once where they
were saved, and as often as they get further; then a job that came to a step is held. The exit code is the first
failed rank's, 128 + n where a signal ended it, and 75 where nodes were lost and nobody could help.

\b
Examples:
  deeplink run -- python train.py --epochs 90                  in a batch script: its tasks, else a rank per GPU
  deeplink run --spares 1 --nproc-per-node 4 -- python train.py
  deeplink run --group-size 16 -- python train.py              ranks 0-15, 16-31, ... each on one leaf
  deeplink run --recipe torchrun -- torchrun train.py          one torchrun per node; --recipe list shows all
  deeplink run --container image.sif -- python train.py        every rank in an Apptainer image
  deeplink run --dry-run -- python train.py                    which rank would run where
  deeplink run --local 2 -- python train.py                    without Slurm: two "nodes" on this machine
"""


def _per_node(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """Read `auto` as None."""
    if value == "auto":
        return None
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a positive whole number nor auto")
    return int(value)


def _step_timeout(context: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Read `auto` as None, and `off` as 0."""
    if value == "auto":
        return None
    if value == "off":
        return 0.0
    return FiniteRange(min=0).convert(value, parameter, context)


def _recipe(context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Take the name of a recipe; `list` prints them all instead."""
    if value == "list" and not context.resilient_parsing:
        width = max(map(len, RECIPES))
        for recipe in RECIPES.values():
            click.echo(f"{recipe.name:{width}}  {recipe.what} ({recipe.start.value})")
        context.exit()
    if value not in RECIPES:
        raise click.BadParameter(f"there is no {value!r}; there are {', '.join(RECIPES)}")
    return value


@click.command("run", epilog=_EPILOG)
@click.option(
    "--recipe",
    callback=_recipe,
    default=DEFAULT,
    envvar="DEEPLINK_RECIPE",
    is_eager=True,
    metavar="NAME|list",
    help="Which framework the ranks are of, so that they find what it reads: torch (DDP, FSDP), torchrun, "
    "lightning, accelerate, deepspeed, jax, tensorflow, mpi, horovod. [default: torch]",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    envvar="DEEPLINK_SPARES",
    help="Nodes that rest until another one is lost; the job needs --no-kill (`deeplink sbatch` adds it). "
    "[default: those beyond --nnodes, else none]",
)
@click.option(
    "--nproc-per-node",
    callback=_per_node,
    default="auto",
    metavar="K|auto",
    help="Ranks on each node; auto: the job's tasks, as Slurm spread them, else one for each GPU, else 1. "
    "With --recipe torchrun GPUs go first.",
)
@click.option("--nnodes", type=click.IntRange(min=1), help="Nodes that run ranks. [default: all but the spares]")
@click.option(
    "--group-size",
    "group_sizes",
    multiple=True,
    type=click.IntRange(min=2),
    envvar="DEEPLINK_GROUP_SIZE",
    metavar="RANKS",
    help="So many consecutive ranks (a tensor-parallel group, say) are to stay within a leaf switch or a node; "
    "repeatable, each size a multiple of the smaller one.",
)
@click.option(
    "--step-timeout",
    callback=_step_timeout,
    default="auto",
    envvar="DEEPLINK_STEP_TIMEOUT",
    metavar="auto|off|SECONDS",
    help="Start the ranks again when no newer step was reported for so long (after the first); auto: when ranks "
    "are late by the job's own history, and their processes show that they hang. [default: auto]",
)
@click.option(
    "--replace-stragglers",
    is_flag=True,
    envvar="DEEPLINK_REPLACE_STRAGGLERS",
    help="Start the ranks again on a spare in place of a persistently slow one's node. [default: tell of it]",
)
@recovery_options
@click.option(
    "--srun-option",
    "srun_options",
    multiple=True,
    metavar="OPTION",
    help="Hand an option to the ranks' srun; repeatable.",
)
@click.option(
    "--interface",
    metavar="NAME|NETWORK",
    help="What agents and ranks talk over: an interface that every node has, or a network such as 10.1.0.0/16. "
    "[default: config interface (DEEPLINK_INTERFACE), else the fastest network that joins all nodes]",
)
@click.option(
    "--container", "image", metavar="IMAGE", help="Run every rank in this image, with what it needs mounted."
)
@click.option(
    "--container-runtime",
    "runtime",
    type=click.Choice(RUNTIMES),
    help="What runs the image. [default: the first of apptainer, singularity, charliecloud that is installed]",
)
@click.option(
    "--container-mount", "mounts", multiple=True, metavar="DIR[:INSIDE]", help="Mount a folder too; repeatable."
)
@click.option(
    "--container-option",
    "container_options",
    multiple=True,
    metavar="OPTION",
    help="Hand an option to the runtime (--nv, say); repeatable.",
)
@click.option("--local", type=click.IntRange(min=1), metavar="N", help="Without Slurm: N nodes on this machine.")
@click.option("--dry-run", is_flag=True, help="Print which rank would run where, and the command; start nothing.")
@click.option(
    "--json", "as_json", is_flag=True, help="Say what happens as JSON lines (on standard error), or the dry run."
)
@click.argument("command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(  # noqa: PLR0913 - one for each option
    *,
    recipe: str,
    spares: int | None,
    nproc_per_node: int | None,
    nnodes: int | None,
    group_sizes: tuple[int, ...],
    step_timeout: float | None,
    replace_stragglers: bool,
    recovery: RecoveryOptions,
    srun_options: tuple[str, ...],
    interface: str | None,
    image: str | None,
    runtime: str | None,
    mounts: tuple[str, ...],
    container_options: tuple[str, ...],
    local: int | None,
    dry_run: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> int:
    """Start and supervise the ranks of a job inside its allocation.

    COMMAND is started once per rank, ranks are ordered along the fabric, and signals and the exit code passed on.
    When a node goes silent the ranks start again on the nodes that are left and a spare, under the same job id.
    """
    from dataclasses import replace

    from deeplink.cli.topology_site import site_of
    from deeplink.config import load_config
    from deeplink.scheduler.launch.job import passed_on, run_job
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.shape import check_spread, gpu_options, ranks_of

    config = load_config()
    if interface is not None:
        config = replace(config, interface=interface)
    backend = _backend(config, local, srun_options)
    count = _count(len(backend.nodes), nnodes, spares)
    starters = RECIPES[recipe].start is Start.NODE
    ranks = ranks_of(backend.nodes, backend.granted, nproc_per_node, starters=starters)
    order = LaunchSpec(
        command=command_line,
        per_node=max(ranks.values()),
        each=ranks if len(set(ranks.values())) > 1 else {},
        count=count,
        elastic=recovery.elastic or 0,
        hold=recovery.hold,
        margin_s=recovery.time_margin,
        step_timeout_s=step_timeout,
        replace_stragglers=replace_stragglers,
        strand_timeout_s=recovery.strand_timeout,
        passed_on=passed_on(config),
        group_sizes=tuple(sorted(set(group_sizes))),
        recipe_name=recipe,
        container=_container(image, runtime, mounts, container_options, is_local=local is not None),
    )
    check_spread(ranks, count, order.group_sizes)
    started = {node: RECIPES[recipe].started(number) for node, number in ranks.items()}
    # What cannot be had is told before anything starts.
    gpu_options(backend.granted, started, starters=starters, by_user=srun_options)
    order.groups.check(order.count)
    recovery.check(order.count)
    site = site_of(config)
    if dry_run:
        _print_plan(backend, order, site, as_json=as_json)
        return 0
    return run_job(backend, order, config, policy=recovery.policy(), site=site, as_json=as_json)


def _container(
    image: str | None, runtime: str | None, mounts: tuple[str, ...], options: tuple[str, ...], *, is_local: bool
) -> Container | None:
    if image is None:
        if runtime or mounts or options:
            raise click.UsageError("--container-... options mean nothing without --container IMAGE")
        return None
    import shutil

    from deeplink.scheduler.launch.container import PYXIS, Container, chosen_runtime, mounted

    if runtime == PYXIS and is_local:
        raise click.UsageError("pyxis is part of srun, and --local starts none")
    mounted(mounts)
    return Container(chosen_runtime(runtime, shutil.which), image, mounts, options)


def _backend(config: Config, local: int | None, srun_options: tuple[str, ...]) -> Backend:
    if local is not None:
        from deeplink.scheduler.launch.local import LocalBackend

        if srun_options:
            raise click.UsageError("--srun-option means nothing with --local")
        return LocalBackend.on_this_machine(local, os.environ, config.store, config.state)
    from deeplink.scheduler.launch.slurm import SlurmBackend

    return SlurmBackend.from_environment(os.environ, config.state, srun_options).with_granted()


def _count(nodes: int, nnodes: int | None, spares: int | None) -> int:
    from deeplink.scheduler.topology.order import TooFewNodesError

    count = nnodes if nnodes is not None else nodes - (spares or 0)
    if count < 1 or count + (spares or 0) > nodes:
        raise TooFewNodesError(max(count, 1) + (spares or 0), nodes)
    return count


def _print_plan(backend: Backend, order: LaunchSpec, site: SiteFabric | None, *, as_json: bool) -> None:
    from deeplink.scheduler.launch.environment import NodeFacts, RankTask
    from deeplink.scheduler.launch.launch_spec import lay_out
    from deeplink.scheduler.launch.network_discovery import on_fabric
    from deeplink.types import Attempt

    # No agent has said anything yet: the site's or Slurm's word on the fabric, and names for addresses.
    order = on_fabric(order, backend, site, dict.fromkeys(backend.nodes, ""))
    facts = {node: NodeFacts(node=node, address=f"{node}:0") for node in backend.nodes}
    attempt = Attempt(backend.job, backend.restart, 0)
    layout = lay_out(order, attempt, facts, port=backend.port_for(attempt))
    argv = backend.rank_command(layout.launch, order.command)
    recipe = layout.launch.recipe
    settings = recipe.settings(layout.launch, RankTask(0, 0, layout.active[0]), os.environ)
    if as_json:
        plan = {
            "backend": backend.name,
            "attempt": str(attempt),
            "nodes": layout.active,
            "spares": layout.resting,
            "per_node": None if order.each else order.per_node,
            "ranks": layout.launch.ranks,
            "world_size": layout.launch.world_size,
            "ring_crossings": layout.crossings,
            "ring_crossings_stock": layout.crossings_stock,
            "groups": [
                {"size": size, "groups": layout.launch.world_size // size, "cut": cut}
                for size, cut in layout.cut_by_size.items()
            ],
            "groups_cut": [
                {"ranks": [one.first, one.first + one.size - 1], "nodes": one.nodes, "because": one.why}
                for one in layout.cut
            ],
            "recipe": {"name": recipe.name, "rank_0_finds": settings},
            "container": order.container and {"runtime": order.container.runtime, "image": order.container.image},
            "argv": argv,
        }
        click.echo(json.dumps(plan))
        return
    last = -1
    for node, number in zip(layout.active, layout.launch.ranks, strict=True):
        first, last = last + 1, last + number
        click.echo(f"{node}: rank {first}" if first == last else f"{node}: ranks {first}-{last}")
    if layout.resting:
        click.echo(f"resting: {', '.join(layout.resting)}")
    for line in (layout.ring, *layout.together):
        click.echo(line)
    for name, value in settings.items():
        click.echo(f"rank 0 finds {name}={value}")
    if order.container is not None:
        click.echo(f"in a container of {order.container.image}, by {order.container.runtime}")
    import shlex

    click.echo(shlex.join(argv))
