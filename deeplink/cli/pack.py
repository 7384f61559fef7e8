"""`deeplink pack`: make a dataset of a folder of small files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.cache.packer import PackProgress, PackResult
    from deeplink.cache.packing.plan import PackPlan
    from deeplink.cache.packing.verifying import ReadBack
    from deeplink.cache.sources.origin import Listing
    from deeplink.config import Config
    from deeplink.pack_target import PackTarget

_LEAST = 4 << 10
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_EPILOG = """
SOURCE is a folder or any fsspec URL (s3://bucket/prefix, gs://, http://, zip:// ...). Each file becomes a sample
whose key is its path below SOURCE. NAME then points at the new version; jobs that read an older one go on with it.
After an interruption the same command goes on where it stopped; with nothing changed it places missing copies.
Onto several nodes a small dataset goes in small shards, so that each node gets at least about four, and the nodes
read and pack their share themselves where they reach SOURCE as this one does.

With --append the new version shares every shard whose files are as they were; files were added, changed or removed
at SOURCE. With --home each shard and the index are kept on shared or object storage besides, whence a node that
lost its SSD gets them back. --verify reads every copy back from the disk it lies on.

\b
Examples:
  deeplink pack /data/imagenet imagenet                     into this node's store
  salloc -N4 deeplink pack /data/imagenet imagenet          onto the SSDs of four nodes, two copies each
  deeplink pack /data/imagenet imagenet --members n0=10.0.0.1:7411,n1=10.0.0.2:7411 --replicas 2
  deeplink pack s3://bucket/tiles tiles --shard-size 64M
  deeplink pack 'zip://::/data/tiles.zip' tiles             the files in an archive
  deeplink pack /data/imagenet imagenet --append            after files were added
  deeplink pack /data/imagenet imagenet --home s3://bucket/packed --verify
  deeplink pack /data/imagenet imagenet --dry-run           what it would come to

\b
Exit codes: 0 done, 1 failed (what was sealed is kept for the next try) or --verify found something wrong, 2 wrong
usage or unusable source.
"""


class _Size(click.ParamType[int]):
    """A number of bytes: 268435456, 256M, 1G."""

    name = "size"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).upper().removesuffix("B").removesuffix("I")
        number, unit = (text[:-1], text[-1]) if text[-1:] in {"K", "M", "G"} else (text, "")
        if not (number.isascii() and number.isdigit()) or not int(number):
            self.fail(f"{value!r} is not a size such as 256M", param, ctx)
        if (size := int(number) * _UNITS[unit]) < _LEAST:
            self.fail(f"{value!r} is too small: 4K is the least", param, ctx)
        return size


@click.command("pack", epilog=_EPILOG)
@click.argument("source")
@click.argument("name")
@click.option(
    "--members", metavar="NAME=HOST:PORT,...", help="Agents to place shards on. [default: config members]"
)
@click.option("--replicas", type=click.IntRange(1), help="Copies of each shard. [default: config replicas]")
@click.option("--shard-size", type=_Size(), help="Most bytes of samples in a shard. [default: config shard_bytes]")
@click.option("--here", is_flag=True, help="Into this node's store alone, also inside an allocation.")
@click.option(
    "--local", type=click.IntRange(min=1), metavar="N", help="Onto the N nodes of `deeplink run --local N`."
)
@click.option("--append", is_flag=True, help="Share with the newest version the shards whose files are unchanged.")
@click.option(
    "--home", metavar="URL", default="", help="Folder or URL to keep each shard and the index in besides."
)
@click.option("--verify", is_flag=True, help="Then read every copy back where it lies, and compare its bytes.")
@click.option("--dry-run", is_flag=True, help="List the source and say what would be packed; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to standard error.")
def command(  # noqa: PLR0913 - one for each option
    *,
    source: str,
    name: str,
    members: str | None,
    replicas: int | None,
    shard_size: int | None,
    here: bool,
    local: int | None,
    append: bool,
    home: str,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pack a folder of small files into shards.

    The files below SOURCE become dataset NAME. Inside a Slurm allocation of several nodes (`salloc -N4 deeplink
    pack ...`) the shards go onto the nodes' own SSDs; else to the configured members, or into this node's store.
    """
    import dataclasses

    from deeplink.cache.catalog import checked_name
    from deeplink.cache.packer import check_pack, pack, plan_pack
    from deeplink.cli.topology_site import site_of
    from deeplink.config import load_config
    from deeplink.pack_target import member_count, target

    given: dict[str, Any] = {"members": members, "replicas": replicas, "shard_bytes": shard_size}
    config = dataclasses.replace(
        load_config(), **{key: value for key, value in given.items() if value is not None}
    )
    checked_name(name)
    if here and members:
        raise click.UsageError("--here and --members exclude each other")
    if dry_run:
        count = member_count(config, local=local or 0, here=here)
        planned = plan_pack(source, name, config=config, members=count, append=append)
        _say_plan(planned, source, name, as_json=as_json)
        return
    check_pack(source, name, config=config, append=append, home=home)
    with target(config, local=local or 0, here=here, site_of=site_of) as to:
        with _shown_progress() as progress:
            options: dict[str, Any] = {"members": to.members, "token": to.token, "append": append, "home": home}
            result = pack(source, name, config=to.config, progress=progress, **options)
        found = _verified(result, to) if verify else None
        nodes = len(to.members) or 1
    _note(result, config)
    if replicas is not None and replicas > nodes:
        click.echo(f"--replicas {replicas}: there can be {nodes} of each shard, one for each node", err=True)
    _say_result(result, found, as_json=as_json)
    if found is not None and found.problems:
        raise SystemExit(1)


def _note(result: PackResult, config: Config) -> None:
    from deeplink.cache.catalog import Catalog
    from deeplink.residency_summary import note_placed

    index = Catalog(config.catalog).open(result.name, result.version)
    note_placed(config.catalog, result.name, index, result.placed)


def _verified(result: PackResult, to: PackTarget) -> ReadBack:
    from deeplink.cache.catalog import Catalog
    from deeplink.cache.membership import node_name
    from deeplink.cache.packing.verifying import verify_copies
    from deeplink.cache.store import Store

    index = Catalog(to.config.catalog).open(result.name, result.version)
    return verify_copies(
        index,
        result.placed,
        store=Store(to.config.store),
        node=node_name(to.config),
        members=to.members,
        token=to.token,
    )


def _say_plan(planned: tuple[Listing, PackPlan, int], source: str, name: str, *, as_json: bool) -> None:
    import json

    from deeplink.text import counted

    listing, plan, there = planned
    sizes = [shard.payload for shard in plan.shards]
    facts: dict[str, Any] = {
        "name": name,
        "source": source,
        "files": len(listing),
        "bytes": sum(sizes),
        "shards": len(sizes),
        "shard_bytes": sizes,
        "shards_there": there,
        "first": listing.keys[0],
        "last": listing.keys[-1],
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    files, shards = counted(len(listing), "file"), counted(len(sizes), "shard")
    click.echo(f"would pack {files}, {_size(sum(sizes))}, into {shards} as {name}")
    if there:
        click.echo(f"{counted(there, 'shard')} of them are there already")
    click.echo(f"from {listing.keys[0]!r} to {listing.keys[-1]!r}")
    for shard in plan.shards[:10]:
        click.echo(f"  {shard.stop - shard.start:>9,} files  {_size(shard.payload)}")
    if len(plan.shards) > 10:  # noqa: PLR2004 - as many as a screen takes
        click.echo(f"  ... and {len(plan.shards) - 10} more")


def _say_result(result: PackResult, found: ReadBack | None, *, as_json: bool) -> None:
    import dataclasses
    import json

    from deeplink.text import counted

    if as_json:
        said = {"verified": dataclasses.asdict(found)} if found else {}
        click.echo(json.dumps(dataclasses.asdict(result) | said))
        return
    if result.unchanged:
        click.echo(f"{result.name}: nothing has changed since version {result.version}")
    else:
        files, rate = counted(result.files, "file"), result.read_files / max(result.seconds, 1e-9)
        click.echo(
            f"{result.name}: {files}, {_size(result.bytes)}, in {counted(result.shards, 'shard')}; "
            f"{result.read_files:,} read in {result.seconds:.1f} s ({rate:,.0f} files/s)"
        )
        click.echo(f"version {result.version}")
    counts: dict[str, int] = {}
    for holders in result.placed.values():
        for node in holders:
            counts[node] = counts.get(node, 0) + 1
    click.echo("shards per node: " + ", ".join(f"{node} {count}" for node, count in sorted(counts.items())))
    if result.short:
        click.echo(
            f"fewer copies than wanted of {counted(result.short, 'shard')}; run the command again to place them",
            err=True,
        )
    if found is not None:
        copies = "copy" if found.copies == 1 else "copies"
        click.echo(f"read back {found.copies:,} {copies} of shards, {_size(found.bytes)}")
        for problem in found.problems:
            click.echo(f"wrong: {problem}", err=True)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:,.1f} {unit}" if unit != "B" else f"{count:,.0f} B"
        count /= 1024
    return f"{count:,.1f} TiB"


@contextmanager
def _shown_progress() -> Iterator[Callable[[PackProgress], None]]:
    """Give what shows progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""
    import sys

    if sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _lines()


def _lines() -> Callable[[PackProgress], None]:
    from deeplink.clock import SystemClock

    clock = SystemClock()
    every_s = 5.0
    began = last = clock.monotonic()

    def show(progress: PackProgress) -> None:
        nonlocal last
        now = clock.monotonic()
        if now - last < every_s:
            return
        last = now
        rate, speed = progress.files / (now - began), progress.bytes / (now - began)
        left_s = (progress.total_bytes - progress.bytes) / speed if speed > 0 else 0.0
        click.echo(
            f"{progress.files:,} of {progress.total_files:,} files, {_size(progress.bytes)}, {rate:,.0f} files/s, "
            f"{speed / 1e6:,.0f} MB/s, {progress.shards} of {progress.total_shards} shards, {left_s:,.0f} s left",
            err=True,
        )

    return show


@contextmanager
def _bar() -> Iterator[Callable[[PackProgress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("packing"),
        BarColumn(),
        TextColumn("{task.fields[files]:,}/{task.fields[total_files]:,} files"),
        TextColumn("{task.fields[rate]:,.0f} files/s"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pack", total=None, files=0, total_files=0, rate=0.0)

        def show(progress: PackProgress) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            # An empty file counts as a byte, so that a source of empty files has a bar too.
            bar.update(
                task,
                total=progress.total_bytes + progress.total_files,
                completed=progress.bytes + progress.files,
                files=progress.files,
                total_files=progress.total_files,
                rate=progress.files / elapsed if elapsed else 0.0,
            )

        yield show
