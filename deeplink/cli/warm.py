"""`deeplink warm`: have a dataset on the nodes' SSDs before the job that reads it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.cache.holding.residency import VersionResidency
    from deeplink.cache.holding.warming import WarmProgress, WarmResult
    from deeplink.cache.index import Index
    from deeplink.config import Config
    from deeplink.pack_target import PackTarget

_EPILOG = """
Every member brings the shards it is to hold that it does not: from another member, else from the packed home, else
it makes them anew from the source's files. What is here already is verified. The command ends when each shard was
read whole where it lies and found right, or cannot be had. NAME means its newest version; of a version the first
digits are enough.

\b
Examples:
  deeplink warm imagenet                      onto the configured members, or into this node's store
  salloc -N4 deeplink warm imagenet           onto the SSDs of four nodes, for the jobs that come there
  deeplink warm imagenet@3f2a --replicas 1
  deeplink warm imagenet --dry-run            what is where now

\b
Exit codes: 0 every shard has all its copies, verified; 1 not so; 2 wrong usage or configuration.
"""


@click.command("warm", epilog=_EPILOG)
@click.argument("dataset", metavar="NAME[@VERSION]")
@click.option("--members", metavar="NAME=HOST:PORT,...", help="Agents to warm. [default: config members]")
@click.option("--replicas", type=click.IntRange(1), help="Copies of each shard. [default: config replicas]")
@click.option("--here", is_flag=True, help="This node's store alone, also inside an allocation.")
@click.option("--local", type=click.IntRange(min=1), metavar="N", help="The N nodes of `deeplink run --local N`.")
@click.option("--dry-run", is_flag=True, help="Only say what is where now.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to standard error.")
def command(
    *,
    dataset: str,
    members: str | None,
    replicas: int | None,
    here: bool,
    local: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bring a dataset onto the nodes' SSDs, and verify it there.

    Prints, per node, what it holds of the dataset and has verified.
    """
    import dataclasses

    from deeplink.cli.topology_site import site_of
    from deeplink.config import load_config
    from deeplink.pack_target import target
    from deeplink.residency_summary import note_residency

    given: dict[str, Any] = {"members": members, "replicas": replicas}
    config = dataclasses.replace(
        load_config(), **{key: value for key, value in given.items() if value is not None}
    )
    name, index = _opened(dataset, config)
    with target(config, local=local or 0, here=here, site_of=site_of) as to:
        if dry_run:
            result = None
            found = _looked_at(index, to)
        else:
            with shown_progress() as progress:
                result = _warmed(index, name, to, progress)
            found = result.residency
    note_residency(config.catalog, name, index, found)
    _say(name, index, found, result, as_json=as_json)
    if not dry_run and found.whole_shards < found.shards:
        click.get_current_context().exit(1)


def _opened(dataset: str, config: Config) -> tuple[str, Index]:
    from deeplink.cache.catalog import Catalog
    from deeplink.path import DatasetPath, resolved_version

    if "/" in dataset.removeprefix("deeplink://").rstrip("/"):
        raise click.UsageError(f"{dataset!r} is not NAME or NAME@VERSION")
    place = DatasetPath.parse(dataset)
    catalog = Catalog(config.catalog)
    version = resolved_version(catalog, place.name, place.version)
    return place.name, catalog.open(place.name, version)


def _looked_at(index: Index, to: PackTarget) -> VersionResidency:
    from deeplink.cache import ownership
    from deeplink.cache.holding.residency import residency
    from deeplink.cache.holding.warming import held_by
    from deeplink.cache.membership import node_name
    from deeplink.cache.store import Store
    from deeplink.clock import SystemClock

    if to.members:
        stats = held_by(to.members, to.token, SystemClock())
        return residency(index, stats, replicas=to.config.replicas, known=ownership.standing(to.members))
    store = Store(to.config.store, make=False)
    held = {shard: store.is_verified(shard) for shard in store.ids()}
    return residency(index, {node_name(to.config): held}, replicas=1)


def _warmed(index: Index, name: str, to: PackTarget, progress: Callable[[WarmProgress], None]) -> WarmResult:
    from deeplink.cache.holding.warming import warm, warm_here
    from deeplink.cache.sources.bucket import SourceCap, TokenBucket
    from deeplink.clock import SystemClock

    clock = SystemClock()
    if to.members:
        return warm(index, name, to.members, to.token, replicas=to.config.replicas, clock=clock, progress=progress)
    cap = SourceCap(TokenBucket(to.config.source_bytes_per_s, to.config.source_requests_per_s), clock)
    return warm_here(index, to.config, cap=cap, clock=clock, progress=progress)


def _say(name: str, index: Index, found: VersionResidency, result: WarmResult | None, *, as_json: bool) -> None:
    import dataclasses
    import json

    from deeplink.text import counted, sized

    if as_json:
        said: dict[str, Any] = {"name": name, "version": index.version, "percent": found.percent}
        said |= dataclasses.asdict(found)
        if result is not None:
            said |= {"brought": dict(result.brought), "problems": result.problems, "seconds": result.seconds}
        click.echo(json.dumps(said))
        return
    click.echo(f"{name}@{index.version[:12]}: {counted(found.shards, 'shard')}, {sized(found.bytes)}")
    click.echo(f"{'node':<16} {'to hold':>8} {'verified':>9} {'present':>8} {'bytes verified':>15}")
    for node in found.nodes:
        if node.answered:
            click.echo(
                f"{node.node:<16} {node.owned:>8,} {node.verified:>9,} {node.present:>8,} "
                f"{sized(node.verified_bytes):>15}"
            )
        else:
            click.echo(f"{node.node:<16} does not answer")
    click.echo(
        f"cached and verified: {found.percent:.1f} %; {found.whole_shards:,} of {found.shards:,} shards "
        f"have {'their copy' if found.copies == 1 else f'all {found.copies} copies'}"
    )
    if result is not None:
        _say_brought(result, f"{name}@{index.version[:12]}", index.source)


def _say_brought(result: WarmResult, dataset: str, source: str) -> None:
    from deeplink.text import sized

    found = result.residency
    whole = found.whole_shards == found.shards
    came = ", ".join(f"{sized(size)} from {origin}" for origin, size in sorted(result.brought.items()))
    click.echo(f"brought in {result.seconds:.1f} s: {came or ('nothing, all was here' if whole else 'nothing')}")
    for problem in result.problems:
        click.echo(problem, err=True)
    if not whole:
        click.echo(
            f"copies are missing: start the members, make the source ({source}) or the home reachable from them, "
            f"and run `deeplink warm {dataset}` again",
            err=True,
        )


@contextmanager
def shown_progress() -> Iterator[Callable[[WarmProgress], None]]:
    """Give what shows progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""
    import sys

    from deeplink.clock import SystemClock

    if not sys.stderr.isatty():
        clock, every_s = SystemClock(), 5.0
        last = clock.monotonic()

        def line(progress: WarmProgress) -> None:
            nonlocal last
            if clock.monotonic() - last >= every_s:
                last = clock.monotonic()
                click.echo(f"{progress.copies:,} of {progress.total_copies:,} copies of shards", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("warming"),
        BarColumn(),
        TextColumn("{task.fields[copies]:,}/{task.fields[total_copies]:,} copies of shards"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm", total=None, copies=0, total_copies=0)

        def show(progress: WarmProgress) -> None:
            bar.update(
                task,
                total=progress.total_bytes,
                completed=progress.bytes,
                copies=progress.copies,
                total_copies=progress.total_copies,
            )

        yield show
