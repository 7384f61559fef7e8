"""`deeplink status`, `top` and `logs`: show jobs, once or live, and what they wrote."""

from __future__ import annotations

import dataclasses
import math
import os
import select
import sys
import termios
import time
import tty
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from deeplink.cli.options import flag, integer, json_option, option, real
from deeplink.cli.output import UNKNOWN, console, job_viewer, moment, print_json, span, warn, write_bytes
from deeplink.core.text import counted, printable
from deeplink.core.types import Attempt
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console, RenderableType

    from deeplink.scheduler.jobs.follow import OutputFollower
    from deeplink.scheduler.jobs.job_folder import Tail
    from deeplink.scheduler.jobs.job_view import JobTable, Viewer
    from deeplink.scheduler.jobs.picture import Picture

DEFAULT_S = 2.0
KEYS = {"j": "job", "s": "step", "r": "rate", "l": "loss", "n": "nodes"}
_SLICE_S = 0.5

_STATUS_EPILOG = """
Slurm is asked one question of a kind per interval, however many of your commands are open on this host; the rest
is read from the job's folder (docs/jobs.md). Figures that nobody reports are "unknown". Where Slurm does not
answer, its last answer is shown with its age.

\b
Examples:
  deeplink status                  your jobs, one line each
  deeplink status 12               one job on one screen
  deeplink status 12_3 --watch     a task of an array, again every 2 s until it has ended or Ctrl-C
  deeplink status 12 --watch=10
  deeplink status --all            everybody's jobs, those without DeepLink too
  deeplink status 12 --json | jq .step
"""
_TOP_EPILOG = """
Keys: q ends it; j, s, r, l, n sort by job, step, rate, loss, nodes, and once more turns the order; a shows
everybody's jobs, or only yours. Where standard output or input is no terminal, one table is printed.

\b
Examples:
  deeplink top
  deeplink top --sort rate
  deeplink top --all --once      one table, and exit
"""
_LOGS_EPILOG = """
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


class _OptionalSeconds(click.Command):
    """`--watch` takes its value after `=` alone: in `--watch 12` the 12 is a job."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [f"--watch={DEFAULT_S:g}" if word == "--watch" else word for word in args])


@click.command("status", cls=_OptionalSeconds, epilog=_STATUS_EPILOG)
@click.argument("job", required=False)
@flag("--all", "Everybody's jobs, and those that DeepLink knows nothing of.", name="everything")
@real(
    "--watch [=SECONDS]",
    f"Look again and again until Ctrl-C, or until the job has ended. [every {DEFAULT_S:g} s]",
    0.5,
    3600,
    name="watch_s",
)
@json_option("One JSON object; with --watch one a line.")
def command(*, job: str | None, everything: bool, watch_s: float | None, as_json: bool) -> None:
    """Show how your jobs are, or one of them on one screen."""
    if job is not None and everything:
        raise click.UsageError("--all lists jobs; leave it out to look at one")
    viewer = job_viewer(watch_s or DEFAULT_S)
    if as_json:
        _print_json(viewer, job, watch_s, everything=everything)
        return
    from deeplink.cli.status_screen import repaint, wait_for_look

    if watch_s is None:
        console().print(wait_for_look(lambda: _screen(viewer, job, everything=everything))[0])
    else:
        repaint(lambda: _screen(viewer, job, everything=everything), watch_s, viewer.clock)


def _screen(viewer: Viewer, job: str | None, *, everything: bool) -> tuple[RenderableType, bool]:
    """Return what is to be shown, and whether there will be nothing new."""
    from deeplink.cli.status_screen import of_job, of_table

    if job is None:
        return of_table(viewer.table(everything=everything), viewer.clock.unix()), False
    one = viewer.one(job)
    return of_job(one, viewer.clock.unix()), one.picture.final


def _print_json(viewer: Viewer, job: str | None, watch_s: float | None, *, everything: bool) -> None:
    while True:
        if job is None:
            document, over = document_of_table(viewer.table(everything=everything)), False
        else:
            one = viewer.one(job)
            over, document = one.picture.final, _document(one.picture)
            for node in document["seats"]:
                node["switches"] = list(one.fabric.path(node["node"]))
            document["slurm"] = {"answered_unix": one.told_unix or None, "problem": one.problem or None}
        print_json(document, indent=None if watch_s else 2)
        if watch_s is None or over:
            return
        viewer.clock.sleep(watch_s)


def document_of_table(table: JobTable) -> dict[str, Any]:
    """Return a table of jobs as JSON has it; what is not known is null."""
    return {
        "jobs": [_document(picture) for picture in table.pictures],
        "hidden": table.hidden,
        "slurm": {"answered_unix": table.told_unix or None, "problem": table.problem or None},
    }


