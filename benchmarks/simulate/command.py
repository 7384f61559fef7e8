"""`deeplink simulate`: a trace of jobs replayed on a cluster, with nodes chosen by one policy or another."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import FiniteRange

if TYPE_CHECKING:
    from benchmarks.simulate.site import SimulatedCluster
    from benchmarks.simulate.study import Run, Study, StudySettings
    from benchmarks.simulate.trace import Trace

POLICIES = ("slurm-tree", "pack", "random", "deeplink")
_EPILOG = """
TRACE is CSV, packed by gzip or not, with a first line that names its columns: `timestamp` or `submit` (a date or
seconds), `duration` (seconds), `num_gpus` or `gpus`, or `nodes`, and perhaps `cluster`: Philly's trace as Pollux
published it, or your own (docs/simulation.md tells how to get one out of sacct).

\b
Policies:
  slurm-tree   what Slurm 22.05 chooses with topology/tree; ranks by node name
  pack         the fullest nodes that have the room; ranks by node name
  random       any nodes that have the room; ranks by node name
  deeplink     the nodes and rank order of `deeplink sbatch`

\b
Examples:
  deeplink simulate philly.csv.gz --nodes 176 --gpus-per-node 4
  deeplink simulate philly.csv.gz --nodes 176 --gpus-per-node 4 --seeds 5 --html queue.html
  deeplink simulate jobs.csv --topology /etc/slurm/topology.conf --policy slurm-tree --policy deeplink
  deeplink simulate philly.csv.gz --nodes 4096 --load 0.9 --json >queue.json
