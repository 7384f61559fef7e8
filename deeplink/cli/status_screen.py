"""Jobs on a terminal: a table of them, or one on one screen, repainted. Colour is never the only sign."""

from __future__ import annotations

import math
import time
from concurrent import futures
from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

import click
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text
from rich.tree import Tree

from deeplink.cli.output import UNKNOWN, console, figure, moment, span
from deeplink.core.text import counted, printable
from deeplink.core.timeouts import start_call
from deeplink.scheduler.slurm.command import end_unfinished
from deeplink.scheduler.slurm.nodeset import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from deeplink.core.clock import Clock
    from deeplink.scheduler.jobs.job_view import JobOnFabric, JobTable
    from deeplink.scheduler.jobs.picture import JobNode, Picture, TrainingRate
    from deeplink.scheduler.topology.graph import Fabric, Path

Seen = TypeVar("Seen")
PATIENCE_S = 2.0  # how long a command waits without a word; the question itself is bounded where it is asked
MOST_LEAVES = 24
MOST_TROUBLED = 12
MOST_REMEDIES = 20
_STYLES = {
    "RUNNING": "green",
    "COMPLETED": "green",
    "succeeded": "green",
    "running": "green",
    "PENDING": "yellow",
    "recovering": "yellow",
    "stranded": "bold red",
    "failed": "bold red",
    "FAILED": "bold red",
    "NODE_FAIL": "bold red",
    "TIMEOUT": "bold red",
    "OUT_OF_MEMORY": "bold red",
    "CANCELLED": "red",
}


def drawn(nodes: Sequence[JobNode], fabric: Fabric) -> Tree | Text:
    """Return the tree above a job's nodes; nodes of a leaf whose ranks follow one another share a line."""
    leaves: dict[Path, list[JobNode]] = {}
    for each in nodes:
        leaves.setdefault(fabric.path(each.node), []).append(each)  # type: ignore[arg-type] # names are NodeNames
    if set(leaves) == {()}:
        tree = Tree(Text("on no known switch", style="dim"), guide_style="dim")
        _hang(tree, nodes)
        return tree
    # The lowest switch that all hang below; with one leaf that leaf.
    levels = zip(*filter(None, leaves), strict=False)
    common = tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
    root = Tree(Text(".".join(common) or "fabric", style="bold"), guide_style="dim")
    places: dict[Path, Tree] = {common: root}
    shown = list(leaves.items())[:MOST_LEAVES]
    for path, below in shown:
        _hang(_place(path, places, common) if path else root.add(Text("on no known switch", style="dim")), below)
    rest = [each for _, below in list(leaves.items())[MOST_LEAVES:] for each in below]
    if rest:
        more = root.add(Text(f"{len(leaves) - MOST_LEAVES} more leaves with {counted(len(rest), 'node')}"))
        for each in [each for each in rest if each.trouble][:MOST_TROUBLED]:
            more.add(_line([each]))
    return root


def on_leaves(nodes: Sequence[JobNode], fabric: Fabric) -> str:
    """Return on how many leaves the ranks are, as the end of a sentence; empty where that is not known."""
    paths = {fabric.path(each.node) for each in nodes if not each.spare}  # type: ignore[arg-type]
    if not paths or () in paths:
        return ""
    return f"; its ranks are on {counted(len(paths), 'leaf')}"


def _place(path: Path, places: dict[Path, Tree], root: Path) -> Tree:
    if path in places:
        return places[path]
    if len(path) <= len(root):
        return places[root]
    above = _place(path[:-1], places, root)
    places[path] = above.add(Text(printable(path[-1]), style="bold"))
    return places[path]


def _hang(place: Tree, nodes: Sequence[JobNode]) -> None:
    """Put nodes below a switch: those with trouble one by one, others that go on from one another in one line."""
    row: list[JobNode] = []
    for each in nodes:
        if row and (each.trouble or not _goes_on(row[-1], each)):
            place.add(_line(row))
            row = []
        if each.trouble:
            place.add(_line([each]))
        else:
            row.append(each)
    if row:
        place.add(_line(row))


def _goes_on(before: JobNode, after: JobNode) -> bool:
    if before.spare != after.spare:
        return False
    if before.ranks is None or after.ranks is None:
        return before.ranks is None and after.ranks is None
    return after.ranks[0] == before.ranks[1] + 1


