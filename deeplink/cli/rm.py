"""`deeplink rm`: remove a dataset from the catalog and from SSDs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import PlaceType, dataset_named, flag, json_option, where_options
from deeplink.cli.output import print_json
from deeplink.core.text import counted, sized

if TYPE_CHECKING:
    from deeplink.cli.options import StoreOptions
    from deeplink.ops.removal import Removed

_SHOWN = 5


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
@click.argument("dataset", metavar="NAME[@VERSION]", type=PlaceType())
@where_options
@flag("--dry-run", "Say what would be removed; change nothing.")
@json_option()
def command(*, dataset: str, where: StoreOptions, dry_run: bool, as_json: bool) -> int:
    """Remove a dataset from the catalog, and its shards from the nodes' SSDs."""
    from deeplink.cache.catalog import Catalog
    from deeplink.ops.removal import remove_dataset

    config, place = where.config(), dataset_named(dataset)
    catalog = Catalog(config.catalog)
    catalog.resolved(place.name, place.version)  # before agents are started for nothing
    with where.target(config) as to:
        found = remove_dataset(catalog, place, to, dry_run=dry_run)
    if as_json:
        print_json({**dataclasses.asdict(found), "dry_run": dry_run})
    else:
        _say(found, dry_run=dry_run)
    return int(bool(found.kept))


def _say(found: Removed, *, dry_run: bool) -> None:
    would = "would be removed" if dry_run else "removed"
    what = counted(len(found.versions), "version")
    click.echo(f"{found.name}: {would}: {what}, {counted(found.shards, 'shard')} on nodes, {sized(found.bytes)}")
    for other, count in found.shared.items():
        click.echo(f"kept {counted(count, 'shard')} that {other} has too")
    if found.home:
        click.echo(f"its packed home {found.home} stays as it is")
    for copy, why in list(found.kept.items())[:_SHOWN]:
        click.echo(f"kept {copy}: {why}", err=True)
    if len(found.kept) > _SHOWN:
        click.echo(f"and {len(found.kept) - _SHOWN} more", err=True)
