"""`deeplink pack`: make a dataset of small files."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from deeplink.cli.options import flag, grouped, json_and_progress, option, where_and_replicas
from deeplink.cli.output import ShownProgress, print_json
from deeplink.core.text import counted, sized

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deeplink.cache.pack.parts import Part
    from deeplink.cache.pack.plan import PackPlan
    from deeplink.cache.pack.verifying import ReadBack
    from deeplink.cache.packer import PackResult
    from deeplink.cache.source.selection import Selection
    from deeplink.cache.source.source import Listing
    from deeplink.cli.options import StoreOptions
    from deeplink.ops.packing import HomeChoice

_SHOWN = 10
_SHOWN_BAD = 100
_LOOKED_AT = 1000
_MOST_PARTS = 10_000
_LEAST = 4 << 10
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_PACK_EPILOG = """
SOURCE is a folder or any fsspec URL (s3://bucket/prefix, http://, zip:// ...). Each file becomes a sample
whose key is its path below SOURCE. Or it names tars, parquet or Arrow files, one or many by globs and braces
(quote them): then what is in them becomes samples, a tar's files as WebDataset has them, a table's columns as the
parts ROW.COLUMN of each row. NAME then points at the new version; jobs that read an older one go on with it.
After an interruption the same command goes on where it stopped; with nothing changed it places missing copies.
Onto several nodes a small dataset goes in small shards, so that each node gets at least about four, and the nodes
read and pack their share themselves where they reach SOURCE as this one does.

Files of version control and desktops (.git, .DS_Store ...) are left out, and counted. A glob without a slash is
compared with each name, one with a slash with the path below SOURCE. Files that cannot be packed are named all at
once; with --skip-bad the others are packed.

With --append the new version shares every shard whose files are as they were; files were added, changed or removed
at SOURCE. --verify reads every copy back from the disk it lies on.

The packed home keeps each shard and the index once more on storage that all nodes reach. A node that never had the
data, or lost its SSD, then reads a few large files there in place of the many small ones. Where nodes share the
catalog (its file system is nfs, lustre, ... or the pack is in a Slurm job or onto agents of other hosts) the home
is the folder CATALOG.home beside it; it takes as much room there as the shards do. --no-home leaves it out.

\b
Examples:
  deeplink pack /data/imagenet imagenet                     into this node's store
  salloc -N4 deeplink pack /data/imagenet imagenet          onto the SSDs of four nodes, two copies each
  deeplink pack /data/imagenet imagenet --members n0=10.0.0.1:7411,n1=10.0.0.2:7411 --replicas 2
  deeplink pack s3://bucket/tiles tiles --shard-size 64M
  deeplink pack 'zip://::/data/tiles.zip' tiles             the files in an archive
  deeplink pack '/data/laion-{00000..00999}.tar' laion      the files in WebDataset's tars
  deeplink pack '/data/c4/*.parquet' c4 --key id --columns text     a column of tables
  deeplink pack /data/scans scans --include '*.dcm' --exclude drafts/ --skip-bad
  deeplink pack /data/imagenet imagenet --append            after files were added
  deeplink pack /data/imagenet imagenet --part $SLURM_ARRAY_TASK_ID/64     in an array of 64 tasks, then:
  deeplink index merge imagenet
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


@dataclasses.dataclass(frozen=True, slots=True)
class SourceOptions:
    """What of SOURCE becomes samples."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    default_excludes: bool
    follow_links: bool
    skip_bad: bool
    append: bool
    replace: bool
    key: str
    columns: str
    part: Part | None

    def url(self, source: str) -> str:
        """Return the source with the columns of its tables."""
        from deeplink.cache.source.opening import TABLES
        from deeplink.cache.source.tables import TableColumns

        columns = tuple(filter(None, self.columns.split(",")))
        if (self.key or columns) and not TABLES.fullmatch(source):
            raise click.UsageError("--key and --columns are for parquet and Arrow files")
        return TableColumns(self.key, columns).url(source)

    def selection(self) -> Selection:
        """Return which files are wanted."""
        from deeplink.cache.source.selection import Selection

        return Selection(
            include=self.include,
            exclude=self.exclude,
            default_excludes=self.default_excludes,
            follow_links=self.follow_links,
            skip_bad=self.skip_bad,
        )


class _PartType(click.ParamType["Part"]):
    """One of several parts: 3/8."""

    name = "part"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Part:
        from deeplink.cache.pack.parts import Part

        number, _, parts = str(value).partition("/")
        if not (number.isascii() and number.isdigit() and parts.isascii() and parts.isdigit()):
            self.fail(f"{value!r} is not I/N such as 3/8", param, ctx)
        if not 1 <= int(number) <= int(parts) <= _MOST_PARTS:
            self.fail(f"{value!r}: parts are numbered from 1 to N, {_MOST_PARTS:,} at most", param, ctx)
        array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
        if array:  # clusters that share a catalog number their jobs alike
            array = f"{os.environ.get('SLURM_CLUSTER_NAME', '')}:{array}"
        return Part(int(number), int(parts), array)


source_options = grouped(
    "chosen",
    SourceOptions,
    option(
        "--include GLOB",
        "Pack only what GLOB takes, files or folders with what is below; repeatable.",
        multiple=True,
    ),
    option("--exclude GLOB", "Leave out files and folders that GLOB takes; repeatable.", multiple=True),
    option(
        "--no-default-excludes",
        "Pack .git, .DS_Store and the like too.",
        name="default_excludes",
        is_flag=True,
        flag_value=False,
        default=True,
        show_default=False,
    ),
    flag("--follow-links", "Follow links out of SOURCE and links to folders."),
    flag("--skip-bad", "Leave out files that cannot be packed, and name them."),
    flag("--append", "Share with the newest version the shards whose files are unchanged."),
    flag("--replace", "Let NAME, whose newest version is of another source, be of this one from now on."),
    option("--key COLUMN", "Tables: the column with each row's key. [default: its number]", default=""),
    option("--columns A,B", "Tables: the columns to pack. [default: all others]", default=""),
    option(
        "--part I/N", "Make the shards of part I of N alone; `deeplink index merge` joins them.", type=_PartType()
    ),
)


@click.command("pack", epilog=_PACK_EPILOG)
@click.argument("source")
@click.argument("name")
@where_and_replicas
@source_options
@option("--shard-size", "Most bytes of samples in a shard. [default: config shard_bytes]", type=_Size())
@option("--home URL", "Folder or URL of the packed home. [default: config home]", default="")
@flag("--no-home", "Keep no packed home: nodes without the shards read the small files again.")
@flag("--verify", "Then read every copy back where it lies, and compare its bytes.")
@flag("--dry-run", "List the source and say what would be packed; write nothing.")
@json_and_progress
def command(
    *,
    source: str,
    name: str,
    where: StoreOptions,
    chosen: SourceOptions,
    shard_size: int | None,
    home: str,
    no_home: bool,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pack a folder of small files, or what is in tars and tables, into shards.

    The files below SOURCE become dataset NAME. Inside a Slurm allocation (`salloc -N4 deeplink
    pack ...`) the shards go onto the nodes' own SSDs; else to the configured members, or into this node's store.
    """
    from deeplink.cache.catalog import Catalog, checked_name
    from deeplink.cache.membership import node_name
    from deeplink.cache.pack.verifying import verify_copies
    from deeplink.cache.packer import check_pack, pack, plan_pack
    from deeplink.cache.store.store import Store
    from deeplink.ops.inventory import note_placed
    from deeplink.ops.packing import NONE, chosen_home, member_count

    config = where.config(shard_bytes=shard_size)
    source, wanted = chosen.url(source), chosen.selection()
    checked_name(name)
    if chosen.part is not None and (chosen.append or verify or dry_run):
        raise click.UsageError("--part goes with none of --append, --verify and --dry-run")
    if home and no_home:
        raise click.UsageError("--home and --no-home exclude each other")
    kept = chosen_home(config, NONE if no_home else home, local=where.local or 0, here=where.here)
    if dry_run:
        count = member_count(config, local=where.local or 0, here=where.here)
        planned = plan_pack(source, name, config=config, wanted=wanted, members=count, append=chosen.append)
        _say_plan(planned, source, name, kept, as_json=as_json)
        return
    check_pack(
        source,
        name,
        config=config,
        append=chosen.append,
        home=kept.url if kept.named else "",
        replace=chosen.replace,
    )
    kept = kept.made(config.catalog)
    with where.target(config) as to:
        click.echo(to.stores, err=as_json)
        click.echo(_home_line(kept), err=as_json)
        with ShownProgress("packing", "files") as progress:
            result = pack(
                source,
                name,
                config=to.config,
                wanted=wanted,
                members=to.members,
                token=to.token,
                append=chosen.append,
                home=kept.url,
                part=chosen.part,
                progress=lambda now: progress.at(now.files, now.total_files, now.bytes, now.total_bytes),
            )
        if chosen.part is not None:
            _say_part(result, chosen.part, as_json=as_json)
            if kept.named and result.home_lacks:
                raise click.exceptions.Exit(1)
            return
        index = Catalog(to.config.catalog).open(result.name, result.version)
        found = None
        if verify:
            store, node = Store(to.config.store), node_name(to.config)
            found = verify_copies(index, result.placed, store=store, node=node, members=to.members, token=to.token)
        nodes = len(to.members) or 1
    note_placed(config.catalog, result.name, index, result.placed)
    if where.replicas is not None and where.replicas > nodes:
        said = f"--replicas {where.replicas}: there can be {nodes} of each shard, one for each node"
        click.echo(said, err=True)
    _say_result(result, found, as_json=as_json)
    _say_containers(index.key(row) for row in range(len(index)))
    if (found is not None and found.problems) or (kept.named and result.home_lacks):
        raise click.exceptions.Exit(1)


def _say_lacking(result: PackResult) -> None:
    if result.home_lacks:
        lacks = f"lacks {result.home_lacks:,} of {counted(result.shards, 'shard')}: {result.home_problem}"
        click.echo(f"the packed home {lacks}; run the command again once it takes them", err=True)
    if result.short:
        short = counted(result.short, "shard")
        click.echo(f"fewer copies than wanted of {short}; run the command again to place them", err=True)


def _home_line(kept: HomeChoice) -> str:
    if kept.url:
        return f"packed home {kept.url}: {kept.why}"
    return f"no packed home: {kept.why}; nodes without the shards read the small files again"


def _say_part(result: PackResult, part: Part, *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(result) | {"part": part.number, "parts": part.parts})
        return
    made = f"{counted(result.files, 'file')}, {sized(result.bytes)}, in {counted(result.shards, 'shard')}"
    click.echo(f"{result.name}, part {part.number} of {part.parts}: {made}")
    _say_selection(result.left_out, result.skipped, result.skipped_count)
    _say_lacking(result)
    click.echo(f"`deeplink index merge {result.name}` publishes it once all {part.parts} are there")


def _say_plan(
    planned: tuple[Listing, PackPlan, int], source: str, name: str, kept: HomeChoice, *, as_json: bool
) -> None:
    listing, plan, there = planned
    sizes = [shard.payload for shard in plan.shards]
    if as_json:
        print_json(
            {
                "name": name,
                "source": source,
                "files": len(listing),
                "bytes": sum(sizes),
                "shards": len(sizes),
                "shard_bytes": sizes,
                "shards_there": there,
                "home": kept.url,
                "first": listing.keys[0],
                "last": listing.keys[-1],
                "left_out": listing.left_out,
                "skipped": listing.bad,
                "skipped_count": listing.bad_count,
            }
        )
        return
    files, shards = counted(len(listing), "file"), counted(len(sizes), "shard")
    click.echo(f"would pack {files}, {sized(sum(sizes))}, into {shards} as {name}")
    if there:
        click.echo(f"{counted(there, 'shard')} of them are there already")
    click.echo(f"{_home_line(kept)}{f'; up to {sized(sum(sizes))} there' if kept.url else ''}")
    click.echo(f"from {listing.keys[0]!r} to {listing.keys[-1]!r}")
    for shard in plan.shards[:_SHOWN]:
        click.echo(f"  {shard.stop - shard.start:>9,} files  {sized(shard.payload)}")
    if len(plan.shards) > _SHOWN:
        click.echo(f"  ... and {len(plan.shards) - _SHOWN} more")
    _say_selection(listing.left_out, listing.bad, listing.bad_count)
    _say_containers(listing.keys)


def _say_selection(left_out: Mapping[str, int], bad: Mapping[str, str], bad_count: int) -> None:
    if left_out:
        counts = ", ".join(f"{glob} {count:,}" for glob, count in left_out.items())
        click.echo(f"left out, files and folders: {counts}", err=True)
    for problem in list(bad.values())[:_SHOWN_BAD]:
        click.echo(f"skipped: {problem}", err=True)
    if bad_count > _SHOWN_BAD:
        click.echo(f"skipped: {bad_count - _SHOWN_BAD:,} more; --json names them", err=True)


def _say_containers(keys: Iterable[str]) -> None:
    """Say so where all files are of a kind that holds samples itself: it is hardly meant that each is one."""
    kinds = {PurePosixPath(key).suffix for key in islice(keys, _LOOKED_AT)}
    if len(kinds) == 1 and (suffix := kinds.pop()) in {".tar", ".parquet", ".arrow"}:
        click.echo(f"each {suffix} file is one sample; SOURCE/'*{suffix}' packs what is in them", err=True)


def _say_result(result: PackResult, found: ReadBack | None, *, as_json: bool) -> None:
    if as_json:
        verified: dict[str, Any] = {"verified": dataclasses.asdict(found)} if found else {}
        print_json(dataclasses.asdict(result) | verified)
        return
    if result.unchanged:
        click.echo(f"{result.name}: nothing has changed since version {result.version}")
    else:
        files, rate = counted(result.files, "file"), result.read_files / max(result.seconds, 1e-9)
        click.echo(
            f"{result.name}: {files}, {sized(result.bytes)}, in {counted(result.shards, 'shard')}; "
            f"{result.read_files:,} read in {result.seconds:.1f} s ({rate:,.0f} files/s)"
        )
        click.echo(f"version {result.version}")
    _say_selection(result.left_out, result.skipped, result.skipped_count)
    counts = Counter(node for holders in result.placed.values() for node in holders)
    click.echo("shards per node: " + ", ".join(f"{node} {count}" for node, count in sorted(counts.items())))
    if result.home:
        click.echo(f"packed home {result.home}: {sized(result.home_bytes)}")
    _say_lacking(result)
    if found is not None:
        copies = "copy" if found.copies == 1 else "copies"
        click.echo(f"read back {found.copies:,} {copies} of shards, {sized(found.bytes)}")
        for problem in found.problems:
            click.echo(f"wrong: {problem}", err=True)
