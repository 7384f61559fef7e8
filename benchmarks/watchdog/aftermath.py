"""What a storm of faults left behind: what each job was fed and saved, and the page that tells of it all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.rows import machine
from benchmarks.watchdog.playing import late_saves
from benchmarks.watchdog.strikes import KINDRED, matched
from deeplink.data.digest import DeliveryDigest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.watchdog.facts import Line, Told
    from benchmarks.watchdog.stand import Stand
    from benchmarks.watchdog.strikes import Struck
    from deeplink.core.types import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What came of a storm.

    Attributes:
        struck: the faults, in the order of time.
        ended: how each job did.
        problems: what does not hold.
        remarks: what happened besides.
    """

    struck: Sequence[Struck]
    ended: Sequence[str]
    problems: Sequence[str]
    remarks: Sequence[str]


def fed_wrongly(folder: Path, expected: DeliveryDigest) -> list[str]:
    """Return in what a job that left its digest in `folder` was fed otherwise than each sample once an epoch."""
    try:
        text = (folder / "digest.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ["it left no digest"]
    fed = DeliveryDigest()
    fed.load_state_dict(json.loads(text))
    return fed.differences(expected)


def fences(lines: Sequence[Line]) -> list[tuple[Attempt, float]]:
    """Return each attempt that was followed by one that resumed, and when all ranks of the first such had.

    An attempt that was ended before it resumed has claimed nothing, and fences nobody.
    """
    resumed: dict[Attempt, float] = {}
    for line in lines:
        if line.what == "resumed":
            resumed[line.attempt] = max(line.unix, resumed.get(line.attempt, line.unix))
    followed = {
        old: min((new for new in resumed if new > old), default=None) for old in {line.attempt for line in lines}
    }
    return [(old, resumed[new]) for old, new in sorted(followed.items()) if new is not None]


def fenced_saves(stand: Stand) -> list[str]:
    """Return the checkpoints of a job that its older attempts saved after a newer one had fenced them."""
    return [name for old, fence in fences(stand.lines()) for name in late_saves(stand, old, fence)]


def drained_used(
    lines: Sequence[Line], struck: Iterable[Struck], allocated: Mapping[int, Collection[str]]
) -> list[str]:
    """Return the relaunches that put a rank on a node drained by then, while one that had done nothing was left.

    Args:
        lines: the ranks' logs.
        struck: faults that came.
        allocated: the job's nodes in each of its runs, by Slurm's count of restarts.
    """
    drains = [one for one in struck if one.strike.fault == "node-drained"]
    began: dict[Attempt, float] = {}
    nodes: dict[Attempt, set[str]] = {}
    for line in lines:
        began[line.attempt] = min(line.unix, began.get(line.attempt, line.unix))
        nodes.setdefault(line.attempt, set()).add(line.node)
    found = []
    for old, new in pairwise(sorted(began)):
        tried = [those for attempt, those in nodes.items() if attempt.restart == new.restart and attempt <= new]
        used = set().union(*tried)
        out = {one.target for one in drains if one.hit_unix < began[new] < one.over_unix}
        fresh = {*allocated.get(new.restart, ())} - used - out
        if old.restart == new.restart and fresh:
            taken = sorted(out & (nodes[new] - nodes[old]))
            found += [
                f"attempt {new} has ranks on {node}, which is drained, not on {min(fresh)}" for node in taken
            ]
    return found


def page(minutes: float, seed: int, left: Aftermath, incidents: Sequence[Told]) -> str:
    """Return a storm of so many minutes and that seed as a page, beside the incidents that are on record."""
    found, _ = matched(left.struck, incidents)
    came = [one for one in left.struck if not one.missed]
    rows: dict[bool, list[str]] = {False: [], True: []}
    for place, one in enumerate(left.struck):
        rows[KINDRED[one.strike.fault].brief].append(_row(one, found[place]))
    hiccups = sum(KINDRED[one.strike.fault].brief for one in came)
    head = ["| s | fault | target | for s | job | incident |", "|---|---|---|---|---|---|"]
    lines = [
        "# A storm of faults",
        "",
        "Written by the command itself. Random faults of [the laboratory](faults.md) from a seed, three jobs",
        "running on a sandbox of twelve nodes; what is held at the end is in `benchmarks/watchdog/storm.py`.",
        "",
        f"    python -m benchmarks.watchdog.storm --minutes {minutes:g} --seed {seed} --write-docs",
        "",
        f"{machine()}.",
        f"{len(came) - hiccups} faults and {hiccups} hiccups came, {len(left.struck) - len(came)} were left out.",
        f"{len(left.ended)} jobs: {_counted(left.ended)}.",
        "",
        f"## What does not hold: {len(left.problems) or 'nothing'}",
        "",
        *[f"- {problem}" for problem in left.problems],
        *([""] if left.problems else []),
        *(["Besides:", "", *[f"- {remark}" for remark in left.remarks], ""] if left.remarks else []),
        "## Faults",
        "",
        "Each is to have exactly one incident; none is asked for where the job it was to hit had ended by then.",
        "",
        *head,
        *rows[False],
        "",
        "## Hiccups",
        "",
        "What may be over before it is believed, or what a job of two ranks cannot tell: at most one incident.",
        "",
        *head,
        *rows[True],
    ]
    return "\n".join(lines) + "\n"


def _row(one: Struck, found: Sequence[Told]) -> str:
    what = one.missed and f"left out: {one.missed}"
    what = what or ", ".join(f"{told.kind} ({told.action}, {told.outcome.value})" for told in found)
    held = f"{one.over_unix - one.began_unix:.0f}"
    where = one.target.rpartition("/")[2]
    return (
        f"| {one.strike.at_s:.0f} | {one.strike.fault} | {where} | {held} | {one.job or ''} "
        f"| {what.replace('|', '/')} |"
    )


def _counted(words: Sequence[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