"""
_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.command("simulate", epilog=_EPILOG)
@click.argument("trace", type=_FILE)
@click.option(
    "--topology", multiple=True, type=_FILE, help="The cluster: anything `deeplink topology` reads. Repeatable."
)
@click.option(
    "--nodes", type=click.IntRange(1, 4096), help="A generated tree of so many nodes, without --topology."
)
@click.option(
    "--leaf-size", type=click.IntRange(1), default=16, show_default=True, help="Nodes on a generated leaf."
)
@click.option(
    "--names",
    type=click.Choice(["follow", "dealt"]),
    default="follow",
    show_default=True,
    help="Whether names of generated nodes follow the leaves, or are dealt over them.",
)
@click.option(
    "--gpus-per-node", type=click.IntRange(1), help="GPUs of each node. [default: what the topology tells, else 8]"
)
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="Repeatable. [default: all]"
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Runs of each policy.")
@click.option(
    "--jitter",
    type=FiniteRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="A seed moves each submission by up to so much.",
)
@click.option("--jobs", type=click.IntRange(1), help="Only the first so many jobs.")
@click.option("--cluster", help="Only the jobs of one virtual cluster of the trace.")
@click.option(
    "--skip", type=click.IntRange(0), help="Leave out up to so many rows that cannot be read. [default: 1 %]"
)
@click.option(
    "--load",
    type=FiniteRange(0, min_open=True),
    metavar="SHARE",
    help="Move submissions until the jobs, did none wait, would keep this share of the GPUs busy from the first "
    "submission to the last. [default: as in the trace]",
)
@click.option(
    "--overestimate",
    type=FiniteRange(1),
    default=2.0,
    show_default=True,
    metavar="TIMES",
    help="Time limits, in durations of the job.",
)
@click.option(
    "--speedup", is_flag=True, help="Let jobs over one node run longer on worse nodes, as the model predicts."
)
@click.option(
    "--oversubscribed",
    type=FiniteRange(0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="TIMES",
    help="Uplinks of leaves and spines carry so many times less, in the predicted step.",
)
@click.option("--constants", type=_FILE, help="Constants of the cost model, from `deeplink calibrate`.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures of all runs as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(**asked: Any) -> None:
    """Replay a trace of jobs on a cluster and compare who chooses the nodes: queueing, leaves, steps."""
    import json

    from benchmarks.simulate.page import as_html, as_text
    from benchmarks.simulate.report import ReportSubject, document
    from deeplink.core.publish import write_output

    trace = _trace(asked)
    site = _site(asked)
    settings = _settings(asked)
    study = _studied(asked, trace, site, settings)
    told = ReportSubject(asked["trace"].name, site.words, trace.faults, settings, study)
    # Printed first: where the page cannot be written, what took minutes is not lost.
    click.echo(json.dumps(document(told), indent=1) if asked["as_json"] else as_text(told).removesuffix("\n"))
    if asked["html"] is not None:
        write_output(asked["html"], as_html(told, _made_by()))
    for fault in trace.faults[:3]:
        click.echo(f"left out: {fault}", err=True)
    if len(trace.faults) > 3:  # noqa: PLR2004
        click.echo(f"left out: {len(trace.faults) - 3:,} more rows (--json lists them)", err=True)


def _trace(asked: dict[str, Any]) -> Trace:
    from benchmarks.simulate.trace import read_trace
    from deeplink.core.publish import file_trouble

    try:
        return read_trace(asked["trace"], cluster=asked["cluster"], limit=asked["jobs"], skip=asked["skip"])
    except OSError as problem:
        raise file_trouble("read", asked["trace"], problem) from problem


def _site(asked: dict[str, Any]) -> SimulatedCluster:
    from benchmarks.simulate.site import DEFAULT_GPUS, SimulatedTree, generated, site_of

    gpus = asked["gpus_per_node"]
    if bool(asked["topology"]) == bool(asked["nodes"]):
        raise click.UsageError("Give either --topology or --nodes.")
    if asked["topology"]:
        from deeplink.ops.topology_reading import read_all

        reading = read_all(asked["topology"], None, (), ())
        for finding in reading.findings:
            click.echo(str(finding), err=True)
        return site_of(reading.network, gpus, ", ".join(path.name for path in asked["topology"]))
    tree = SimulatedTree(
        nodes=asked["nodes"],
        per_leaf=asked["leaf_size"],
        gpus=gpus or DEFAULT_GPUS,
        dealt=asked["names"] == "dealt",
    )
    return generated(tree)


def _settings(asked: dict[str, Any]) -> StudySettings:
    from dataclasses import replace

    from benchmarks.simulate.engine import Rules
    from benchmarks.simulate.study import StudySettings
    from deeplink.core.publish import file_trouble
    from deeplink.scheduler.placement.model import Constants, constants_from

    constants = Constants()
    if asked["constants"] is not None:
        try:
            text = asked["constants"].read_text(encoding="utf-8", errors="replace")
        except OSError as problem:
            raise file_trouble("read", asked["constants"], problem) from problem
        constants = constants_from(text, str(asked["constants"]))
    less = asked["oversubscribed"]
    leaf, spine = (replace(link, bandwidth=link.bandwidth / less) for link in (constants.leaf, constants.spine))
    return StudySettings(
        rules=Rules(overestimate=asked["overestimate"]),
        jitter_s=asked["jitter"],
        load=asked["load"],
        speedup=asked["speedup"],
        constants=replace(constants, leaf=leaf, spine=spine),
    )


def _studied(asked: dict[str, Any], trace: Trace, site: SimulatedCluster, settings: StudySettings) -> Study:
    from benchmarks.simulate.policies import SchedulingPolicy
    from benchmarks.simulate.progress import shown_runs
    from benchmarks.simulate.study import Study, planned, run_once

    plan = planned(trace, site, settings.load)
    policies = [SchedulingPolicy(name) for name in dict.fromkeys(asked["policies"] or POLICIES)]
    each = len(plan.work)
    runs: list[Run] = []
    with shown_runs(len(policies) * asked["seeds"] * each, quiet=asked["quiet"]) as show:
        for seed in range(asked["seeds"]):
            for policy in policies:
                told = partial(show, f"{policy}, seed {seed + 1} of {asked['seeds']}", len(runs) * each)
                runs.append(run_once(site, plan, policy, seed=seed, settings=settings, told=told))
    return Study(tuple(runs), plan)


def _made_by() -> str:
    import shlex

    return shlex.join(["deeplink", *sys.argv[1:]])
