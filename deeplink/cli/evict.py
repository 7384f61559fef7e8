"""`deeplink evict`: give the SSDs' room back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.config import Config
    from deeplink.spread import Target
    from deeplink.types import ShardId
    from deeplink.v1 import cache_pb2

_EPILOG = """
NAME alone means all its versions; with @VERSION only the shards that no other version of it has. A shard stays
where a running job needs it, and where it is not known that it can be had again: from another member that keeps
it, from the packed home, or from the source's unchanged files. --force drops it all the same. The catalog keeps
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


@click.command("evict", epilog=_EPILOG)
@click.argument("dataset", metavar="NAME[@VERSION]")
@click.option("--members", metavar="NAME=HOST:PORT,...", help="Agents to ask. [default: config members]")
@click.option("--here", is_flag=True, help="This node's store alone, also inside an allocation.")
@click.option("--local", type=click.IntRange(min=1), metavar="N", help="The N nodes of `deeplink run --local N`.")
@click.option("--force", is_flag=True, help="Also what a running job needs or what cannot be had again.")
@click.option("--dry-run", is_flag=True, help="Only say what would become of each shard.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    *, dataset: str, members: str | None, here: bool, local: int | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Drop a dataset's shards from the nodes' SSDs, as far as they can be had again.

    Shards that a running job needs stay too.
    """
    import dataclasses

    from deeplink.config import load_config
    from deeplink.spread import target

    config = load_config()
    if members is not None:
        config = dataclasses.replace(config, members=members)
    shards = _shards(dataset, config)
    with target(config, local=local or 0, here=here) as to:
        found, problems = _evicted(shards, to, force=force, dry_run=dry_run)
    _say(found, problems, dry_run=dry_run, as_json=as_json)
    failed = any(_outcome(shard) == "failed" for held in found.values() for shard in held)
    if problems or failed:
        click.get_current_context().exit(1)


def _shards(dataset: str, config: Config) -> list[ShardId]:
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.errors import DatasetMissingError
    from deeplink.path import DatasetPath, resolved_version

    if "/" in dataset.removeprefix("deeplink://").rstrip("/"):
        raise click.UsageError(f"{dataset!r} is not NAME or NAME@VERSION")
    place = DatasetPath.parse(dataset)
    catalog = Catalog(config.catalog)
    versions = catalog.versions(place.name)
    if not versions:
        raise DatasetMissingError(place.name, "", config.catalog)
    held = {version: {entry.id for entry in catalog.open(place.name, version).shards} for version in versions}
    if not place.version:
        return sorted(set().union(*held.values()))
    chosen = resolved_version(catalog, place.name, place.version)
    others = (shards for version, shards in held.items() if version != chosen)
    return sorted(held[chosen].difference(*others))


def _evicted(
    shards: Sequence[ShardId], to: Target, *, force: bool, dry_run: bool
) -> tuple[dict[str, list[cache_pb2.EvictedShard]], list[str]]:
    from deeplink.cache.errors import MemberError
    from deeplink.cache.holding.fillclient import evict

    found: dict[str, list[cache_pb2.EvictedShard]] = {}
    problems: list[str] = []
    # One after another: what one member drops the next one must not count on.
    for member in to.members:
        try:
            found[member.name] = evict(member, to.token, shards, force=force, dry_run=dry_run)
        except MemberError as problem:
            problems.append(str(problem))
    if not to.members:
        node, held = _evicted_here(shards, to.config, force=force, dry_run=dry_run)
        found[node] = held
    return found, problems


def _evicted_here(
    shards: Sequence[ShardId], config: Config, *, force: bool, dry_run: bool
) -> tuple[str, list[cache_pb2.EvictedShard]]:
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.holding.fillservice import evict
    from deeplink.cache.holding.known import KnownShards
    from deeplink.cache.holding.recovery import Recovery
    from deeplink.cache.membership import node_name
    from deeplink.cache.sources.bucket import SourceCap, TokenBucket
    from deeplink.cache.store import Store
    from deeplink.clock import SystemClock

    clock, node = SystemClock(), node_name(config)
    cap = SourceCap(TokenBucket(config.source_bytes_per_s, config.source_requests_per_s), clock)
    recovery = Recovery(node, "", KnownShards(Catalog(config.catalog), clock), cap, clock)
    store = Store(config.store, make=False)
    return node, list(evict(store, shards, recovery, clock, force=force, dry_run=dry_run).shards)


def _outcome(shard: cache_pb2.EvictedShard) -> str:
    from deeplink.v1 import cache_pb2

    return cache_pb2.EvictOutcome.Name(shard.outcome).removeprefix("EVICT_OUTCOME_").lower()


def _say(
    found: Mapping[str, Sequence[cache_pb2.EvictedShard]],
    problems: Sequence[str],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    import json

    from deeplink.wording import counted, sized

    if as_json:
        nodes: dict[str, list[dict[str, Any]]] = {
            node: [
                {"shard": one.id, "outcome": _outcome(one), "bytes": one.bytes, "problem": one.problem}
                for one in held
                if _outcome(one) != "absent"
            ]
            for node, held in found.items()
        }
        click.echo(json.dumps({"dry_run": dry_run, "nodes": nodes, "problems": list(problems)}))
        return
    for node, held in found.items():
        gone = [one for one in held if _outcome(one) == "gone"]
        would = "would drop" if dry_run else "dropped"
        click.echo(f"{node}: {would} {counted(len(gone), 'shard')}, {sized(sum(one.bytes for one in gone))}")
        kept: dict[str, int] = {}
        for one in held:
            if one.problem:
                kept[one.problem] = kept.get(one.problem, 0) + 1
        for why, count in sorted(kept.items()):
            click.echo(f"{node}: kept {counted(count, 'shard')}: {why}")
    for problem in problems:
        click.echo(problem, err=True)
