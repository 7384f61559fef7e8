"""`deeplink ls`, `info`, `cat` and `get`: list the catalog and its datasets, and read their samples."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import PlaceType, flag, json_and_progress, json_option
from deeplink.cli.output import ShownProgress, print_json, warn, write_bytes
from deeplink.core.clock import SystemClock
from deeplink.core.config import explained_store
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, printable, sized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config
    from deeplink.fs.copy_out import CopyTask
    from deeplink.fs.library import Library, PathEntry, TreeEntry

_READ_AT_ONCE = 64
_SHOWN = 10

_LS_EPILOG = """
Without a place it lists the datasets. Folders end in a slash. A version may be cut short: mnist@3f2a91.

\b
Examples:
  deeplink ls                         datasets, their newest versions, how many samples and bytes
  deeplink ls mnist                   what is at its top
  deeplink ls -l mnist/train          with bytes; of folders, with what is below them
  deeplink ls -R mnist@3f2a91/test    everything below, in an older version
  deeplink ls --json mnist
"""
_INFO_EPILOG = """
This node's store and the configured members say which shards they hold; verified means that a node has read all of
a shard and found it right. `deeplink verify` reads everything.

\b
Examples:
  deeplink info mnist                        version, source, sizes, and where its shards are
  deeplink info mnist/train/7                a folder
  deeplink info mnist/train/7/00001.png      a sample: checksum, shard, block, offset, who owns and who holds it
  deeplink info --json mnist@3f2a91
"""
_CAT_EPILOG = """
The bytes are those that were packed: each sample is compared with its checksum when it is read.

\b
Examples:
  deeplink cat mnist/labels.csv | head
  deeplink cat mnist@3f2a91/train/7/00001.png > seven.png
  deeplink cat --json mnist/train/7/00001.png mnist/train/7/00002.png

\b
Exit codes: 0 done, 1 a sample cannot be read, 2 there is no such sample.
"""
_GET_EPILOG = """
As cp does: several places, or a DEST that is a folder or ends in a slash, go into that folder; one place becomes
DEST. A file appears whole or not at all; one that is there is replaced.

\b
Examples:
  deeplink get mnist/train/7/00001.png seven.png
  deeplink get mnist/train/7/00001.png mnist/train/7/00002.png pictures/
  deeplink get -r mnist/train/7 sevens            the whole folder
  deeplink get -r mnist@3f2a91 old --dry-run      what it would come to

