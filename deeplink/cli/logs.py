"""`deeplink logs`: what a job wrote."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.scheduler.view.follow import OutputFollower
    from deeplink.scheduler.view.output import Tail

_EPILOG = """
The file is where Slurm says that the batch job's output goes; of a job that Slurm has forgotten, where
`deeplink run` noted it. Only the end of it is read. With -f it is followed over new attempts and requeues, until
the job has ended.

--rank and --node need lines that begin with the rank's number, as srun --label writes them
(`deeplink run --srun-option=--label -- python train.py`).

\b
Examples:
  deeplink logs 12                    the last 50 lines
  deeplink logs 12 -f                 and what comes, until the job has ended
  deeplink logs 12 --rank 3 -n 500
  deeplink logs 12 --attempt 12.0.1   from where the second attempt began to where the third did
  deeplink logs 12 --events           what DeepLink and you did, in words
"""


@click.command("logs", epilog=_EPILOG)
@click.argument("job")
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with what is written, until the job has ended or Ctrl-C."
)
@click.option("-n", "--lines", type=click.IntRange(0, 10_000_000), default=50, show_default=True, metavar="LINES")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only lines of this rank.")
@click.option("--node", metavar="NAME", help="Only lines of the ranks on this node (of the newest attempt).")
@click.option("--attempt", metavar="A", help="Only what this attempt wrote: 12.0.1, or 0.1 for short.")
@click.option("--events", is_flag=True, help="What DeepLink and you did to the job, in place of its output.")
def command(
    *, job: str, follow: bool, lines: int, rank: int | None, node: str | None, attempt: str | None, events: bool
) -> None:
    """Show what a job wrote, and follow it over restarts."""
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.view.follow import OutputFollower
    from deeplink.scheduler.view.look import Viewer, me, shared

    if attempt is not None and (follow or events):
        raise click.UsageError("--attempt is for what an attempt wrote once: leave --follow and --events out")
    if events and (rank is not None or node is not None):
        raise click.UsageError("--events are the job's: leave --rank and --node out")
    config, clock = load_config(), SystemClock()
    viewer = Viewer(asked=shared(config.state, clock, 2.0), state=config.state, clock=clock, user=me())
    follower = OutputFollower(viewer=viewer, word=job, clock=clock, say=_say)
    if events:
        _events(follower, lines, follow=follow)
        return
    keep = follower.keep(rank, node)
    path = follower.output(wait=follow)
    from deeplink.scheduler.view.output import Tail

    tail = Tail(path, keep)
    if attempt is not None:
        _write(_of_attempt(follower, tail, attempt, lines))
    else:
        shown = tail.last(lines)
        _check_labels(tail, found=bool(shown) or lines == 0)
        _write(shown)
    if follow:
        follower.follow([tail], _write)


def _say(sentence: str) -> None:
    from deeplink.text import printable

    click.echo(printable(f"deeplink: {sentence}"), err=True)


def _write(pieces: Iterable[bytes]) -> None:
    from deeplink.cli import output_minded

    with output_minded(only_output=True):
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _of_attempt(follower: OutputFollower, tail: Tail, attempt: str, lines: int) -> list[bytes]:
    from deeplink.scheduler.view.output import attempts_in, section
    from deeplink.text import printable

    name = follower.attempt(attempt)
    found = section(tail.path, name)
    if found is None:
        there = attempts_in(tail.path)
        have = f"it has those of {', '.join(there)}" if there else "`deeplink run` wrote no line into it"
        raise click.UsageError(f"{printable(str(tail.path))} has no lines of attempt {name}: {have}")
    return tail.last(lines, begin=found[0], end=found[1])


def _check_labels(tail: Tail, *, found: bool) -> None:
    """Say why there is nothing where a rank's lines were asked for.

    Raises:
        UsageError: no line of the end of the file bears a rank's number.
    """
    from deeplink.scheduler.view.output import Tail, labelled
    from deeplink.text import printable

    if tail.keep is None or found:
        return
    seen = Tail(tail.path).last(10_000)
    if seen and not labelled(seen):
        raise click.UsageError(
            f"no line of {printable(str(tail.path))} bears a rank's number: "
            "start the ranks with `deeplink run --srun-option=--label -- ...`"
        )


def _events(follower: OutputFollower, lines: int, *, follow: bool) -> None:
    from deeplink.scheduler.view.events import in_words
    from deeplink.scheduler.view.folder import in_order

    def write(pieces: Iterable[bytes], most: int | None = None) -> None:
        found = in_order(pieces)
        for event in found if most is None else found[max(0, len(found) - most) :]:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix"]))
            click.echo(f"{when}  {in_words(event)}")

    tails = follower.events(wait=follow)
    write([line for tail in tails for line in tail.last(lines)], lines)
    if follow:
        follower.follow(tails, write)
