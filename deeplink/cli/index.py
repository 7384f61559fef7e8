"""`deeplink index`: look at the indexes in the catalog, check them, and make a lost one again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import (
    DatasetType,
    dataset_argument,
    flag,
    json_and_progress,
    json_option,
    members_option,
    option,
)
from deeplink.cli.output import ShownProgress, moment, print_facts, print_json, warn
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, printable, sized

if TYPE_CHECKING:
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.format.index import Index
    from deeplink.core.types import Version
    from deeplink.fs.library import DatasetPath

_EPILOG = """
A dataset's version is one index file in the catalog. NAME alone means the newest version; of a version the first
digits are enough.

\b
Examples:
  deeplink index show imagenet                   what is in it
  deeplink index verify imagenet                 read all of it and compare its digest
  deeplink index rebuild imagenet@3f2a           make a lost or damaged one again, from its shards
  deeplink index merge imagenet                  publish what was packed in parts
  deeplink index rm imagenet@3f2a                take an old version out of the catalog
"""
_SHOWN = 20


@click.group("index", epilog=_EPILOG)
def command() -> None:
    """Show, verify, rebuild, merge or remove the index of a dataset's version."""


def _catalog() -> Catalog:
    from deeplink.cache.catalog import Catalog

    return Catalog(load_config().catalog)


def _found(catalog: Catalog, dataset: DatasetPath) -> tuple[str, Version]:
    return dataset.name, catalog.resolved(dataset.name, dataset.version)


@command.command(
    "show",
    epilog="""\b
Examples:
  deeplink index show imagenet
  deeplink index show imagenet@3f2a --json | jq .samples
""",
)
@dataset_argument
@json_option("Print it as JSON.")
def show(*, dataset: DatasetPath, as_json: bool) -> None:
    """Show what a version is made of."""
    catalog = _catalog()
    name, version = _found(catalog, dataset)
    facts = _facts(catalog, name, catalog.open(name, version))
    if as_json:
        print_json(facts)
    else:
        _say(facts)


def _facts(catalog: Catalog, name: str, index: Index) -> dict[str, Any]:
    top = index.listing()
    record = catalog.record(name, index.version)
    shards = list(index.shards)
    return {
        "name": name,
        "version": index.version,
        "format": index.format,
        "source": index.source,
        "samples": len(index),
        "bytes": int(index.lengths.sum()),
        "index_bytes": index.path.stat().st_size,
        "index_file": str(index.path),
        "shards": len(shards),
        "shard_bytes": sum(entry.bytes for entry in shards),
        "packed_unix": record.packed_unix if record else None,
        "versions": catalog.versions(name),
        "folders": {folder: len(index.rows_below(folder)) for folder in top.folders},
        "samples_at_top": len(top.rows),
    }


def _say(facts: dict[str, Any]) -> None:
    click.echo(facts["name"])
    lines = [
        ("version", f"{facts['version']} ({counted(len(facts['versions']), 'version')} in all)"),
        ("packed", moment(facts["packed_unix"], "not on record")),
        ("source", facts["source"]),
        ("samples", f"{facts['samples']:,}, {sized(facts['bytes'])}"),
        ("shards", f"{facts['shards']:,}, {sized(facts['shard_bytes'])}"),
        ("index", f"{sized(facts['index_bytes'])}, format {facts['format']}, {facts['index_file']}"),
    ]
    print_facts(lines, 10)
    folders = facts["folders"]
    at_top = f"{counted(len(folders), 'folder')}, {counted(facts['samples_at_top'], 'sample')}"
    click.echo(f"  {'at its top:':10} {at_top}")
    for folder in list(folders)[:_SHOWN]:
        click.echo(printable(f"  {folders[folder]:>12,}  {folder}/"))
    if len(folders) > _SHOWN:
        click.echo(f"  {'...':>12}  and {len(folders) - _SHOWN} more")