\b
Exit codes: 0 done, 1 some samples could not be read (the others are there), 2 wrong usage.
"""


@click.command("ls", epilog=_LS_EPILOG)
@click.argument("place", type=PlaceType(), default="", metavar="[NAME[@VERSION][/PATH]]")
@flag("-l --long", "With bytes, and samples of folders.")
@flag("-R --recursive", "Everything below, by whole path.")
@json_option("Print one JSON array of facts.")
def ls(*, place: str, long: bool, recursive: bool, as_json: bool) -> None:
    """List datasets, folders and samples."""
    from deeplink.fs.library import Library, stripped

    library = Library()
    if not stripped(place):
        datasets = [_listed(library, name) for name in library.catalog.names(lost=True)]
        if as_json:
            print_json(datasets)
        elif datasets:
            _say_datasets(datasets)
        else:
            click.echo(f"no datasets in {library.config.catalog}; `deeplink pack SOURCE NAME` makes one", err=True)
        return
    found = library.at(place)
    if as_json:
        print_json([_entry(found, entry) for entry in _entries(found, recursive=recursive)])
        return
    for entry in _entries(found, recursive=recursive):
        name = printable(found.path_of(entry) if recursive else entry.path.rpartition("/")[2])
        name += "/" * entry.is_folder
        if long:
            facts = _entry(found, entry)
            below = counted(facts["samples"], "sample") if entry.is_folder else ""
            name = f"{sized(facts['bytes']):>10}  {below:>18}  {name}"
        click.echo(name)


def _listed(library: Library, name: str) -> dict[str, Any]:
    versions = library.catalog.versions(name)
    try:
        latest = library.catalog.latest(name)
        record = library.catalog.record(name, latest)
        if record is not None and library.catalog.path(name, latest).exists():
            samples, size = record.files, record.bytes
        else:
            index = library.at(name).reader.index
            samples, size = len(index), int(index.lengths.sum())
    except DeepLinkError as problem:  # one that is damaged must not hide the others
        return {"name": name, "versions": versions, "problem": str(problem), "remedy": problem.remedy}
    return {"name": name, "version": latest, "versions": versions, "samples": samples, "bytes": size}


def _say_datasets(datasets: list[dict[str, Any]]) -> None:
    wide = max(len(dataset["name"]) for dataset in datasets)
    for dataset in datasets:
        if "problem" in dataset:
            click.echo(f"{dataset['name']:<{wide}}  {dataset['problem']}")
            if dataset["remedy"]:
                click.echo(f"{'':<{wide}}  {dataset['remedy']}")
            continue
        count = len(dataset["versions"])
        more = f"  and {counted(count - 1, 'older version')}" if count > 1 else ""
        samples, size = counted(dataset["samples"], "sample"), sized(dataset["bytes"])
        click.echo(f"{dataset['name']:<{wide}}  {dataset['version'][:12]}  {samples:>18}  {size:>10}{more}")


def _entries(found: PathEntry, *, recursive: bool) -> Iterator[TreeEntry]:
    if recursive and found.entry.is_folder:
        yield from (entry for entry in found.below() if not entry.is_folder)
    else:
        yield from found.entries()


def _entry(found: PathEntry, entry: TreeEntry) -> dict[str, Any]:
    index, path = found.reader.index, found.path_of(entry)
    if not entry.is_folder:
        checksum = f"{int(index.checksums[entry.row]):016x}"
        return {"path": path, "type": "sample", "bytes": int(index.lengths[entry.row]), "checksum": checksum}
    rows = index.rows_below(entry.path)
    size = int(index.lengths[rows.start : rows.stop].sum())
    return {"path": path, "type": "folder", "samples": len(rows), "bytes": size}


@click.command("info", epilog=_INFO_EPILOG)
@click.argument("place", type=PlaceType(), metavar="NAME[@VERSION][/PATH]")
@json_option("Print one JSON object of facts.")
def info(*, place: str, as_json: bool) -> None:
    """Show all that is known of a dataset, folder or sample."""
    from deeplink.fs.library import DatasetNotFoundError, Library, stripped

    if not stripped(place):
        raise DatasetNotFoundError("", "no dataset is named", "`deeplink ls` lists them.")
    library = Library()
    found = library.at(place)
    if not found.place.inner:
        facts = _dataset(library, found)
    elif found.entry.is_folder:
        facts = _folder(found)
    else:
        facts = _sample(library.config, found)
    if as_json:
        print_json(facts)
    else:
        _say_facts(facts)


def _dataset(library: Library, found: PathEntry) -> dict[str, Any]:
    from deeplink.ops.inventory import holdings

    index, name = found.reader.index, found.place.name
    held = holdings(library.config, SystemClock())
    record = library.catalog.record(name, index.version)
    where = held.residency(index, library.config.replicas)
    return {
        "name": name,
        "version": index.version,
        "versions": library.catalog.versions(name),
        "source": index.source,
        "packed_unix": record.packed_unix if record else None,
        "samples": len(index),
        "bytes": int(index.lengths.sum()),
        "folders": index.listing().folders,
        "shards": where.shards,
        "shard_bytes": where.bytes,
        "replicas": where.copies,
        "index": str(index.path),
        "index_format": index.format,
        "store": str(library.config.store),
        "store_why": explained_store().why,
        "home": index.home or "none",
        **_home_facts(index),
        "cached_percent": round(where.percent, 1),
        "shards_with_all_copies": where.whole_shards,
        "nodes": {
            node.node: {"shards": node.present, "verified": node.verified, "bytes": node.bytes}
            if node.answered
            else {"problem": held.problems[node.node]}
            for node in where.nodes
        },
    }


def _home_facts(index: Index) -> dict[str, Any]:
    """Return how many of a version's shards its packed home has; nothing where it has no home."""
    from deeplink.cache.errors import HomeError
    from deeplink.cache.source.home import open_home

    if not index.home:
        return {}
    try:
        lacking = open_home(index.home).lacking([(entry.id, entry.bytes) for entry in index.shards])
    except HomeError as problem:
        return {"home_problem": str(problem)}
    return {"home_shards": len(index.shards) - len(lacking)}


def _folder(found: PathEntry) -> dict[str, Any]:
    index, entries = found.reader.index, found.entries()
    rows = index.rows_below(found.place.inner)
    return {
        "path": str(found.place),
        "version": index.version,
        "folders": sum(entry.is_folder for entry in entries),
        "samples_directly": sum(not entry.is_folder for entry in entries),
        "samples": len(rows),
        "bytes": int(index.lengths[rows.start : rows.stop].sum()),
    }


