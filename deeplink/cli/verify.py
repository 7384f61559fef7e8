"""`deeplink verify`: compare every copy of a dataset with what was packed."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import PlaceType, flag, json_and_progress
from deeplink.cli.output import ShownProgress, print_json, warn
from deeplink.core.clock import SystemClock
from deeplink.core.text import counted, sized

if TYPE_CHECKING:
    from deeplink.core.config import Config
    from deeplink.fs.library import PathEntry
    from deeplink.ops.inventory import Copy, Holdings, ShardReport

_NAMED = 5
_EPILOG = """
Every sample is read from this node's store and from each member that holds its shard, and compared with the
checksum that it was packed with; nothing is read from the source. A member that sends wrong bytes reads that shard
again by itself and has it healed. With --in-place each node reads its own disk, all of them at once, and nothing
crosses the network: the way for terabytes; of a wrong shard it names the first wrong sample and puts it aside.

\b
Examples:
  deeplink verify mnist
  deeplink verify mnist@3f2a91 --json
  deeplink verify mnist --in-place     each node its own copies, from its disk
  deeplink verify mnist --quick        who holds what, and whether files have the right size; reads no samples

\b
Exit codes: 0 every shard has a copy and all copies are right, 1 something is wrong (it is named), 2 wrong usage.
"""


@click.command("verify", epilog=_EPILOG)
@click.argument("name", type=PlaceType(), metavar="NAME[@VERSION]")
@flag("--quick", "Look at sizes alone; read no samples.")
@flag("--in-place", "Let each node read its own copies, from its disk.")
@json_and_progress
def command(*, name: str, quick: bool, in_place: bool, as_json: bool) -> int:
    """Read every copy of every sample of a dataset and compare it with what was packed."""
    from deeplink.fs.library import Library
    from deeplink.ops.inventory import holdings, note_residency

    library = Library()
    found = library.at(name)
    if found.place.inner:
        raise click.UsageError(f"a whole dataset is verified: deeplink verify {found.place.root}")
    if quick and in_place:
        raise click.UsageError("--quick reads nothing: leave out --in-place")
    config, index = library.config, found.reader.index
    held = holdings(config, SystemClock())
    note_residency(config.catalog, found.place.name, index, held.residency(index, config.replicas))
    if in_place:
        return _in_place(found, config, held, as_json=as_json)
    problem = "" if quick else _index_problem(found)
    reports = _reports(found, config, held, quick=quick)
    right = not (problem or held.problems) and all(report.is_right for report in reports)
    if as_json:
        shards = [
            {
                "shard": report.shard,
                "samples": report.samples,
                "bytes": report.bytes,
                "copies": {
                    copy.node: {"state": copy.state.value, "wrong": list(copy.wrong), "problem": copy.problem}
                    for copy in report.copies
                },
            }
            for report in reports
        ]
        facts = {"name": found.place.name, "version": found.reader.version, "right": right}
        unanswered = dict(held.problems)
        print_json({**facts, "index": problem or "whole", "unanswered": unanswered, "shards": shards})
    else:
        _say_found(found, held, reports, problem, quick=quick)
    return 0 if right else 1


def _index_problem(found: PathEntry) -> str:
    from deeplink.cache.errors import IndexFormatError

    try:
        found.reader.index.verify()
    except (IndexFormatError, OSError) as problem:
        return str(problem)
    return ""


def _reports(found: PathEntry, config: Config, held: Holdings, *, quick: bool) -> list[ShardReport]:
    from deeplink.cache.transfer.frames import PlainTransport
    from deeplink.ops.inventory import VersionVerification

    clock = SystemClock()
    with closing(PlainTransport(held.token, clock)) as transport:
        work = VersionVerification(found.reader.index, config, held, transport, clock)
        with ShownProgress("verifying", "samples", 0 if quick else work.total()) as progress:
            return list(work.reports(quick=quick, progress=progress.add))


def _in_place(found: PathEntry, config: Config, held: Holdings, *, as_json: bool) -> int:
    from deeplink.cache.pack.verifying import verify_copies
    from deeplink.cache.store.store import Store

    name, index = found.place.name, found.reader.index
    placed = {entry.id: held.holders(entry.id) for entry in index.shards}
    copies = sum(map(len, placed.values()))
    with ShownProgress("verifying", "copies", copies) as progress:
        result = verify_copies(
            index,
            placed,
            store=Store(config.store, make=False),
            node=held.here,
            members=held.members,
            token=held.token,
            progress=lambda done, size: progress.at(done, copies, size),
        )
    silent = [f"not verified on {node}: {problem}" for node, problem in held.problems.items()]
    problems = [*result.problems, *silent, *filter(None, [_index_problem(found)])]
    if as_json:
        facts = {"name": name, "version": index.version, "right": not problems, "problems": problems}
        print_json({**facts, "copies": result.copies, "bytes": result.bytes})
        return 1 if problems else 0
    for problem in problems:
        warn(problem)
    said = f"{result.copies:,} copies read and right, {sized(result.bytes)}"
    click.echo(f"{name} {index.version[:12]}: {counted(len(index.shards), 'shard')}; {said}")
    if result.problems:
        _say_remedy(found)
    return 1 if problems else 0


def _say_found(found: PathEntry, held: Holdings, reports: list[ShardReport], problem: str, *, quick: bool) -> None:
    if problem:
        warn(problem)
        click.echo(
            f"  `deeplink index rebuild {found.place.name}@{found.reader.version}` makes it again.", err=True
        )
    for node in held.problems:
        warn(f"not verified on {node}: {held.problems[node]}")
    for report in reports:
        copies = ", ".join(f"{copy.node} {copy.state.value}" for copy in report.copies) or "no node holds it"
        samples = counted(report.samples, "sample")
        click.echo(f"{report.shard[:12]}  {samples:>16}  {sized(report.bytes):>10}  {copies}")
        for copy in report.copies:
            if copy.problem:
                warn(f"{copy.node}: {_wrong(copy)}{copy.problem}")
    bad = sum(not report.is_right for report in reports)
    silent = f"; {counted(len(held.problems), 'node')} did not answer" if held.problems else ""
    which = "every copy that answered" if silent else "every copy"
    right = f"{which} is {'there' if quick else 'read and right'}"
    said = f"{bad:,} of {counted(len(reports), 'shard')} not right" if bad else right
    click.echo(f"{found.place.name} {found.reader.version[:12]}: {counted(len(reports), 'shard')}; {said}{silent}")
    if bad:
        _say_remedy(found)


def _say_remedy(found: PathEntry) -> None:
    click.echo(f"  `deeplink warm {found.place.root}` brings copies that are missing or set aside.", err=True)


def _wrong(copy: Copy) -> str:
    names = ", ".join(repr(key) for key in copy.wrong[:_NAMED])
    more = f" and {len(copy.wrong) - _NAMED:,} more" if len(copy.wrong) > _NAMED else ""
    return f"{counted(len(copy.wrong), 'sample')} ({names}{more}): " if copy.wrong else ""
