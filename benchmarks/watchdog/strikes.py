"""Which faults strike when, from a seed, and what is held against them afterwards. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks.watchdog.scenarios import LOST
from deeplink.scheduler.recovery.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from benchmarks.watchdog.facts import Told

BEFORE_S = 2.0
"""An incident may be told to have begun so long before its fault: the last answer came before it."""
AFTER_S = 45.0
"""And be detected so long after the fault was over (a hang is believed after 10 s, a lost launcher after 20)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kindred:
    """One kind of strike.

    Attributes:
        weight: how often it is drawn, beside the others.
        hold_s: the shortest and the longest time it is in effect.
        taking: it takes something away that jobs need: one such at a time, and only while all is well. Of two at
            once it could not be told which incident is whose.
        early: it is told by the launcher of more than two nodes, some time after it came: that is not to end soon.
        lone: the watchdog alone tells of it, by what it sees or does not: no two of them at once.
        kinds: of the one incident it is to have; none where it is to have none.
        brief: a hiccup, that may be over before it is believed, or cannot be told by who is there: at most one
            incident.
        saved: it comes only once Slurm has saved that the jobs run, which takes it 5 s. A controller that dies
            before starts them a second time, drains their node for it (Duplicate jobid) and holds them (measured,
            22.05.8): that is between Slurm and its operator.
    """

    weight: int
    hold_s: tuple[float, float]
    kinds: frozenset[IncidentKind]
    taking: bool = True
    early: bool = False
    lone: bool = False
    brief: bool = False
    saved: bool = False


