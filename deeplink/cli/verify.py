"""`deeplink verify`: read every copy of every sample, and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from deeplink.completion import PlaceType

if TYPE_CHECKING:
    from deeplink.cache.packing.verifying import ReadBack
    from deeplink.config import Config
    from deeplink.library import PathEntry
    from deeplink.shard_inventory import Holdings
    from deeplink.verifying import ShardReport

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
_NAMED = 5


@click.command("verify", epilog=_EPILOG)
@click.argument("name", type=PlaceType(), metavar="NAME[@VERSION]")
@click.option("--quick", is_flag=True, help="Look at sizes alone; read no samples.")
@click.option("--in-place", is_flag=True, help="Let each node read its own copies, from its disk.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to standard error.")
def command(*, name: str, quick: bool, in_place: bool, as_json: bool) -> int:
    """Read every copy of every sample of a dataset and compare it with what was packed."""
    from deeplink.clock import SystemClock
    from deeplink.library import Library
    from deeplink.shard_inventory import holdings

    library = Library()
    found = library.at(name)
    if found.place.inner:
        raise click.UsageError(f"a whole dataset is verified: deeplink verify {found.place.root}")
    if quick and in_place:
        raise click.UsageError("--quick reads nothing: leave out --in-place")
    held = holdings(library.config, SystemClock())
    if in_place:
        return _in_place(found, library.config, held, as_json=as_json)
    problem = "" if quick else _index_problem(found)
    reports = _reports(found, library.config, held, quick=quick)
    _note(found, library.config, held)
    wrong = bool(problem or held.problems) or not all(report.is_right for report in reports)
    if as_json:
        _say_json(found, held, reports, problem)
    else:
        _say(found, held, reports, problem, quick=quick)
    return 1 if wrong else 0


def _note(found: PathEntry, config: Config, held: Holdings) -> None:
    from deeplink.cache.holding.residency import residency
    from deeplink.cache.ownership import standing
    from deeplink.residency_summary import note_residency

    index = found.reader.index
    replicas = min(config.replicas, max(len(held.members), 1))
    where = residency(index, held.verified(), replicas=replicas, known=standing(held.members))
    note_residency(config.catalog, found.place.name, index, where)


def _index_problem(found: PathEntry) -> str:
    from deeplink.cache.errors import IndexFormatError

    try:
        found.reader.index.verify()
    except (IndexFormatError, OSError) as problem:
        return str(problem)
    return ""


def _reports(found: PathEntry, config: Config, held: Holdings, *, quick: bool) -> list[ShardReport]:
    from deeplink.cache.membership import members_token, other_members
    from deeplink.cache.remote.transport import PlainTransport
    from deeplink.cli.get_progress import shown_progress
    from deeplink.clock import SystemClock
    from deeplink.verifying import VersionVerification

    clock = SystemClock()
    transport = PlainTransport(members_token(config, other_members(config)), clock)
    try:
        work = VersionVerification(found.reader.index, config, held, transport, clock)
        with shown_progress("verifying", 0 if quick else work.total()) as progress:
            return list(work.reports(quick=quick, progress=progress))
    finally:
        transport.close()


def _in_place(found: PathEntry, config: Config, held: Holdings, *, as_json: bool) -> int:
    from deeplink.cache.membership import members_token, other_members
    from deeplink.cache.packing.verifying import verify_copies
    from deeplink.cache.store import Store
    from deeplink.cli.get_progress import shown_progress

    index = found.reader.index
    placed = {entry.id: held.holders(entry.id) for entry in index.shards}
    done = [0, 0]
    with shown_progress("verifying", sum(map(len, placed.values())), "copies") as progress:

        def show(copies: int, size: int) -> None:
            progress(copies - done[0], size - done[1])
            done[:] = copies, size

        result = verify_copies(
            index,
            placed,
            store=Store(config.store, make=False),
            node=held.here,
            members=held.members,
            token=members_token(config, other_members(config)),
            progress=show,
        )
    _note(found, config, held)
    silent = [f"not verified on {node}: {problem}" for node, problem in held.problems.items()]
    problems = [*result.problems, *silent, *filter(None, [_index_problem(found)])]
    _say_in_place(found, result, problems, as_json=as_json)
    if result.problems and not as_json:
        _say_remedy(found)
    return 1 if problems else 0


def _say_in_place(found: PathEntry, result: ReadBack, problems: list[str], *, as_json: bool) -> None:
    import json

    from deeplink.text import counted, sized

    name, index = found.place.name, found.reader.index
    if as_json:
        facts = {"name": name, "version": index.version, "right": not problems, "problems": problems}
        click.echo(json.dumps({**facts, "copies": result.copies, "bytes": result.bytes}))
        return
    for problem in problems:
        click.echo(f"deeplink: {problem}", err=True)
    said = f"{result.copies:,} copies read and right, {sized(result.bytes)}"
    click.echo(f"{name} {index.version[:12]}: {counted(len(index.shards), 'shard')}; {said}")


def _say_json(found: PathEntry, held: Holdings, reports: list[ShardReport], problem: str) -> None:
    import json

    facts: dict[str, Any] = {
        "name": found.place.name,
        "version": found.reader.version,
        "right": not (problem or held.problems) and all(report.is_right for report in reports),
        "index": problem or "whole",
        "unanswered": dict(held.problems),
        "shards": [
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
        ],
    }
    click.echo(json.dumps(facts))


def _say(found: PathEntry, held: Holdings, reports: list[ShardReport], problem: str, *, quick: bool) -> None:
    from deeplink.text import counted, sized

    if problem:
        click.echo(f"deeplink: {problem}", err=True)
        click.echo(
            f"  `deeplink index rebuild {found.place.name}@{found.reader.version}` makes it anew.", err=True
        )
    for node in held.problems:
        click.echo(f"deeplink: not verified on {node}: {held.problems[node]}", err=True)
    for report in reports:
        copies = ", ".join(f"{copy.node} {copy.state.value}" for copy in report.copies) or "nobody holds it"
        samples = counted(report.samples, "sample")
        click.echo(f"{report.shard[:12]}  {samples:>16}  {sized(report.bytes):>10}  {copies}")
        for copy in report.copies:
            if copy.problem:
                _say_wrong(copy.node, copy.wrong, copy.problem)
    bad = sum(not report.is_right for report in reports)
    done = "there" if quick else "read and right"
    silent = f"; {_silent(held)}" if held.problems else ""
    which = "every copy that answered" if silent else "every copy"
    said = f"{bad:,} of {counted(len(reports), 'shard')} not right" if bad else f"{which} is {done}"
    click.echo(f"{found.place.name} {found.reader.version[:12]}: {counted(len(reports), 'shard')}; {said}{silent}")
    if bad:
        _say_remedy(found)


def _silent(held: Holdings) -> str:
    from deeplink.text import counted

    return f"{counted(len(held.problems), 'node')} did not answer"


def _say_remedy(found: PathEntry) -> None:
    click.echo(f"  `deeplink warm {found.place.root}` brings copies that are missing or set aside.", err=True)


def _say_wrong(node: str, wrong: tuple[str, ...], problem: str) -> None:
    from deeplink.text import counted

    names = ", ".join(repr(key) for key in wrong[:_NAMED])
    more = f" and {len(wrong) - _NAMED:,} more" if len(wrong) > _NAMED else ""
    which = f"{counted(len(wrong), 'sample')} ({names}{more}): " if wrong else ""
    click.echo(f"deeplink: {node}: {which}{problem}", err=True)
