"""`deeplink run`: start and supervise a job's ranks, in place of srun or torchrun."""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from deeplink.cli import OWN_PROCESS
from deeplink.cli.options import FiniteRange, flag, grouped, integer, json_option, option, real
from deeplink.cli.output import print_json
from deeplink.core.config import load_config
from deeplink.core.types import Attempt
from deeplink.scheduler.launch.container import RUNTIMES
from deeplink.scheduler.launch.environment import DEFAULT, RECIPES, Start
from deeplink.scheduler.slurm.submission import PATHS_VARIABLE
from deeplink.scheduler.topology.rank_order import too_few_nodes

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.container import Container
    from deeplink.scheduler.launch.launch_spec import LaunchSpec
    from deeplink.scheduler.launch.launcher_process import ParentLink
    from deeplink.scheduler.launch.shared_network import SiteFabric
    from deeplink.scheduler.recovery.relaunch import RelaunchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """Options for ranks or nodes that fail."""

    elastic: int | None
    no_retry: bool
    max_relaunches: int | None
    final_codes: tuple[int, ...]
    hold: bool | None
    time_margin: float | None
    strand_timeout: float

    def policy(self) -> RelaunchPolicy:
        """Return the thresholds of verdicts."""
        from deeplink.scheduler.recovery.rank_failure import RelaunchLimits
        from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
        from deeplink.scheduler.recovery.witnesses import with_thresholds

        codes = frozenset(self.final_codes)
        limits = RelaunchLimits(most_relaunches=self.max_relaunches, retries=not self.no_retry, final_codes=codes)
        return with_thresholds(RelaunchPolicy(limits=limits), load_config().recovery)

    def check(self, count: int) -> None:
        """Check that they fit a run on so many nodes."""
        if self.elastic is not None and self.elastic > count:
            raise click.UsageError(f"--elastic {self.elastic}: only {count} nodes run ranks")


