"""The table of `deeplink top`, and in which order its jobs are."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from deeplink.cli.status_screen import UNKNOWN, row, slurm_note, span
from deeplink.scheduler.slurm.states import JobState
from deeplink.text import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deeplink.scheduler.view.look import JobTable
    from deeplink.scheduler.view.picture import Picture

KEYS = {"j": "job", "s": "step", "r": "rate", "l": "loss", "n": "nodes"}


@dataclass(frozen=True, slots=True)
class ScreenChoice:
    """What is shown, and how.

    Attributes:
        turned: whether the order is the other way round.
        over: whether it is to end.
    """

    sort: str = "job"
    turned: bool = False
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
    pictures = ordered([one for one in table.pictures if not one.gone], choice)
    running = [one for one in pictures if one.state == JobState.RUNNING.value]
    waiting = [one for one in pictures if one.state == JobState.PENDING.value]
    nodes = {seat.node for one in running for seat in one.seats}
    head = Text(
        f"{time.strftime('%H:%M:%S', time.localtime(now))}  {counted(len(running), 'job')} running on "
        f"{counted(len(nodes), 'node')}, {len(waiting):,} waiting; by {choice.sort}"
    )
    head.append(" (turned)" if choice.turned else "")
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (
        "job",
        "name",
        "state",
        "attempt",
        "nodes",
        "step",
        "steps/s",
        "samples/s",
        "loss",
        "local",
        "left",
    ):
        left = title in {"name", "state", "attempt"}
        grid.add_column(title, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    for picture in pictures:
        grid.add_row(*row(picture), Text(_left(picture)))
    notes = slurm_note(table.problem, table.told_unix, now)
    if not pictures:
        notes.append(Text("no jobs of yours that DeepLink knows of" if not choice.everything else "no jobs"))
    if table.hidden:
        notes.append(Text(f"{counted(table.hidden, 'more job')} of yours without DeepLink: a", style="dim"))
    return Group(head, *([grid] if pictures else []), *notes)


def _left(picture: Picture) -> str:
    """How long it still takes: by its own count of steps, else until Slurm's limit ends it."""
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