def _document(picture: Picture) -> dict[str, Any]:
    made: dict[str, Any] = _plain(picture)
    said = made.pop("pace")
    made |= {
        name: said[name]
        for name in (
            *("step", "steps_per_s", "samples_per_s", "loaded_per_s"),
            *("reads", "total_steps", "left_s"),
        )
    }
    made |= {"step_unix": said["unix"], "metric": {"name": said["metric"], "value": said["value"]}}
    made["checkpoint"] = said["saved"]
    return {name: None if value == "" else value for name, value in made.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Attempt):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "unlimited" if value > 0 else "-inf"
    return value


@click.command("top", epilog=_TOP_EPILOG)
@flag("--all", "Everybody's jobs, and those that DeepLink knows nothing of.", name="everything")
@option("--sort", "What comes first.", type=click.Choice(["job", "step", "rate", "loss", "nodes"]), default="job")
@real("--interval SECONDS", "How often.", 0.5, 3600, default=2.0)
@flag("--once", "Print one table and exit.")
@json_option("Print one table as JSON and exit.")
def top(*, everything: bool, sort: str, interval: float, once: bool, as_json: bool) -> None:
    """Show jobs live, sorted as you like."""
    from deeplink.cli.status_screen import wait_for_look

    viewer = job_viewer(interval)
    if as_json:
        print_json(document_of_table(viewer.table(everything=everything)), indent=2)
        return
    out, choice = console(), ScreenChoice(sort=sort, everything=everything)

    def look(now: ScreenChoice) -> RenderableType:
        return of_top(viewer.table(everything=now.everything), now, viewer.clock.unix())

    if once or not (out.is_terminal and sys.stdin.isatty()):
        out.print(wait_for_look(lambda: look(choice)))
    else:
        _run(look, choice, interval, out)


@dataclass(frozen=True, slots=True)
class ScreenChoice:
    """Order and extent of the table."""

    sort: str = "job"
    turned: bool = False  # the other way round
    everything: bool = False
    over: bool = False

    def pressed(self, key: str) -> ScreenChoice:
        """Return what a key makes of it; keys without a meaning change nothing.

        >>> ScreenChoice().pressed("r").pressed("r")
        ScreenChoice(sort='rate', turned=True, everything=False, over=False)
        """
        if key in {"q", "Q", "\x03", "\x04"}:
            return replace(self, over=True)
        if key == "a":
            return replace(self, everything=not self.everything)
        name = KEYS.get(key, "")
        if not name:
            return self
        return replace(self, sort=name, turned=not self.turned if name == self.sort else False)


def of_top(table: JobTable, choice: ScreenChoice, now: float) -> RenderableType:
    """Return a head line and a line for each job that Slurm knows, in the chosen order."""
    from rich.console import Group
    from rich.text import Text

    from deeplink.cli.status_screen import job_grid, row, slurm_note

    pictures = ordered([one for one in table.pictures if not one.gone], choice)
    running = [one for one in pictures if one.state == JobState.RUNNING.value]
    waiting = [one for one in pictures if one.state == JobState.PENDING.value]
    nodes = {each.node for one in running for each in one.seats}
    head = Text(
        f"{time.strftime('%H:%M:%S', time.localtime(now))}  {counted(len(running), 'job')} running on "
        f"{counted(len(nodes), 'node')}, {len(waiting):,} waiting; by {choice.sort}"
    )
    head.append(" (turned)" if choice.turned else "")
    grid = job_grid("left")
    for picture in pictures:
        grid.add_row(*row(picture), Text(_left(picture)))
    notes = slurm_note(table.problem, table.told_unix, now)
    if not pictures:
        notes.append(Text("no jobs of yours that DeepLink knows of" if not choice.everything else "no jobs"))
    if table.hidden:
        notes.append(Text(f"{counted(table.hidden, 'more job')} of yours without DeepLink: a", style="dim"))
    return Group(head, *([grid] if pictures else []), *notes)


def _left(picture: Picture) -> str:
    """Return the time that is left: by the job's own count of steps, else until Slurm's limit."""
    if picture.final or picture.state != JobState.RUNNING.value:
        return "-"
    if picture.pace.left_s is not None:
        return span(picture.pace.left_s)
    if picture.limit_s is not None and picture.used_s is not None and math.isfinite(picture.limit_s):
        return f"< {span(picture.limit_s - picture.used_s)}"
    return UNKNOWN


def ordered(pictures: list[Picture], choice: ScreenChoice) -> list[Picture]:
    """Return jobs in the chosen order, the greatest first; those whose figure is unknown come last."""
    known: list[tuple[float, int, Picture]] = []
    unknown: list[Picture] = []
    for place, one in enumerate(pictures):
        value = _figure(one, choice.sort)
        if value is None or math.isnan(value):
            unknown.append(one)
        else:
            known.append((value, place, one))
    return [one for _, _, one in sorted(known, reverse=not choice.turned)] + unknown


def _figure(picture: Picture, sort: str) -> float | None:
    pace = picture.pace
    rate = pace.samples_per_s if pace.samples_per_s is not None else pace.steps_per_s
    return {"job": picture.id, "step": pace.step, "rate": rate, "loss": pace.value, "nodes": len(picture.seats)}[
        sort
    ]