recovery_options = grouped(
    "recovery",
    RecoveryOptions,
    integer(
        "--elastic MIN",
        "Go on with fewer nodes, down to MIN, where no more are left. [default: wait for a rescue]",
        1,
        envvar="DEEPLINK_ELASTIC",
    ),
    flag("--no-retry", "Ranks that fail end the run; lost nodes are still replaced."),
    integer(
        "--max-relaunches N",
        "Start the ranks again so often at most, progress or not. [default: as long as they get further]",
        0,
        envvar="DEEPLINK_MAX_RELAUNCHES",
    ),
    integer(
        "--final-code CODE",
        "Ranks that exit so end the run, and their code is passed on; repeatable.",
        1,
        255,
        name="final_codes",
        multiple=True,
    ),
    option(
        "--hold/--no-hold",
        "Whether Slurm is to hold the job, instead of ending it, when the application itself fails again and "
        "again. [default: if it ever came to a step, and may be requeued]",
        default=None,
        envvar="DEEPLINK_HOLD",
    ),
    real(
        "--time-margin SECONDS",
        "Have the ranks save so long before the job's time limit. "
        "[default: learned from their saves, 60 at least]",
        0,
        envvar="DEEPLINK_TIME_MARGIN",
    ),
    real(
        "--strand-timeout SECONDS", "How long to wait for a rescue when too few nodes are left.", 0, default=900.0
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ContainerOptions:
    image: str | None
    runtime: str | None
    mounts: tuple[str, ...]
    options: tuple[str, ...]

    def container(self, *, local: bool) -> Container | None:
        if self.image is None:
            if self.runtime or self.mounts or self.options:
                raise click.UsageError("--container-... options mean nothing without --container IMAGE")
            return None
        from deeplink.scheduler.launch.container import PYXIS, Container, chosen_runtime, mounted

        if self.runtime == PYXIS and local:
            raise click.UsageError("pyxis is part of srun, and --local starts none")
        mounted(self.mounts)
        return Container(chosen_runtime(self.runtime, shutil.which), self.image, self.mounts, self.options)


_container_options = grouped(
    "inside",
    _ContainerOptions,
    option("--container IMAGE", "Run every rank in this image, with what it needs mounted.", name="image"),
    option(
        "--container-runtime",
        "What runs the image. [default: the first of apptainer, singularity, charliecloud that is installed]",
        name="runtime",
        type=click.Choice(RUNTIMES),
    ),
    option("--container-mount DIR[:INSIDE]", "Mount a folder too; repeatable.", name="mounts", multiple=True),
    option(
        "--container-option OPTION",
        "Hand an option to the runtime (--nv, say); repeatable.",
        name="options",
        multiple=True,
    ),
)


_EPILOG = """
Ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, numbered along the
fabric. Signals TERM, INT, USR1 and USR2 are passed on to them. Ranks that fail are started again once where they
were saved, and as often as they get further; then a job that came to a step is held. The exit code is the first
failed rank's, 128 + n where a signal ended it, and 75 where nodes were lost and nothing could replace them.

\b
Examples:
  deeplink run -- python train.py --epochs 90                  in a batch script: its tasks, else a rank per GPU
  deeplink run --spares 1 --nproc-per-node 4 -- python train.py
  deeplink run --group-size 16 -- python train.py              ranks 0-15, 16-31, ... each on one leaf
  deeplink run --recipe torchrun -- torchrun train.py          one torchrun per node; --recipe list shows all
  deeplink run --paths -- python train.py                      files below packed folders: from the cache
  deeplink run --container image.sif -- python train.py        every rank in an Apptainer image
  deeplink run --dry-run -- python train.py                    which rank would run where
  deeplink run --local 2 -- python train.py                    without Slurm: two "nodes" on this machine
"""


def _per_node(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """Read `auto` as None."""
    if value == "auto":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a positive whole number nor auto")
    return int(value)


def _step_timeout(context: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Read `auto` as None, and `off` as 0."""
    if value == "auto":
        return None
    if value == "off":
        return 0.0
    return FiniteRange(min=0).convert(value, parameter, context)


def _modules(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Read names with commas between them; `auto` is none."""
    if value is None or value == "auto":
        return None if value is None else ()
    named = tuple(map(str.strip, value.split(",")))
    if bad := next((name for name in named if not all(map(str.isidentifier, name.split(".")))), None):
        raise click.BadParameter(f"{bad!r} is no module's name; it takes MODULE,MODULE,... or auto")
    return named


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
@option(
    "--recipe NAME|list",
    "Which framework the ranks are of, so that they find what it reads: torch (DDP, FSDP), torchrun, "
    "lightning, accelerate, deepspeed, jax, tensorflow, mpi, horovod. [default: torch]",
    callback=_recipe,
    default=DEFAULT,
    envvar="DEEPLINK_RECIPE",
    is_eager=True,
)
@integer(
    "--spares",
    "Nodes that rest until another one is lost; the job needs --no-kill (`deeplink sbatch` adds it). "
    "[default: those beyond --nnodes, else none]",
    0,
    envvar="DEEPLINK_SPARES",
)
@option(
    "--nproc-per-node K|auto",
    "Ranks on each node; auto: the job's tasks, as Slurm spread them, else one for each GPU, else 1. "
    "With --recipe torchrun GPUs go first.",
    show_default=False,
    callback=_per_node,
    default="auto",
)
@integer("--nnodes", "Nodes that run ranks. [default: all but the spares]", 1)
@integer(
    "--group-size RANKS",
    "So many consecutive ranks (a tensor-parallel group, say) are to stay within a leaf switch or a node; "
    "repeatable, each size a multiple of the smaller one.",
    2,
    name="group_sizes",
    multiple=True,
    envvar="DEEPLINK_GROUP_SIZE",
)
@option(
    "--step-timeout auto|off|SECONDS",
    "Start the ranks again when no newer step was reported for so long (after the first); auto: after five "
    "steps of the job's own, 30 seconds at least, where it is seen that ranks hang. [default: auto]",
    callback=_step_timeout,
    default="auto",
    envvar="DEEPLINK_STEP_TIMEOUT",
)
@flag(
    "--replace-stragglers",
    "Start the ranks again on a spare in place of a persistently slow one's node. [default: report it]",
    envvar="DEEPLINK_REPLACE_STRAGGLERS",
)
@option(
    "--paths [NAME,...]",
    "Serve files below packed folders from the cache, to unchanged Python code that opens them: of all datasets, "
    "or of those named (docs/paths.md).",
    is_flag=False,
    flag_value="all",
    envvar=PATHS_VARIABLE,
)
@recovery_options
@option(
    "--preload MODULES|auto",
    "On every node have a process wait with these modules imported, to become a rank of the next attempt; auto: "
    "those of installed packages that the script begins with (docs/launch.md). [default: none]",
    callback=_modules,
    envvar="DEEPLINK_PRELOAD",
)
@option(
    "--srun-option OPTION", "Hand an option to the ranks' srun; repeatable.", name="srun_options", multiple=True
)
@option(
    "--interface NAME|NETWORK",
    "What agents and ranks talk over: an interface that every node has, or a network such as 10.1.0.0/16. "
    "[default: config interface (DEEPLINK_INTERFACE), else the fastest network that joins all nodes]",
)
@_container_options
@integer("--local N", "Without Slurm: N nodes on this machine.", 1)
@flag("--dry-run", "Print which rank would run where, and the command; start nothing.")
@json_option("Say what happens as JSON lines (on standard error), or the dry run.")
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
    paths: str | None,
    recovery: RecoveryOptions,
    preload: tuple[str, ...] | None,
    srun_options: tuple[str, ...],
    interface: str | None,
    inside: _ContainerOptions,
    local: int | None,
    dry_run: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> int:
    """Start and supervise the ranks of a job inside its allocation.

    COMMAND is started once per rank, ranks are ordered along the fabric, and signals and the exit code passed on.
    When a node goes silent the ranks start again on the nodes that are left and a spare, under the same job id.
    """
    link = None
    is_own = click.get_current_context().find_root().obj is OWN_PROCESS
    if is_own and local is None and not dry_run and "SLURM_JOB_ID" in os.environ:
        from deeplink.scheduler.launch.launcher_process import ParentLink

        link = ParentLink.of_this_process(os.environ)  # this goes on in a child, and in another where it is killed
    with nullcontext() if link is None else link.greeted().outlived():
        if link is not None and (code := _given_up(link)) is not None:
            return code
        from deeplink.ops.topology_reading import site_of
        from deeplink.scheduler.launch.job import passed_on, run_job
        from deeplink.scheduler.launch.launch_spec import LaunchSpec, check_spread, gpu_options, ranks_of

        config = load_config()
        if interface is not None:
            config = replace(config, interface=interface)
        goes_on = link is not None and link.died is not None
        backend = _backend(config, local, srun_options, preload, goes_on=goes_on)
        nodes, resting = len(backend.nodes), spares or 0
        count = nnodes if nnodes is not None else nodes - resting
        if count < 1 or count + resting > nodes:
            raise too_few_nodes(max(count, 1) + resting, nodes)
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
            passed_on={**passed_on(config, os.environ), **_served_paths(paths, config, inside)},
            group_sizes=tuple(sorted(set(group_sizes))),
            recipe_name=recipe,
            container=inside.container(local=local is not None),
        )
        check_spread(ranks, count, order.group_sizes)
        started = {node: RECIPES[recipe].started(number) for node, number in ranks.items()}
        # What cannot be had is an error before anything starts.
        gpu_options(backend.granted, started, starters=starters, by_user=srun_options)
        order.groups.check(order.count)
        recovery.check(order.count)
        site = site_of(config)
        if dry_run:
            _print_plan(backend, order, site, as_json=as_json)
            return 0
        if link is not None:
            if (code := _given_up(link)) is not None:  # Slurm may have been waited for meanwhile, for long
                return code
            backend.role.term = link.term
        code = run_job(backend, order, config, policy=recovery.policy(), site=site, as_json=as_json, link=link)
    if link is not None and link.is_elsewhere:
        _end_job(backend, code, link)
    return code


def _end_job(backend: Backend, code: int, link: ParentLink) -> None:
    from deeplink.scheduler.launch.launcher_role import RoleClaims, end_job

    end_job(backend.job, backend.restart, code, RoleClaims(backend.folder, link.run))


def _given_up(link: ParentLink) -> int | None:
    """Return the run's exit code where another node has the launcher's role: once the run has ended there."""
    from deeplink.scheduler.launch.launcher_role import RoleClaims

    folder = load_config().state / "jobs" / os.environ["SLURM_JOB_ID"]
    return link.given_up(RoleClaims(folder, link.run), os.environ.get("SLURMD_NODENAME", ""))


def _served_paths(names: str | None, config: Config, inside: _ContainerOptions) -> dict[str, str]:
    """Return what every rank finds in its environment so that its Python serves paths."""
    if names is None:
        return {}
    if inside.image is not None:
        raise click.UsageError(
            "--paths does not reach into a container: call deeplink.paths.install() in the script"
        )
    from deeplink.paths.packed_folder import packed_roots
    from deeplink.paths.routing import environment

    chosen = () if names == "all" else tuple(filter(None, names.split(",")))
    return environment(packed_roots(chosen, config), os.environ)


def _backend(
    config: Config,
    local: int | None,
    srun_options: tuple[str, ...],
    preload: tuple[str, ...] | None,
    *,
    goes_on: bool,
) -> Backend:
    if local is not None:
        from deeplink.scheduler.launch.local_backend import LocalBackend

        if srun_options:
            raise click.UsageError("--srun-option means nothing with --local")
        if preload is not None:
            raise click.UsageError("--preload means nothing with --local")
        return LocalBackend.on_this_machine(local, os.environ, config.store, config.state)
    from deeplink.scheduler.launch.slurm_backend import ANSWER_S, LONG_ANSWER_S, SlurmBackend

    backend = replace(SlurmBackend.from_environment(os.environ, config.state, srun_options), preload=preload)
    return backend.with_granted(LONG_ANSWER_S if goes_on else ANSWER_S)


def _print_plan(backend: Backend, order: LaunchSpec, site: SiteFabric | None, *, as_json: bool) -> None:
    from deeplink.scheduler.launch.environment import NodeFacts, RankTask
    from deeplink.scheduler.launch.launch_spec import lay_out
    from deeplink.scheduler.launch.shared_network import fabric_below

    # No agent has said anything yet: the site's or Slurm's word on the fabric, and names for addresses.
    order = replace(order, fabric=fabric_below(dict.fromkeys(backend.nodes, ""), site, backend.fabric))
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
        print_json(plan)
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
    click.echo(shlex.join(argv))