def _line(nodes: Sequence[JobNode]) -> Text:
    names = [each.node for each in nodes]
    # Folded the order is lost, which few names can keep.
    shown = ", ".join(names) if len(names) <= 4 else fold(names)  # noqa: PLR2004
    first, last = nodes[0].ranks, nodes[-1].ranks
    text = Text(shown)
    if first and last:
        text.append(f"  rank {first[0]}" if first[0] == last[1] else f"  ranks {first[0]}-{last[1]}", style="cyan")
    elif nodes[0].spare:
        text.append("  spare", style="dim")
    if nodes[0].trouble:
        text.append(f"  {printable(nodes[0].trouble)}", style="bold red")
    return text


def of_table(table: JobTable, now: float) -> RenderableType:
    """Return a line for each job."""
    grid = job_grid()
    for picture in table.pictures:
        grid.add_row(*row(picture))
    notes = slurm_note(table.problem, table.told_unix, now)
    remedies = [(one.label, remedy) for one in table.pictures for remedy in one.remedies]
    notes += [Text(f"job {label}: {printable(remedy)}") for label, remedy in remedies[:MOST_REMEDIES]]
    if not table.pictures:
        notes.append(Text("no jobs of yours that DeepLink knows of" if not table.problem else "no jobs known"))
    if table.hidden:
        notes.append(Text(f"{counted(table.hidden, 'more job')} of yours without DeepLink: --all", style="dim"))
    if table.cut:
        notes.append(Text(f"{table.cut:,} older ones are not shown", style="dim"))
    return Group(*([grid] if table.pictures else []), *notes)


def job_grid(*more: str) -> Grid:
    """Return an empty table for the cells that `row` makes, and more."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("name", "state", "attempt")
    for title in ("job", *left, "nodes", "step", "steps/s", "samples/s", "loss", "local", *more):
        grid.add_column(title, justify="left" if title in left else "right", no_wrap=True, overflow="ellipsis")
    return grid


def row(picture: Picture) -> list[Text]:
    """Return the cells of a job's line."""
    pace = picture.pace
    state = picture.state or ("gone" if picture.gone else "local" if picture.local else UNKNOWN)
    word = "held" if picture.held else picture.phase
    phase = f" {word}" if word not in {"", "running"} else ""
    reads = pace.reads
    running = not picture.final
    return [
        Text(picture.label),
        Text(printable(picture.name) or UNKNOWN),
        Text(f"{state}{phase}", style=_STYLES.get(picture.phase) or _STYLES.get(state, "")),
        Text(picture.attempt.partition(".")[2] or "-"),
        Text(str(len(picture.seats)) if picture.seats else "-"),
        Text(_or_dash(f"{pace.step:,}" if pace.step is not None else "", picture)),
        Text(_or_dash(figure(pace.steps_per_s) if running else "-", picture)),
        Text(_or_dash(figure(pace.samples_per_s) if running else "-", picture)),
        Text(_or_dash(_value(pace.value), picture)),
        Text(_or_dash(f"{100 * reads.local / reads.total:.0f} %" if reads else "", picture)),
    ]


def _or_dash(text: str, picture: Picture) -> str:
    """Return a dash for a job that has not begun, UNKNOWN for one that has and did not report it."""
    if text:
        return text
    return UNKNOWN if picture.watched and picture.attempt else "-"