_OF_RANKS = frozenset({IncidentKind.RANK_FAILED, IncidentKind.APPLICATION_FAILED, IncidentKind.OUT_OF_MEMORY})
_DOUBT, _SICK = frozenset({IncidentKind.WATCHDOG_PARTITIONED}), frozenset({IncidentKind.NODE_SICK})
# Faults last for long enough to be believed: a slurmd is missed after 4 s, and Slurm gives its node up after 10; a
# controller after two commands that wait for it for up to 8 s; storage that stands still after 12 s. Of agents
# silent for half a minute, with nodes that answer, their launchers take leave: that would be another incident.
KINDRED = {
    "node-killed": Kindred(
        weight=4, hold_s=(15, 40), kinds=LOST | {IncidentKind.NODE_REBOOTED, IncidentKind.LAUNCHER_LOST}
    ),
    "node-cut": Kindred(weight=4, hold_s=(10, 40), kinds=LOST | {IncidentKind.LAUNCHER_LOST}),
    "fast-reboot": Kindred(
        weight=2,
        hold_s=(0, 0),
        kinds=LOST | {IncidentKind.NODE_REBOOTED, IncidentKind.LAUNCHER_LOST, IncidentKind.RANK_FAILED},
    ),
    "rank-stopped": Kindred(weight=2, hold_s=(60, 60), kinds=frozenset({IncidentKind.RANKS_HUNG})),
    "rank-killed": Kindred(weight=2, hold_s=(0, 0), kinds=_OF_RANKS),
    "rank-exit": Kindred(weight=2, hold_s=(10, 10), kinds=_OF_RANKS),
    "slurmd-killed": Kindred(weight=1, hold_s=(7, 8.5), kinds=frozenset({IncidentKind.SLURMD_LOST}), lone=True),
    "controller-down": Kindred(weight=1, hold_s=(22, 30), kinds=_DOUBT, taking=False, lone=True, saved=True),
    "controller-frozen": Kindred(weight=1, hold_s=(22, 30), kinds=_DOUBT, taking=False, lone=True),
    "watchdog-killed": Kindred(
        weight=2, hold_s=(1, 10), kinds=frozenset({IncidentKind.WATCHDOG_AWAY}), taking=False, lone=True
    ),
    "storage-frozen": Kindred(
        weight=1, hold_s=(15, 30), kinds=frozenset({IncidentKind.STORAGE_FROZEN}), early=True
    ),
    "agents-silent": Kindred(
        weight=1, hold_s=(12, 28), kinds=_DOUBT | {IncidentKind.AGENTS_SILENT}, early=True, lone=True
    ),
    "checkpoints-unreadable": Kindred(weight=2, hold_s=(15, 30), kinds=_OF_RANKS),
    # Nobody needs to be told of these: an administrator did it, a job that starts says whose the folder is.
    "node-drained": Kindred(weight=3, hold_s=(30, 90), kinds=frozenset(), taking=False, brief=True),
    "folder-squatted": Kindred(weight=2, hold_s=(10, 30), kinds=_SICK, taking=False, brief=True),
    "disk-full": Kindred(weight=1, hold_s=(5, 20), kinds=_SICK, taking=False, brief=True),
    "disk-readonly": Kindred(weight=1, hold_s=(5, 20), kinds=_SICK, taking=False, brief=True),
    "slow-rank": Kindred(
        weight=1, hold_s=(10, 30), kinds=frozenset({IncidentKind.STRAGGLER}), taking=False, brief=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault that is to come.

    Attributes:
        at_s: since the beginning, not before.
        hold_s: for how long.
        pick: draws job, node and rank when the time has come.
    """

    at_s: float
    fault: str
    hold_s: float
    pick: int


def strikes(
    seconds: float, seed: int, gap_s: tuple[float, float] = (12.0, 35.0), *, only: Collection[str] = KINDRED
) -> tuple[Strike, ...]:
    """Return the faults of a storm, of those named: the same for the same seed, whatever becomes of them."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    names = sorted(only)
    found, at = [], chance.uniform(*gap_s)
    while at < seconds:
        name = chance.choices(names, [KINDRED[name].weight for name in names])[0]
        hold_s = round(chance.uniform(*KINDRED[name].hold_s), 1)
        found.append(Strike(at_s=round(at, 1), fault=name, hold_s=hold_s, pick=chance.getrandbits(30)))
        at += chance.uniform(*gap_s)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault that came.

    Attributes:
        job: that it hit; 0 where it hit none of them alone.
        hit_unix: when it surely was in effect.
        missed: why it did not come after all; empty where it came.
    """

    strike: Strike
    target: str
    job: int
    began_unix: float
    hit_unix: float
    over_unix: float
    missed: str = ""


def matched(struck: Sequence[Struck], incidents: Iterable[Told]) -> tuple[dict[int, list[Told]], list[Told]]:
    """Return the incidents of each fault by its place, and those that no fault explains.

    What counts is the watchdog's record, into which it puts what launchers and nodes tell of one thing under ids
    of their own; launchers keep journals besides. An incident fits a fault if its time does, its kind is among the
    expected ones, and it is about the fault's job, where both name one.
    """
    found: dict[int, list[Told]] = {place: [] for place in range(len(struck))}
    left = []
    for told in incidents:
        if told.by != "watchdog":
            continue
        fits = [place for place, one in enumerate(struck) if not one.missed and _fits(one, told)]
        if fits:
            found[max(fits, key=lambda place: struck[place].began_unix)].append(told)
        else:
            left.append(told)
    return found, left


def _fits(one: Struck, told: Told) -> bool:
    if told.kind not in KINDRED[one.strike.fault].kinds:
        return False
    if not one.began_unix - BEFORE_S <= told.detected_unix <= one.over_unix + AFTER_S:
        return False
    job = int(told.attempt.split(".")[0]) if told.attempt else 0
    return not (one.job and job and job != one.job)


def complaints(
    struck: Sequence[Struck], incidents: Iterable[Told], last_unix: Mapping[int, float] = MappingProxyType({})
) -> list[str]:
    """Return every fault without exactly one incident, every hiccup with several, and incidents without a fault.

    Args:
        struck: the faults.
        incidents: what is on record.
        last_unix: when each job that was completed had said its last word: no later fault can have hit it.
    """
    found, left = matched(struck, incidents)
    said = []
    for place, one in enumerate(struck):
        if one.missed:
            continue
        seen = KINDRED[one.strike.fault].brief or bool(found[place])
        if not seen and one.hit_unix <= last_unix.get(one.job, one.hit_unix):
            said.append(f"{_named(one)}: no incident")
        if len(found[place]) > 1:
            kinds = ", ".join(told.id for told in found[place])
            said.append(f"{_named(one)}: {len(found[place])} incidents ({kinds})")
    said += [f"incident {told.id} ({told.evidence[:120]}) without a fault" for told in left]
    return said


def _named(one: Struck) -> str:
    where = one.target.rpartition("/")[2]
    return f"{one.strike.fault} {where} at {one.strike.at_s:.0f} s" + (f" (job {one.job})" if one.job else "")
