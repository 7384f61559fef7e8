"""`deeplink warm`, `prefetch`, `evict` and `rm`: bring datasets onto the nodes' SSDs, and take them away again."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import (
    dataset_argument,
    flag,
    json_and_progress,
    json_option,
    option,
    replicas_option,
    where_and_replicas,
    where_options,
)
from deeplink.cli.output import ShownProgress, print_json
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.text import counted, sized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.cache.replicate.residency import VersionResidency
    from deeplink.cache.replicate.warming import Moves, Prefetched, WarmProgress, WarmResult
    from deeplink.cli.options import StoreOptions
    from deeplink.fs.library import DatasetPath
    from deeplink.ops.inventory import Dropped, PackTarget, Removed

_WARM_EPILOG = """
Every member brings the shards it is to hold that it does not: from another member, else from the packed home, else
it makes them again from the source's files. What is here already is verified. The command ends when each shard was
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
_PREFETCH_EPILOG = """
With standing agents (config members) the nodes bring the shards that they will own as the job's members, from
any node that has them, and only those that they lack: started again, it goes on where it was. For a JOB the nodes
are those it runs on, or those that were hinted for it; DATASET is then what it was submitted with
(--deeplink-data).
Without standing agents nothing can be warmed before a job starts: its own agents bring its data then.

--drain copies the shards that NODE alone holds to the members that own them without it, for one dataset or all.

\b
Examples:
  deeplink prefetch 4711                     what job 4711 reads, onto the nodes hinted for it
  deeplink prefetch --nodes n[0-3] imagenet
  deeplink prefetch 4711 imagenet --dry-run  who would bring what
  deeplink prefetch --drain n7               before `scontrol update nodename=n7 state=drain ...`

\b
Exit codes: 0 everything is there; 1 not so; 2 wrong usage or configuration.
"""
_EVICT_EPILOG = """
NAME alone means all its versions; with @VERSION only the shards that no other version of it has. What another
dataset has too stays, and so does a shard
where a running job needs it, and where it is not known that it can be had again: from another member that keeps
it, from the packed home, or from the source's unchanged files. --force drops them all the same. The catalog keeps
the dataset (`deeplink index rm` removes versions there); `deeplink warm` brings shards again.

\b
Examples:
  deeplink evict imagenet --dry-run             what would go, and what would stay, and why
  deeplink evict imagenet                       from the configured members, or from this node's store
  salloc -N4 deeplink evict imagenet@3f2a       from the SSDs of four nodes
  deeplink evict imagenet --force               also what cannot be had again

\b
Exit codes: 0 done, also where shards had to stay; 1 a member did not answer or a disk refused; 2 wrong usage.
"""


@click.command("warm", epilog=_WARM_EPILOG)
@dataset_argument
@where_and_replicas
@flag("--dry-run", "Only say what is where now.")
@json_and_progress
def command(*, dataset: DatasetPath, where: StoreOptions, dry_run: bool, as_json: bool) -> None:
    """Bring a dataset onto the nodes' SSDs, and verify it there.

    Prints, per node, what it holds of the dataset and has verified.
    """
    from deeplink.cache.catalog import Catalog
    from deeplink.ops.inventory import note_residency

    config = where.config()
    catalog = Catalog(config.catalog)
    index = catalog.open(dataset.name, dataset.version)
    result = None
    with where.target(config) as to:
        if dry_run:
            found = _looked_at(index, to)
        else:
            with ShownProgress("warming", "copies of shards") as progress:
                result = _warmed(index, dataset.name, to, _shown_on(progress))
            found = result.residency
    note_residency(config.catalog, dataset.name, index, found)
    _say_warmed(dataset.name, index, found, result, as_json=as_json)
    if not dry_run and found.whole_shards < found.shards:
        raise click.exceptions.Exit(1)


def _shown_on(progress: ShownProgress) -> Callable[[WarmProgress], None]:
    return lambda now: progress.at(now.copies, now.total_copies, now.bytes, now.total_bytes)


def _looked_at(index: Index, to: PackTarget) -> VersionResidency:
    from deeplink.cache.membership import node_name, standing
    from deeplink.cache.replicate.residency import residency
    from deeplink.cache.replicate.warming import held_by
    from deeplink.cache.store.store import Store

    if to.members:
        stats = held_by(to.members, to.token, SystemClock())
        return residency(index, stats, replicas=to.config.replicas, known=standing(to.members))
    store = Store(to.config.store, make=False)
    held = {shard: store.is_verified(shard) for shard in store.ids()}
    return residency(index, {node_name(to.config): held}, replicas=1)


def _warmed(index: Index, name: str, to: PackTarget, progress: Callable[[WarmProgress], None]) -> WarmResult:
    from deeplink.cache.replicate.warming import warm, warm_here
    from deeplink.cache.source.opening import source_cap

    clock = SystemClock()
    if to.members:
        return warm(index, name, to.members, to.token, replicas=to.config.replicas, clock=clock, progress=progress)
    return warm_here(index, to.config, cap=source_cap(to.config, clock), clock=clock, progress=progress)


