"""`deeplink info`: all that is known of a dataset, a folder or a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deeplink.completion import PlaceType

if TYPE_CHECKING:
    from deeplink.cache.holding.residency import VersionResidency
    from deeplink.config import Config
    from deeplink.library import Library, PathEntry
    from deeplink.shard_inventory import Holdings

_EPILOG = """
Who holds what is counted from what this node's store and the configured members say; verified means that a node
has read all of a shard and found it right. `deeplink verify` reads everything.

\b
Examples:
  deeplink info mnist                        version, source, sizes, and where its shards are
  deeplink info mnist/train/7                a folder
  deeplink info mnist/train/7/00001.png      a sample: checksum, shard, block, offset, who owns and who holds it
  deeplink info --json mnist@3f2a91
"""


@click.command("info", epilog=_EPILOG)
@click.argument("place", type=PlaceType(), metavar="NAME[@VERSION][/PATH]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object of facts.")
def command(*, place: str, as_json: bool) -> None:
    """Tell all that is known of a dataset, folder or sample."""
    import json

    from deeplink.library import DatasetNotFoundError, Library
    from deeplink.path import stripped

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
        click.echo(json.dumps(facts))
    else:
        _say(facts)


def _holdings(config: Config) -> Holdings:
    from deeplink.clock import SystemClock
    from deeplink.shard_inventory import holdings

    return holdings(config, SystemClock())


def _dataset(library: Library, found: PathEntry) -> dict[str, Any]:
    from deeplink.cache.holding.residency import residency
    from deeplink.cache.ownership import standing

    config, index, name = library.config, found.reader.index, found.place.name
    held = _holdings(config)
    record = library.catalog.record(name, index.version)
    replicas = min(config.replicas, max(len(held.members), 1))
    where = residency(index, held.verified(), replicas=replicas, known=standing(held.members))
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
        "replicas": replicas,
        "index": str(index.path),
        "index_format": index.format,
        "cached_percent": round(where.percent, 1),
        "shards_with_all_copies": where.whole_shards,
        "nodes": _nodes(where, held),
    }


def _nodes(where: VersionResidency, held: Holdings) -> dict[str, Any]:
    return {
        node.node: {"shards": node.present, "verified": node.verified, "bytes": node.bytes}
        if node.answered
        else {"problem": held.problems[node.node]}
        for node in where.nodes
    }


def _folder(found: PathEntry) -> dict[str, Any]:
    index = found.reader.index
    rows = index.rows_below(found.place.inner)
    entries = found.entries()
    return {
        "path": str(found.place),
        "version": index.version,
        "folders": sum(1 for entry in entries if entry.is_folder),
        "samples_directly": sum(1 for entry in entries if not entry.is_folder),
        "samples": len(rows),
        "bytes": int(index.lengths[rows.start : rows.stop].sum()),
    }


def _sample(config: Config, found: PathEntry) -> dict[str, Any]:
    index, row = found.reader.index, found.entry.row
    held = _holdings(config)
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


def _say(facts: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    from deeplink.text import printable, sized

    for name, value in facts.items():
        label = name.replace("_", " ").removesuffix(" unix")
        if name == "nodes":
            _say_nodes(value)
        elif name == "packed_unix":
            when = datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds") if value else "unknown"
            click.echo(f"{label:<23}{when}")
        elif isinstance(value, list | dict):
            items = [f"{key}: {text}" for key, text in value.items()] if isinstance(value, dict) else value
            click.echo(f"{label:<23}{printable(', '.join(items)) or '-'}")
        elif name.endswith("bytes"):
            click.echo(f"{label:<23}{value:,} ({sized(value)})")
        else:
            click.echo(f"{label:<23}{f'{value:,}' if isinstance(value, int) else printable(str(value))}")


def _say_nodes(nodes: dict[str, Any]) -> None:
    from deeplink.text import counted, sized

    for name, node in nodes.items():
        if "problem" in node:
            click.echo(f"  {name}: {node['problem']}")
        else:
            shards = counted(node["shards"], "shard")
            click.echo(f"  {name}: {shards}, {sized(node['bytes'])}, {node['verified']:,} verified")