@command.command(
    "verify",
    epilog="""\b
Examples:
  deeplink index verify imagenet
  deeplink index verify imagenet --all --json      every version of it

\b
Exit codes: 0 whole, 1 damaged, 2 there is no such version.
""",
)
@dataset_argument
@flag("--all", "Every version of the dataset.", name="every")
@json_option()
def verify(*, dataset: DatasetPath, every: bool, as_json: bool) -> int:
    """Read all of an index and compare its digest with the version it is named by."""
    catalog = _catalog()
    name, newest = _found(catalog, dataset)
    found: dict[str, str] = {}
    for version in catalog.versions(name) if every else [newest]:
        try:
            catalog.open(name, version).verify()
            found[version] = ""
        except DeepLinkError as damage:
            found[version] = str(damage)
    if as_json:
        print_json({"name": name, "versions": [{"version": v, "problem": p} for v, p in found.items()]})
    else:
        for each, problem in found.items():
            click.echo(f"{name}@{each}: {problem or 'whole'}")
        if any(found.values()):
            click.echo("`deeplink index rebuild NAME@VERSION` makes an index again from its shards", err=True)
    return int(any(found.values()))


@command.command(
    "rebuild",
    epilog="""
Each shard lists its own samples, so an index can be made of shards alone. Which shards a version had is in its
record beside the index; where that is lost too, and the index cannot say it, name them, or take all there are.
What comes out is, byte for byte, the index that was lost, or it is refused (--as-new publishes it all the same).

\b
Examples:
  deeplink index rebuild imagenet                                of shards in this node's store or at members
  deeplink index rebuild imagenet@3f2a --from /ssd/deeplink --from /scratch/home
  deeplink index rebuild imagenet --members n0=10.0.0.1:7411,n1=10.0.0.2:7411
  deeplink index rebuild imagenet --all --from /ssd/deeplink --source /data/imagenet --as-new
  deeplink index rebuild imagenet --dry-run                      what would come out

\b
Exit codes: 0 done, 1 shards are missing or it is another version, 2 wrong usage.
""",
)
@dataset_argument
@option(
    "--from FOLDER",
    "Folder with shards' files; may be repeated. [default: config store]",
    name="folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@members_option
@option("--shard ID", "Of these shards, in this order.", name="shards", multiple=True)
@flag("--all", "Of all shards that are found.", name="every")
@option("--source URL", "Where the small files are. [default: what is on record]")
@option("--home URL", "Where the shards are kept besides. [default: what is on record]")
@flag("--as-new", "Publish it as the newest version, whatever it is.")
@flag("--dry-run", "Say what would come out; change nothing.")
@json_and_progress
def rebuild(
    *,
    dataset: DatasetPath,
    folders: tuple[Path, ...],
    members: str | None,
    shards: tuple[str, ...],
    every: bool,
    source: str | None,
    home: str | None,
    as_new: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a lost or damaged index again from its shards."""
    from deeplink.cache.format.block import checked_shard_id
    from deeplink.cache.membership import configured_members, members_token
    from deeplink.cache.pack.rebuild_index import ReindexRequest, ShardFinder, rebuild_index

    if every and shards:
        raise click.UsageError("--all and --shard exclude each other")
    config, catalog = load_config(), _catalog()
    config = config if members is None else dataclasses.replace(config, members=members)
    name, version = _lost(catalog, dataset, named=every or bool(shards or source))
    wanted = ReindexRequest(
        name=name,
        version=version,
        shards=[checked_shard_id(shard) for shard in shards],
        every=every,
        source=source or "",
        home=home,
        as_new=as_new,
    )
    asked = configured_members(config)
    with (
        ShardFinder(folders or (config.store,), asked, members_token(config, asked)) as finder,
        ShownProgress("reading", "shards") as progress,
    ):
        done = rebuild_index(catalog, wanted, finder, SystemClock(), progress=progress.at, dry_run=dry_run)
    if as_json:
        print_json(dataclasses.asdict(done) | {"dry_run": dry_run})
        return
    made = "made again, byte for byte as it was" if done.restored else "made as a new version"
    click.echo(
        f"{done.name}@{done.version} {'would be' if dry_run else 'is'} {made}: "
        f"{counted(done.samples, 'sample')}, {sized(done.bytes)}, in {counted(done.shards, 'shard')}"
    )


def _lost(catalog: Catalog, dataset: DatasetPath, *, named: bool) -> tuple[str, Version | None]:
    """Return name and version that are meant, though the index or the pointer to it may be lost.

    Of a dataset that nothing is left of, the shards must be `named`.
    """
    from deeplink.cache.catalog import ambiguous_version
    from deeplink.cache.errors import DatasetMissingError, IndexFormatError

    known = catalog.recorded(dataset.name)
    if dataset.version:
        found = [version for version in known if version.startswith(dataset.version)]
        if len(found) > 1:
            raise ambiguous_version(dataset.name, dataset.version, found)
        if not found:
            raise catalog.missing(dataset.name, dataset.version, known)
        return dataset.name, found[0]
    if not known and not named:
        raise catalog.missing(dataset.name)
    try:
        return dataset.name, catalog.latest(dataset.name)
    except (DatasetMissingError, IndexFormatError):
        # One version there is: that one. Of several, which was the newest is lost with the pointer.
        return dataset.name, known[0] if len(known) == 1 else None


@command.command(
    "merge",
    epilog="""
Each part is the index of a run of shards, as `deeplink pack SOURCE NAME --part I/N` left it in the catalog. All N
must be there, of one listing of SOURCE and with the same settings. What comes out is, byte for byte, what one
packer would have made; the parts are removed then.

\b
Examples:
  sbatch --array=1-64 --wrap 'deeplink pack /data/imagenet imagenet --part $SLURM_ARRAY_TASK_ID/64'
  deeplink index merge imagenet

\b
Exit codes: 0 published, 1 parts are missing or do not fit together, 2 there is no part.
""",
)
@click.argument("dataset", metavar="NAME")
@json_option()
def merge(*, dataset: str, as_json: bool) -> None:
    """Publish the version whose parts were packed one by one."""
    from deeplink.cache.catalog import checked_name
    from deeplink.cache.pack.parts import merge_parts
    from deeplink.ops.inventory import note_placed

    catalog = _catalog()
    merged = merge_parts(catalog, checked_name(dataset))
    note_placed(catalog.root, dataset, catalog.open(dataset, merged.version), merged.placed)
    record = merged.record
    if as_json:
        facts = {"files": record.files, "bytes": record.bytes, "shards": record.shards, "parts": merged.parts}
        print_json({"name": dataset, "version": merged.version, **facts})
        return
    made = f"{counted(record.files, 'file')}, {sized(record.bytes)}, in {counted(record.shards, 'shard')}"
    click.echo(f"{dataset}: {made}, of {counted(merged.parts, 'part')}")
    click.echo(f"version {merged.version}")


@command.command(
    "rm",
    epilog="""
Jobs that read the version go on reading it. The file stays in the catalog under a hidden name for a week, because
on a network file system a job on another node would be killed if it were gone; --now frees its space at once.
Shards stay where they are on the nodes (`deeplink evict` drops those that nothing needs). From the packed home
beside the catalog those go that no other version has; another home is left as it is.

\b
Examples:
  deeplink index rm imagenet@3f2a
  deeplink index rm imagenet@3f2a --dry-run
""",
)
@click.argument("dataset", metavar="NAME@VERSION", type=DatasetType())
@flag("--now", "Free its space at once; no job may be reading it.")
@flag("--dry-run", "Say what would be removed; change nothing.")
@json_option()
def remove(*, dataset: DatasetPath, now: bool, dry_run: bool, as_json: bool) -> None:
    """Take a version out of the catalog; not the newest, unless it is the only one."""
    from deeplink.ops.inventory import orphans, remove_at_home

    if not dataset.version:
        raise click.UsageError("name the version: NAME@VERSION")
    catalog = _catalog()
    name, version = _found(catalog, dataset)
    catalog.check_removable(name, version)
    home, gone = "", list[str]()
    try:
        home, gone = orphans(catalog, name, version)
    except DeepLinkError as problem:  # a damaged index can be removed, too
        warn(f"what it has in its packed home stays there: {problem}")
    if not dry_run:
        catalog.remove(name, version, now=now)
        if home:
            remove_at_home(home, name, version, gone)
    if as_json:
        print_json({"name": name, "version": version, "removed": not dry_run, "home_shards": len(gone)})
    else:
        be = "would be" if dry_run else "is"
        click.echo(f"{name}@{version} {be} removed from the catalog")
        if gone:
            click.echo(f"{counted(len(gone), 'shard')} that no other version has {be} removed from {home}")