def _say_warmed(
    name: str, index: Index, found: VersionResidency, result: WarmResult | None, *, as_json: bool
) -> None:
    if as_json:
        said: dict[str, Any] = {"name": name, "version": index.version, "percent": found.percent}
        said |= dataclasses.asdict(found)
        if result is not None:
            said |= {"brought": dict(result.brought), "problems": result.problems, "seconds": result.seconds}
        print_json(said)
        return
    dataset = f"{name}@{index.version[:12]}"
    click.echo(f"{dataset}: {counted(found.shards, 'shard')}, {sized(found.bytes)}")
    click.echo(f"{'node':<16} {'to hold':>8} {'verified':>9} {'present':>8} {'bytes verified':>15}")
    for node in found.nodes:
        counts = f"{node.owned:>8,} {node.verified:>9,} {node.present:>8,} {sized(node.verified_bytes):>15}"
        click.echo(f"{node.node:<16} {counts if node.answered else 'does not answer'}")
    click.echo(
        f"cached and verified: {found.percent:.1f} %; {found.whole_shards:,} of {found.shards:,} shards "
        f"have {'their copy' if found.copies == 1 else f'all {found.copies} copies'}"
    )
    if result is None:
        return
    whole = found.whole_shards == found.shards
    nothing = "nothing, all was here" if whole else "nothing"
    click.echo(f"brought in {result.seconds:.1f} s: {_origins(result.brought) or nothing}")
    for problem in result.problems:
        click.echo(problem, err=True)
    if not whole:
        click.echo(
            f"copies are missing: start the members, make the source ({index.source}) or the home reachable from "
            f"them, and run `deeplink warm {dataset}` again",
            err=True,
        )


def _origins(brought: Mapping[str, int]) -> str:
    return ", ".join(f"{sized(size)} from {origin}" for origin, size in sorted(brought.items()))


