"""Jobs on a terminal: a table of them, or one on one screen. Colour is never the only sign."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from deeplink.cli.status_nodes import drawn, on_leaves
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deeplink.scheduler.view.look import JobOnFabric, JobTable
    from deeplink.scheduler.view.picture import Picture
    from deeplink.scheduler.view.rates import TrainingRate

UNKNOWN = "unknown"
MOST_REMEDIES = 20
_WIDE = 4096  # into a pipe or a file nothing is cut off
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


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for all; rich heeds NO_COLOR and TERM."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def of_table(table: JobTable, now: float) -> RenderableType:
    """Return a line for each job."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("job", "name", "state", "attempt", "nodes", "step", "steps/s", "samples/s", "loss", "local"):
        right = title in {"job", "nodes", "step", "steps/s", "samples/s", "loss", "local"}
        grid.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for picture in table.pictures:
        grid.add_row(*row(picture))
    notes = slurm_note(table.problem, table.told_unix, now)
    told = [(one.label, remedy) for one in table.pictures for remedy in one.remedies]
    notes += [Text(f"job {label}: {printable(remedy)}") for label, remedy in told[:MOST_REMEDIES]]
    if not table.pictures:
        notes.append(Text("no jobs of yours that DeepLink knows of" if not table.problem else "no jobs known"))
    if table.hidden:
        notes.append(Text(f"{counted(table.hidden, 'more job')} of yours without DeepLink: --all", style="dim"))
    if table.cut:
        notes.append(Text(f"{table.cut:,} older ones are not shown", style="dim"))
    return Group(*([grid] if table.pictures else []), *notes)


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
    """What a job that has not begun cannot have is a dash; what nobody said of one that has is unknown."""
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
    facts: list[tuple[str, RenderableType]] = [
        ("state", _state(picture)),
        ("attempt", Text(_attempt(picture))),
        ("time", Text(_time(picture, now))),
        ("nodes", drawn(picture.seats, one.fabric) if picture.seats else Text("none now")),
        ("ring", Text(_ring(picture, one))),
        ("step", Text(_step(pace, now, running=not picture.final))),
        (printable(pace.metric), Text(_value(pace.value) or UNKNOWN)),
        ("samples/s", Text(figure(pace.samples_per_s) or UNKNOWN)),
        ("reads", Text(_reads(pace))),
        ("checkpoint", Text(_checkpoint(pace, now, running=not picture.final))),
        ("placement", _placement(picture)),
        ("incident", _incident(picture, now)),
        *([("remedy", Text("\n".join(map(printable, picture.remedies))))] if picture.remedies else []),
        ("output", Text(printable(picture.output) or UNKNOWN)),
    ]
    return facts


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
        told = f"runs for {span(picture.used_s)}" if not picture.final else f"ran for {span(picture.used_s)}"
        return f"{told}, limit {limit}" + (f", partition {picture.partition}" if picture.partition else "")
    if picture.state == "PENDING":
        start = picture.start_unix
        when = f"expected to start {_clock(start)}, in {span(start - now)}" if start and start > now else ""
        return f"{when or 'start: unknown'}, limit {limit}, partition {picture.partition or UNKNOWN}"
    return UNKNOWN


def _ring(picture: Picture, one: JobOnFabric) -> str:
    if picture.ring is None or picture.ring_stock is None:
        return UNKNOWN
    count = sum(not seat.spare for seat in picture.seats) or UNKNOWN
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


def _reads(pace: TrainingRate) -> str:
    reads = pace.reads
    if reads is None:
        return UNKNOWN
    shares = (("local", reads.local), ("peer", reads.peer), ("source", reads.source))
    told = ", ".join(f"{name} {100 * count / reads.total:.1f} %" for name, count in shares)
    return f"{told} of {counted(reads.total, 'sample')} (rank 0's own process)"


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
    text = Text(f"{printable(decision.decision.words)} ({decision.by}, {_clock(decision.unix)})")
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


def figure(value: float | None) -> str:
    """Return a rate as people read it; empty where there is none.

    >>> figure(12345.6), figure(0.01234), figure(7.25), figure(None)
    ('12,346', '0.0123', '7.25', '')
    """
    if value is None or not math.isfinite(value):
        return "" if value is None else f"{value}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def span(seconds: float | None) -> str:
    """Return a duration as people read it.

    >>> span(4.4), span(75), span(3723), span(200_000), span(-1.0)
    ('4 s', '1:15 min', '1:02 h', '2 d 7 h', '0 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 60:  # noqa: PLR2004
        return f"{whole} s"
    if whole < 3600:  # noqa: PLR2004
        return f"{whole // 60}:{whole % 60:02} min"
    if whole < 86_400:  # noqa: PLR2004
        return f"{whole // 3600}:{whole % 3600 // 60:02} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def _clock(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
