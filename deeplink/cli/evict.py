"""`deeplink evict`: give the SSDs' room back."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.cache.catalog import Catalog
    from deeplink.config import Config
    from deeplink.pack_target import PackTarget
    from deeplink.types import ShardId
    from deeplink.v1 import cache_pb2

_EPILOG = """
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


@click.command("evict", epilog=_EPILOG)
@click.argument("dataset", metavar="NAME[@VERSION]")
@click.option("--members", metavar="NAME=HOST:PORT,...", help="Agents to ask. [default: config members]")
@click.option("--here", is_flag=True, help="This node's store alone, also inside an allocation.")
@click.option("--local", type=click.IntRange(min=1), metavar="N", help="The N nodes of `deeplink run --local N`.")
@click.option("--force", is_flag=True, help="Also what is shared, what a job needs, what cannot be had again.")
@click.option("--dry-run", is_flag=True, help="Only say what would become of each shard.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    *, dataset: str, members: str | None, here: bool, local: int | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Drop a dataset's shards from the nodes' SSDs, as far as they can be had again.

    Shards that a running job needs, or another dataset has, stay too.
    """
    import dataclasses

    from deeplink.config import load_config
    from deeplink.pack_target import target

    config = load_config()
    if members is not None:
        config = dataclasses.replace(config, members=members)
    shards, shared = _shards(dataset, config, force=force)
    with target(config, local=local or 0, here=here) as to:
        found, problems = _evicted(shards, to, force=force, dry_run=dry_run)
    if not dry_run:
        _note(dataset, config, found)
    _say(found, problems, shared, dry_run=dry_run, as_json=as_json)
    failed = any(_outcome(shard) == "failed" for held in found.values() for shard in held)
    if problems or failed:
        click.get_current_context().exit(1)


def _shards(dataset: str, config: Config, *, force: bool) -> tuple[list[ShardId], dict[str, int]]:
    """Return the shards to drop, and how many each other dataset has a share in, which stay."""
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
    wanted = set().union(*held.values())
    if place.version:
        chosen = resolved_version(catalog, place.name, place.version)
        wanted = held[chosen].difference(*(shards for version, shards in held.items() if version != chosen))
    others = [] if force else [other for other in catalog.names(lost=True) if other != place.name]
    shared = {other: found for other in others if (found := wanted & _held_by(catalog, other))}
    return sorted(wanted.difference(*shared.values())), {other: len(found) for other, found in shared.items()}


def _note(dataset: str, config: Config, found: Mapping[str, Sequence[cache_pb2.EvictedShard]]) -> None:
    """Keep what is left where, of each of the dataset's versions that something is known of."""
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.errors import DatasetMissingError, IndexFormatError
    from deeplink.path import DatasetPath
    from deeplink.residency_summary import note_dropped
    from deeplink.types import NodeName, ShardId

    name, catalog = DatasetPath.parse(dataset).name, Catalog(config.catalog)
    gone = {
        NodeName(node): {ShardId(shard.id) for shard in shards if _outcome(shard) == "gone"}
        for node, shards in found.items()
    }
    for version in catalog.versions(name):
        with suppress(DatasetMissingError, IndexFormatError):  # of one without an index nothing is kept
            note_dropped(config.catalog, name, catalog.open(name, version), gone)


def _held_by(catalog: Catalog, name: str) -> set[str]:
    """Return the shards of a dataset; of a version whose index is damaged, those on its record."""
    from deeplink.cache.errors import DatasetMissingError, IndexFormatError

    found: set[str] = set()
    for version in catalog.recorded(name):
        record = catalog.record(name, version)
        if record is not None and record.shard_ids:
            found.update(record.shard_ids)
            continue
        with suppress(DatasetMissingError, IndexFormatError):
            found.update(entry.id for entry in catalog.open(name, version).shards)
    return found


def _evicted(
    shards: Sequence[ShardId], to: PackTarget, *, force: bool, dry_run: bool
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
    from deeplink.cache.holding.recovery import ReplicaLookup
    from deeplink.cache.holding.shard_versions import KnownShards
    from deeplink.cache.membership import node_name
    from deeplink.cache.sources.bucket import SourceCap, TokenBucket
    from deeplink.cache.store import Store
    from deeplink.clock import SystemClock

    clock, node = SystemClock(), node_name(config)
    cap = SourceCap(TokenBucket(config.source_bytes_per_s, config.source_requests_per_s), clock)
    recovery = ReplicaLookup(node, "", KnownShards(Catalog(config.catalog), clock), cap, clock)
    store = Store(config.store, make=False)
    return node, list(evict(store, shards, recovery, clock, force=force, dry_run=dry_run).shards)


def _outcome(shard: cache_pb2.EvictedShard) -> str:
    from deeplink.v1 import cache_pb2

    return cache_pb2.EvictOutcome.Name(shard.outcome).removeprefix("EVICT_OUTCOME_").lower()


def _say(
    found: Mapping[str, Sequence[cache_pb2.EvictedShard]],
    problems: Sequence[str],
    shared: Mapping[str, int],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    import json

    from deeplink.text import counted, sized

    if as_json:
        nodes: dict[str, list[dict[str, Any]]] = {
            node: [
                {"shard": one.id, "outcome": outcome, "bytes": one.bytes, "problem": one.problem}
                for one in held
                if (outcome := "would go" if dry_run and _outcome(one) == "gone" else _outcome(one)) != "absent"
            ]
            for node, held in found.items()
        }
        facts = {"dry_run": dry_run, "nodes": nodes, "shared": dict(shared), "problems": list(problems)}
        click.echo(json.dumps(facts))
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
    for other, count in shared.items():
        click.echo(f"kept {counted(count, 'shard')} that {other} has too; --force drops what is shared")
    for problem in problems:
        click.echo(problem, err=True)
