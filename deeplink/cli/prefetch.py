"""`deeplink prefetch`: warm the SSDs of the nodes a waiting job will get, or empty a node ahead of its drain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deeplink.cache.holding.prefetch_plan import Moves
    from deeplink.cache.holding.prefetching import Prefetched

_EPILOG = """
With standing agents (config members) the nodes bring the shards that they will own as the job's members, from
whoever has them, and only those that they lack: started again, it goes on where it was. For a JOB the nodes are
those it runs on, or those that were wished for it; DATASET is then what it was submitted with (--deeplink-data).
Without standing agents nothing can be warmed before a job starts: its own agents bring its data then.

--drain copies the shards that NODE alone holds to the members that own them without it, for one dataset or all.

\b
Examples:
  deeplink prefetch 4711                     what job 4711 reads, onto the nodes wished for it
  deeplink prefetch --nodes n[0-3] imagenet
  deeplink prefetch 4711 imagenet --dry-run  who would bring what
  deeplink prefetch --drain n7               before `scontrol update nodename=n7 state=drain ...`

\b
Exit codes: 0 everything is there; 1 not so; 2 wrong usage or configuration.
"""


@click.command("prefetch", epilog=_EPILOG)
@click.argument("words", nargs=-1, metavar="[JOB] [DATASET[@VERSION]]...")
@click.option("--nodes", metavar="LIST", help="These nodes (n[0-3,7]) instead of a job's.")
@click.option("--drain", metavar="NODE", help="Copy away what NODE alone holds.")
@click.option("--replicas", type=click.IntRange(1), help="Copies of each shard. [default: config replicas]")
@click.option("--dry-run", is_flag=True, help="Only say who would bring what.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to standard error.")
def command(
    *,
    words: tuple[str, ...],
    nodes: str | None,
    drain: str | None,
    replicas: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Warm the SSDs of nodes before a job starts there, or empty one ahead of its drain."""
    from deeplink.cli.prefetch_moving import StandingAgents, chosen, moved, moves_off, moves_to
    from deeplink.config import load_config

    if drain is not None and nodes is not None:
        raise click.UsageError("--nodes and --drain contradict each other")
    config = load_config()
    fleet = StandingAgents.of(config)
    if drain is not None:
        found = moves_off(drain, words, fleet, config)
    else:
        where, datasets = chosen(words, nodes, config)
        found = moves_to(where, datasets, fleet, config, replicas=replicas or config.replicas)
    results = [] if dry_run else [moved(one, fleet) for one in found]
    _say(found, results, as_json=as_json)
    missing = any(one.silent for one in found) or any(one.came < one.wanted for one in results)
    if missing and not dry_run:
        click.get_current_context().exit(1)


def _say(found: list[Moves], results: list[Prefetched], *, as_json: bool) -> None:
    import itertools
    import json

    for moves, done in itertools.zip_longest(found, results):
        if as_json:
            click.echo(json.dumps(_document(moves, done)))
            continue
        _print(moves, done)
    if not found and not as_json:
        click.echo("nothing is to be moved: no dataset is known here")


def _print(moves: Moves, done: Prefetched | None) -> None:
    from deeplink.text import counted, sized

    name = f"{moves.name}@{moves.index.version[:12]}"
    here = moves.copies - moves.shards
    click.echo(
        f"{name}: {counted(moves.copies, 'copy').replace('copys', 'copies')} to lie there, {here:,} do; "
        f"to bring: {moves.shards:,} ({sized(moves.bytes)})"
    )
    for node, numbers in moves.numbers.items():
        size = sum(moves.index.shards[number].bytes for number in numbers)
        click.echo(f"  {node:<16} {counted(len(numbers), 'shard'):>12} {sized(size):>12}")
    for node in moves.silent:
        click.echo(f"  {node:<16} has no agent that answers: its share comes when the job starts there", err=True)
    if done is not None:
        came = ", ".join(f"{sized(size)} from {origin}" for origin, size in sorted(done.brought.items()))
        click.echo(f"  brought {done.came:,} of {done.wanted:,}: {came or 'nothing'}")
        for problem in done.problems:
            click.echo(f"  {problem}", err=True)


def _document(moves: Moves, done: Prefetched | None) -> dict[str, object]:
    return {
        "name": moves.name,
        "version": moves.index.version,
        "copies": moves.copies,
        "to_bring": {node: len(numbers) for node, numbers in moves.numbers.items()},
        "bytes": moves.bytes,
        "silent": list(moves.silent),
        "brought": dict(done.brought) if done else {},
        "came": done.came if done else 0,
        "problems": list(done.problems) if done else [],
    }