@click.command("prefetch", epilog=_PREFETCH_EPILOG)
@click.argument("words", nargs=-1, metavar="[JOB] [DATASET[@VERSION]]...")
@option("--nodes LIST", "These nodes (n[0-3,7]) instead of a job's.")
@option("--drain NODE", "Copy away what NODE alone holds.")
@replicas_option
@flag("--dry-run", "Only say who would bring what.")
@json_and_progress
def prefetch(
    *,
    words: tuple[str, ...],
    nodes: str | None,
    drain: str | None,
    replicas: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Warm the SSDs of nodes before a job starts there, or empty one ahead of its drain."""
    from deeplink.cache.replicate.warming import prefetch as bring
    from deeplink.ops.packing import StandingAgents, chosen, moves_off, moves_to

    if drain is not None and nodes is not None:
        raise click.UsageError("--nodes and --drain contradict each other")
    config = load_config()
    agents = StandingAgents.of(config)
    if drain is not None:
        found = moves_off(drain, words, agents, config)
    else:
        where, datasets = chosen(words, nodes, config)
        found = moves_to(where, datasets, agents, config, replicas=replicas or config.replicas)
    results: list[Prefetched] = []
    for moves in [] if dry_run else found:
        with ShownProgress("warming", "copies of shards") as progress:
            results.append(bring(moves, agents.members, agents.token, progress=_shown_on(progress)))
    for moves, done in itertools.zip_longest(found, results):
        _say_moves(moves, done, as_json=as_json)
    if not found and not as_json:
        click.echo("nothing is to be moved: no dataset is known here")
    missing = any(one.silent for one in found) or any(one.came < one.wanted for one in results)
    if missing and not dry_run:
        raise click.exceptions.Exit(1)


def _say_moves(moves: Moves, done: Prefetched | None, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "name": moves.name,
                "version": moves.index.version,
                "copies": moves.copies,
                "to_bring": {node: len(numbers) for node, numbers in moves.numbers.items()},
                "bytes": moves.bytes,
                "silent": list(moves.silent),
                "brought": dict(done.brought) if done else {},
                "came": done.came if done else 0,
                "problems": list(done.problems) if done else [],
            }
        )
        return
    copies = "1 copy" if moves.copies == 1 else f"{moves.copies:,} copies"
    click.echo(
        f"{moves.name}@{moves.index.version[:12]}: {copies} to lie there, {moves.copies - moves.shards:,} do; "
        f"to bring: {moves.shards:,} ({sized(moves.bytes)})"
    )
    for node, numbers in moves.numbers.items():
        size = sum(moves.index.shards[number].bytes for number in numbers)
        click.echo(f"  {node:<16} {counted(len(numbers), 'shard'):>12} {sized(size):>12}")
    for node in moves.silent:
        click.echo(f"  {node:<16} has no agent that answers: its share comes when the job starts there", err=True)
    if done is not None:
        click.echo(f"  brought {done.came:,} of {done.wanted:,}: {_origins(done.brought) or 'nothing'}")
        for problem in done.problems:
            click.echo(f"  {problem}", err=True)


@click.command("evict", epilog=_EVICT_EPILOG)
@dataset_argument
@where_options
@flag("--force", "Also what is shared, what a job needs, what cannot be had again.")
@flag("--dry-run", "Only say what would become of each shard.")
@json_option()
def evict(*, dataset: DatasetPath, where: StoreOptions, force: bool, dry_run: bool, as_json: bool) -> None:
    """Drop a dataset's shards from the nodes' SSDs, as far as they can be had again.

    Shards that a running job needs, or another dataset has, stay too.
    """
    from deeplink.cache.catalog import Catalog
    from deeplink.ops.inventory import drop, note_dropped, outcome_of, shards_to_drop

    config = where.config()
    catalog = Catalog(config.catalog)
    shards, shared = shards_to_drop(catalog, dataset, force=force)
    with where.target(config) as to:
        found, problems = drop(shards, to, force=force, dry_run=dry_run)
    if not dry_run:
        note_dropped(catalog, dataset.name, found)
    _say_evicted(found, problems, shared, dry_run=dry_run, as_json=as_json)
    failed = any(outcome_of(shard) == "failed" for held in found.values() for shard in held)
    if problems or failed:
        raise click.exceptions.Exit(1)


def _say_evicted(
    found: Dropped, problems: Sequence[str], shared: Mapping[str, int], *, dry_run: bool, as_json: bool
) -> None:
    from deeplink.ops.inventory import outcome_of

    if as_json:
        words = {"gone": "would go"} if dry_run else {}
        nodes: dict[str, list[dict[str, Any]]] = {node: [] for node in found}
        for node, held in found.items():
            for one in held:
                if (outcome := outcome_of(one)) != "absent":
                    facts = {"shard": one.id, "outcome": words.get(outcome, outcome)}
                    nodes[node].append({**facts, "bytes": one.bytes, "problem": one.problem})
        print_json({"dry_run": dry_run, "nodes": nodes, "shared": dict(shared), "problems": list(problems)})
        return
    for node, held in found.items():
        gone = [one for one in held if outcome_of(one) == "gone"]
        would = "would drop" if dry_run else "dropped"
        click.echo(f"{node}: {would} {counted(len(gone), 'shard')}, {sized(sum(one.bytes for one in gone))}")
        for why, count in sorted(Counter(one.problem for one in held if one.problem).items()):
            click.echo(f"{node}: kept {counted(count, 'shard')}: {why}")
    for other, count in shared.items():
        click.echo(f"kept {counted(count, 'shard')} that {other} has too; --force drops what is shared")
    for problem in problems:
        click.echo(problem, err=True)


_MOST_KEPT = 5


@click.command(
    "rm",
    epilog="""
Nothing is removed while a running job needs one of its shards, or while a node that should say so does not answer.
Shards that another dataset has too stay, and so do the source and the packed home. An index stays in the catalog
under a hidden name for a week, for jobs that have it open.

\b
Examples:
  deeplink rm imagenet --dry-run             what would be removed, and what would stay
  deeplink rm imagenet                       from the catalog, and from the configured members or this node's store
  deeplink rm imagenet@3f2a                  one version that is not the newest
  salloc -N4 deeplink rm imagenet            from the SSDs of four nodes

\b
Exit codes: 0 done, 1 nothing or not all was removed, 2 there is no such dataset.
""",
)
@dataset_argument
@where_options
@flag("--dry-run", "Say what would be removed; change nothing.")
@json_option()
def rm(*, dataset: DatasetPath, where: StoreOptions, dry_run: bool, as_json: bool) -> int:
    """Remove a dataset from the catalog, and its shards from the nodes' SSDs."""
    from deeplink.cache.catalog import Catalog
    from deeplink.ops.inventory import remove_dataset

    config = where.config()
    catalog = Catalog(config.catalog)
    catalog.resolved(dataset.name, dataset.version)  # before agents are started for nothing
    with where.target(config) as to:
        found = remove_dataset(catalog, dataset, to, dry_run=dry_run)
    if as_json:
        print_json({**dataclasses.asdict(found), "dry_run": dry_run})
    else:
        _say_removed(found, dry_run=dry_run)
    return int(bool(found.kept))


def _say_removed(found: Removed, *, dry_run: bool) -> None:
    would = "would be removed" if dry_run else "removed"
    what = counted(len(found.versions), "version")
    click.echo(f"{found.name}: {would}: {what}, {counted(found.shards, 'shard')} on nodes, {sized(found.bytes)}")
    for other, count in found.shared.items():
        click.echo(f"kept {counted(count, 'shard')} that {other} has too")
    if found.home:
        click.echo(f"its packed home {found.home} stays as it is")
    for copy, why in list(found.kept.items())[:_MOST_KEPT]:
        click.echo(f"kept {copy}: {why}", err=True)
    if len(found.kept) > _MOST_KEPT:
        click.echo(f"and {len(found.kept) - _MOST_KEPT} more", err=True)