def _run(
    look: Callable[[ScreenChoice], RenderableType], choice: ScreenChoice, every_s: float, out: Console
) -> None:
    """Show what `look` returns every so often and after each key, until q or Ctrl-C."""
    from rich.live import Live

    from deeplink.cli.status_screen import PendingLook
    from deeplink.scheduler.slurm.command import end_unfinished

    shown = look(choice)
    try:
        with keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
            live.update(shown, refresh=True)
            while not choice.over:
                changed = _after(choice, pressed(every_s))
                if changed.over:
                    break
                pending = PendingLook(partial(look, changed))
                while (seen := pending.wait(_SLICE_S)) is None and not changed.over:
                    live.update(pending.over(shown), refresh=True)
                    changed = _after(changed, pressed(_SLICE_S))
                choice, shown = changed, seen or shown
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass  # as good a way to end it as q
    end_unfinished()
    out.print(shown)


def _after(choice: ScreenChoice, pressed: str) -> ScreenChoice:
    for key in pressed:
        choice = choice.pressed(key)
    return choice


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Give what waits so long for keys and returns those pressed; without echo, and without Enter."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        if not ready:
            return ""
        # Nothing at all: the terminal is gone.
        return os.read(terminal, 64).decode(errors="replace") or "q"

    try:
        tty.setcbreak(terminal)
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@click.command("logs", epilog=_LOGS_EPILOG)
@click.argument("job")
@flag("-f --follow", "Go on with what is written, until the job has ended or Ctrl-C.")
@integer("-n --lines LINES", "Show so many lines, the last ones.", 0, 10_000_000, default=50)
@integer("--rank N", "Only lines of this rank.", 0)
@option("--node NAME", "Only lines of the ranks on this node (of the newest attempt).")
@option("--attempt A", "Only what this attempt wrote: 12.0.1, or 0.1 for short.")
@flag("--events", "What DeepLink and you did to the job, in place of its output.")
def logs(
    *, job: str, follow: bool, lines: int, rank: int | None, node: str | None, attempt: str | None, events: bool
) -> None:
    """Show what a job wrote, and follow it over restarts."""
    if attempt is not None and (follow or events):
        raise click.UsageError("--attempt is for what an attempt wrote once: leave --follow and --events out")
    if events and (rank is not None or node is not None):
        raise click.UsageError("--events are the job's: leave --rank and --node out")
    from deeplink.scheduler.jobs.follow import OutputFollower
    from deeplink.scheduler.jobs.job_folder import Tail

    viewer = job_viewer()
    follower = OutputFollower(viewer=viewer, word=job, clock=viewer.clock, say=lambda said: warn(printable(said)))
    if events:
        _events(follower, lines, follow=follow)
        return
    keep = follower.keep(rank, node)
    tail = Tail(follower.output(wait=follow), keep)
    if attempt is not None:
        write_bytes(_of_attempt(follower, tail, attempt, lines))
    else:
        shown = tail.last(lines)
        _check_labels(tail, found=bool(shown) or lines == 0)
        write_bytes(shown)
    if follow:
        follower.follow([tail], write_bytes)


def _of_attempt(follower: OutputFollower, tail: Tail, attempt: str, lines: int) -> list[bytes]:
    from deeplink.scheduler.jobs.job_folder import attempts_in, section

    name = follower.attempt(attempt)
    found = section(tail.path, name)
    if found is None:
        there = attempts_in(tail.path)
        have = f"it has those of {', '.join(there)}" if there else "`deeplink run` wrote no line into it"
        raise click.UsageError(f"{printable(str(tail.path))} has no lines of attempt {name}: {have}")
    return tail.last(lines, begin=found[0], end=found[1])


def _check_labels(tail: Tail, *, found: bool) -> None:
    """Say why there is nothing where a rank's lines were asked for."""
    from deeplink.scheduler.jobs.job_folder import Tail, labelled

    if tail.keep is None or found:
        return
    seen = Tail(tail.path).last(10_000)
    if seen and not labelled(seen):
        raise click.UsageError(
            f"no line of {printable(str(tail.path))} bears a rank's number: "
            "start the ranks with `deeplink run --srun-option=--label -- ...`"
        )


def _events(follower: OutputFollower, lines: int, *, follow: bool) -> None:
    from deeplink.scheduler.jobs.follow import event_in_words
    from deeplink.scheduler.jobs.job_folder import in_order

    def write(pieces: Iterable[bytes], most: int | None = None) -> None:
        found = in_order(pieces)
        for event in found if most is None else found[max(0, len(found) - most) :]:
            click.echo(f"{moment(event['unix'])}  {event_in_words(event)}")

    tails = follower.events(wait=follow)
    write([line for tail in tails for line in tail.last(lines)], lines)
    if follow:
        follower.follow(tails, write)
