"""`deeplink ls`: what is in the catalog and in its datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deeplink.completion import PlaceType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.library import Library, PathEntry
    from deeplink.tree import TreeEntry

_EPILOG = """
Without a place it lists the datasets. Folders end in a slash. A version may be cut short: mnist@3f2a91.

\b
Examples:
  deeplink ls                         datasets, their newest versions, how many samples and bytes
  deeplink ls mnist                   what is at its top
  deeplink ls -l mnist/train          with bytes; of folders, with what is below them
  deeplink ls -R mnist@3f2a91/test    everything below, in an older version
  deeplink ls --json mnist
"""


@click.command("ls", epilog=_EPILOG)
@click.argument("place", type=PlaceType(), default="", metavar="[NAME[@VERSION][/PATH]]")
@click.option("-l", "--long", is_flag=True, help="With bytes, and samples of folders.")
@click.option("-R", "--recursive", is_flag=True, help="Everything below, by whole path.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array of facts.")
def command(*, place: str, long: bool, recursive: bool, as_json: bool) -> None:
    """List datasets, folders and samples."""
    import json

    from deeplink.library import Library
    from deeplink.path import stripped

    library = Library()
    if not stripped(place):
        datasets = [_dataset(library, name) for name in library.catalog.names(lost=True)]
        if as_json:
            click.echo(json.dumps(datasets))
        elif datasets:
            _say_datasets(datasets)
        else:
            click.echo(f"no datasets in {library.config.catalog}; `deeplink pack SOURCE NAME` makes one", err=True)
        return
    found = library.at(place)
    if as_json:
        click.echo(json.dumps([_facts(found, entry) for entry in _entries(found, recursive=recursive)]))
        return
    for entry in _entries(found, recursive=recursive):
        click.echo(_line(found, entry, long=long, whole=recursive))


def _dataset(library: Library, name: str) -> dict[str, Any]:
    from deeplink.errors import DeepLinkError

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
    from deeplink.text import counted, sized

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


def _facts(found: PathEntry, entry: TreeEntry) -> dict[str, Any]:
    index = found.reader.index
    path = found.path_of(entry)
    if not entry.is_folder:
        checksum = f"{int(index.checksums[entry.row]):016x}"
        return {"path": path, "type": "sample", "bytes": int(index.lengths[entry.row]), "checksum": checksum}
    rows = index.rows_below(entry.path)
    size = int(index.lengths[rows.start : rows.stop].sum())
    return {"path": path, "type": "folder", "samples": len(rows), "bytes": size}


def _line(found: PathEntry, entry: TreeEntry, *, long: bool, whole: bool) -> str:
    from deeplink.text import counted, printable, sized

    name = printable(found.path_of(entry) if whole else entry.path.rpartition("/")[2])
    name += "/" if entry.is_folder else ""
    if not long:
        return name
    facts = _facts(found, entry)
    below = counted(facts["samples"], "sample") if entry.is_folder else ""
    return f"{sized(facts['bytes']):>10}  {below:>18}  {name}"