def of_job(one: JobOnFabric, now: float) -> RenderableType:
    """Return one job on one screen."""
    picture = one.picture
    grid = Grid.grid(padding=(0, 2), pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(one, now):
        grid.add_row(Text(name), value)
    title = Text("job ", style="bold").append(picture.label)
    if picture.name:
        title.append(f"  {printable(picture.name)}", style="not bold")
    if picture.user:
        title.append(f"  of {printable(picture.user)}", style="not bold dim")
    notes = slurm_note(one.problem, one.told_unix, now)
    notes += [Text(f"cannot be read: {printable(problem)}", style="yellow") for problem in picture.problems]
    return Group(title, grid, *notes)


def _facts(one: JobOnFabric, now: float) -> list[tuple[str, RenderableType]]:
    picture, pace = one.picture, one.picture.pace
    return [
        ("state", _state(picture)),
        ("attempt", Text(_attempt(picture))),
        ("time", Text(_time(picture, now))),
        ("nodes", drawn(picture.seats, one.fabric) if picture.seats else Text("none now")),
        ("ring", Text(_ring(picture, one))),
        ("step", Text(_step(pace, now, running=not picture.final))),
        (printable(pace.metric), Text(_value(pace.value) or UNKNOWN)),
        ("samples/s", Text(_samples_per_s(pace))),
        ("reads", Text(_reads(pace))),
        ("time goes to", Text(picture.binds.text if picture.binds else UNKNOWN)),
        ("checkpoint", Text(_checkpoint(pace, now, running=not picture.final))),
        ("placement", _placement(picture)),
        ("incident", _incident(picture, now)),
        *([("remedy", Text("\n".join(map(printable, picture.remedies))))] if picture.remedies else []),
        ("output", Text(printable(picture.output) or UNKNOWN)),
    ]


def _state(picture: Picture) -> Text:
    known = (
        "Slurm does not know it any more" if picture.gone else "a run without Slurm" if picture.local else UNKNOWN
    )
    state = picture.state or known
    text = Text(state, style=_STYLES.get(state, ""))
    if picture.phase:
        text.append("; its launcher: ", style="dim").append(picture.phase, style=_STYLES.get(picture.phase, ""))
    elif not picture.final and picture.state == "RUNNING":
        text.append("; its launcher: unknown", style="dim")
    for said in (picture.reason, picture.detail, picture.end):
        if said:
            text.append(f"; {printable(said)}", style="not bold default")
    if picture.gone:
        text.append("; `sacct -j` may still have it", style="dim")
    return text


def _attempt(picture: Picture) -> str:
    if not picture.attempt:
        again = f"; Slurm started it again {counted(picture.restarts, 'time')}" if picture.restarts else ""
        return f"no `deeplink run` has reported{again}"
    restarts = UNKNOWN if picture.restarts is None else str(picture.restarts)
    return f"{picture.attempt} (started again by Slurm: {restarts}, inside its allocation: {picture.relaunches})"


def _time(picture: Picture, now: float) -> str:
    limit = "no limit" if picture.limit_s == math.inf else span(picture.limit_s) if picture.limit_s else UNKNOWN
    if picture.used_s is not None and picture.state != "PENDING":
        ran = f"runs for {span(picture.used_s)}" if not picture.final else f"ran for {span(picture.used_s)}"
        return f"{ran}, limit {limit}" + (f", partition {picture.partition}" if picture.partition else "")
    if picture.state == "PENDING":
        start = picture.start_unix
        when = f"expected to start {moment(start)}, in {span(start - now)}" if start and start > now else ""
        return f"{when or 'start: unknown'}, limit {limit}, partition {picture.partition or UNKNOWN}"
    return UNKNOWN


def _ring(picture: Picture, one: JobOnFabric) -> str:
    if picture.ring is None or picture.ring_stock is None:
        return UNKNOWN
    count = sum(not each.spare for each in picture.seats) or UNKNOWN
    where = on_leaves(picture.seats, one.fabric)
    return f"{picture.ring} of {count} hops cross leaf switches ({picture.ring_stock} in order of names){where}"


def _step(pace: TrainingRate, now: float, *, running: bool) -> str:
    if pace.step is None or pace.unix is None:
        return UNKNOWN
    of = f" of {pace.total_steps:,}" if pace.total_steps else ""
    text = f"{pace.step:,}{of}, {span(now - pace.unix)} ago"
    if not running:
        return text
    left = f", about {span(pace.left_s)} left" if pace.left_s is not None else ""
    return f"{text}, {figure(pace.steps_per_s) or UNKNOWN} steps/s{left}"


def _samples_per_s(pace: TrainingRate) -> str:
    if pace.samples_per_s is None and pace.loaded_per_s is not None:
        return f"{figure(pace.loaded_per_s)} (rank 0)"
    return figure(pace.samples_per_s) or UNKNOWN


def _reads(pace: TrainingRate) -> str:
    reads = pace.reads
    if reads is None:
        return UNKNOWN
    shares = (("local", reads.local), ("peer", reads.peer), ("home", reads.home), ("source", reads.source))
    rates = ", ".join(f"{name} {100 * count / reads.total:.1f} %" for name, count in shares)
    now = f", {figure(reads.per_s)}/s" if reads.per_s is not None else ""
    waited = f", waited {span(reads.waited_s)} for what was elsewhere" if reads.waited_s else ""
    size = f", {reads.bytes / 1e6:,.3g} MB" if reads.bytes else ""
    return f"{rates} of {counted(reads.total, 'sample')}{size}{now}{waited} (rank 0 and its workers)"


def _checkpoint(pace: TrainingRate, now: float, *, running: bool) -> str:
    saved = pace.saved
    if saved is None:
        return UNKNOWN
    text = f"step {saved.step:,}, {span(now - saved.unix)} ago"
    if not running:
        return text
    if not saved.every or pace.step is None:
        return f"{text}; next: unknown"
    following = saved.step + saved.every
    left = (following - pace.step) / pace.steps_per_s if pace.steps_per_s and following >= pace.step else None
    when = f", in about {span(left)}" if left is not None else ""
    return f"{text}; next: step {following:,}{when}"


def _placement(picture: Picture) -> Text:
    decision = picture.decision
    if decision is None:
        return Text("no decision on record")
    text = Text(f"{printable(decision.decision.words)} ({decision.by}, {moment(decision.unix)})")
    chosen = next((one for one in decision.decision.candidates if one.nodes == decision.decision.nodes), None)
    if chosen is not None:
        local = f", {chosen.percent_local:.0f} % of its data local"
        text.append(f"; {counted(chosen.crossings, 'ring crossing')}, {counted(chosen.leaves, 'leaf')}{local}")
    for note in decision.decision.notes:
        text.append(f"; {printable(note)}", style="dim")
    return text


def _incident(picture: Picture, now: float) -> Text:
    incident = picture.open_incident
    if incident is None:
        past = (
            f"; {picture.incidents} before: `deeplink incidents --job {picture.label}`"
            if picture.incidents
            else ""
        )
        return Text(f"none open{past}")
    node = f" on {incident.node}" if incident.node else ""
    text = Text(f"{incident.kind}{node}, for {span(now - incident.began_unix)}", style="bold red")
    if incident.evidence:
        text.append(f"; {printable(incident.evidence)}", style="not bold default")
    return text


def slurm_note(problem: str, told_unix: float, now: float) -> list[Text]:
    """Return what is to be said where Slurm's word is old or missing; nothing where it is fresh."""
    if not problem:
        return []
    age = f"what it said {span(now - told_unix)} ago is shown" if told_unix else "nothing is known from it"
    # Slurm's commands end with what was fatal; the lines before are their way there.
    said = printable(problem.strip().splitlines()[-1])
    return [Text(f"Slurm does not answer, {age}: {said}", style="bold yellow")]


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


class PendingLook(Generic[Seen]):
    """One look, in a thread of its own: the screen and its keys do not wait for a Slurm that hangs."""

    def __init__(self, look: Callable[[], Seen]) -> None:
        self._began, self._answer = time.monotonic(), start_call(look)

    def wait(self, seconds: float) -> Seen | None:
        """Return what was seen, or None where that takes longer; raises what the look raised."""
        futures.wait([self._answer], seconds)
        return self._answer.result() if self._answer.done() else None

    def over(self, shown: RenderableType) -> RenderableType:
        """Return what was shown before, and for how long the next look has been under way."""
        seconds = time.monotonic() - self._began
        return Group(
            shown, Text(f"older: no answer of Slurm or of the storage for {seconds:.0f} s", style="yellow")
        )


def wait_for_look(look: Callable[[], Seen]) -> Seen:
    """Return what `look` returns; say on standard error that it is waited for, if that takes long."""
    pending = PendingLook(look)
    try:
        seen = pending.wait(PATIENCE_S)
        if seen is None:
            click.echo("waiting for an answer of Slurm ...", err=True)
        while seen is None:
            seen = pending.wait(PATIENCE_S)
    except KeyboardInterrupt:
        end_unfinished()
        raise
    return seen


def repaint(look: Callable[[], tuple[RenderableType, bool]], every_s: float, clock: Clock) -> None:
    """Show what `look` returns every so often, until it says that it is over, or until Ctrl-C (exit code 130).

    What was seen last stays on the terminal. Where standard output is no terminal, each look is printed below the
    one before.
    """
    out = console()
    shown, over = look()
    try:
        if not out.is_terminal:
            out.print(shown)
            while not over:
                clock.sleep(every_s)
                shown, over = look()
                out.print(shown)
            return
        # The alternate screen: rows of the terminal are overwritten, never cleared first.
        with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
            live.update(shown, refresh=True)
            while not over:
                clock.sleep(every_s)
                pending = PendingLook(look)
                while (seen := pending.wait(every_s)) is None:
                    live.update(pending.over(shown), refresh=True)
                shown, over = seen
                live.update(shown, refresh=True)
        out.print(shown)
    except KeyboardInterrupt:
        end_unfinished()
        if out.is_terminal:
            out.print(shown)
        raise click.exceptions.Exit(130) from None