def _sample(config: Config, found: PathEntry) -> dict[str, Any]:
    from deeplink.ops.inventory import holdings

    index, row = found.reader.index, found.entry.row
    held = holdings(config, SystemClock())
    shard = index.shards[int(index.shard[row])].id
    return {
        "path": str(found.place),
        "version": index.version,
        "row": row,
        "bytes": found.bytes,
        "checksum": f"{found.checksum:016x}",
        "shard": shard,
        "block": int(index.block[row]),
        "offset": int(index.offset[row]),
        "pieces": len(index.pieces(row)),
        "owners": list(held.owners(shard, config.replicas)),
        "holders": held.holders(shard),
        "unanswered": dict(held.problems),
    }


def _say_facts(facts: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    for name, value in facts.items():
        if name == "nodes":
            _say_nodes(value)
            continue
        if name == "packed_unix":
            text = datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds") if value else "unknown"
        elif isinstance(value, list | dict):
            items = [f"{key}: {text}" for key, text in value.items()] if isinstance(value, dict) else value
            text = printable(", ".join(items)) or "-"
        elif name.endswith("bytes"):
            text = f"{value:,} ({sized(value)})"
        else:
            text = f"{value:,}" if isinstance(value, int) else printable(str(value))
        click.echo(f"{name.replace('_', ' ').removesuffix(' unix'):<23}{text}")


def _say_nodes(nodes: dict[str, Any]) -> None:
    for name, node in nodes.items():
        if "problem" in node:
            click.echo(f"  {name}: {node['problem']}")
        else:
            shards = counted(node["shards"], "shard")
            click.echo(f"  {name}: {shards}, {sized(node['bytes'])}, {node['verified']:,} verified")


@click.command("cat", epilog=_CAT_EPILOG)
@click.argument("places", type=PlaceType(), nargs=-1, required=True, metavar="NAME[@VERSION]/PATH...")
@json_option("One JSON object per line: path, bytes, checksum, base64.")
def cat(*, places: tuple[str, ...], as_json: bool) -> None:
    """Write samples to standard output, one after another."""
    from deeplink.fs.library import IsFolderError, Library

    library = Library()
    for place in places:  # a wrong path is an error before anything is written
        if library.at(place).entry.is_folder:
            raise IsFolderError(place)
    for start in range(0, len(places), _READ_AT_ONCE):
        some = places[start : start + _READ_AT_ONCE]
        read = library.read(some)
        for place in some:
            data: bytes | memoryview = read[place]
            if as_json:
                found = library.at(place)
                facts = {"path": str(found.place), "bytes": found.bytes, "checksum": f"{found.checksum:016x}"}
                data = json.dumps({**facts, "base64": base64.b64encode(data).decode()}).encode() + b"\n"
            write_bytes([data])


@click.command("get", epilog=_GET_EPILOG)
@click.argument("places", type=PlaceType(), nargs=-1, required=True, metavar="NAME[@VERSION][/PATH]...")
@click.argument("dest", type=click.Path())
@flag("-r --recursive", "Folders, with all that is below them.")
@flag("--dry-run", "Say what would be written; write nothing.")
@json_and_progress
def get(*, places: tuple[str, ...], dest: str, recursive: bool, dry_run: bool, as_json: bool) -> int:
    """Copy samples into local files."""
    from deeplink.fs.copy_out import fetch, planned
    from deeplink.fs.library import Library

    if not dest:
        raise click.UsageError("DEST is empty: name a file or a folder")
    tasks = planned(Library(), places, dest, recursive=recursive)
    if dry_run:
        _say_plan(tasks, as_json=as_json)
        return 0
    with ShownProgress("copying", "samples", len(tasks)) as progress:
        failed = [(task, str(problem)) for task, problem in fetch(tasks, progress=progress.add)]
    files = len(tasks) - len(failed)
    size = sum(task.bytes for task in tasks) - sum(task.bytes for task, _ in failed)
    if as_json:
        print_json({"files": files, "bytes": size, "failed": {task.path: problem for task, problem in failed}})
    else:
        click.echo(f"{counted(files, 'file')}, {sized(size)}")
        for _, problem in failed[:_SHOWN]:
            warn(problem)
        if failed:
            warn(f"{counted(len(failed), 'sample')} could not be read")
    return 1 if failed else 0


def _say_plan(tasks: list[CopyTask], *, as_json: bool) -> None:
    size = sum(task.bytes for task in tasks)
    if as_json:
        targets = {str(task.target): task.path for task in tasks}
        print_json({"files": len(tasks), "bytes": size, "targets": targets})
        return
    click.echo(f"would write {counted(len(tasks), 'file')}, {sized(size)}")
    for task in tasks[:_SHOWN]:
        click.echo(printable(f"  {sized(task.bytes):>10}  {task.path} -> {task.target}"))
    if len(tasks) > _SHOWN:
        click.echo(f"  ... and {len(tasks) - _SHOWN:,} more")
