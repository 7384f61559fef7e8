"""What must hold after every case, whatever came: from facts to what does not hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from deeplink.data.digest import DeliveryDigest
from deeplink.scheduler.recovery.records import IncidentKind, incident_id
from deeplink.scheduler.slurm.states import JobState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.storm.case import Injection
    from benchmarks.watchdog.facts import Line, Told
    from deeplink.core.types import Attempt

ENDS_S = 150.0
"""So long after its last fault is over a job has to have ended: Slurm's own DOWN (30 s here), its hold of a
requeued job (20 s here), a start, and the whole training once more."""
HELD_S = 30.0
"""So long after its last step a job may hold its nodes, and so long after its end processes of it may live."""
RETRY_S = 60.0
"""And so much longer where the controller was away: a slurmstepd that could not tell the end of its step tries
again after a minute, and its job is COMPLETING until then (22.05.8)."""
INVARIANTS = MappingProxyType(
    {
        "ends": "the job is COMPLETED in time, requeued or not",
        "samples": "every sample was fed once in every epoch",
        "fence": "nothing of an older attempt is saved, printed or on record after a newer one resumed",
        "alone": "an attempt's rank is gone from a node before the next one's starts there",
        "held": "no node, GPU or allocation is held for longer than 30 s after the end",
        "same-id": "the job keeps its id, and the user has no other",
        "healthy": "each fault costs at most one attempt, and those that hurt no rank cost none",
        "incidents": "each fault has at most one incident, none comes before it, and no restart is without one",
        "placing": "no rank is put on a drained node while an unused one is left",
        "beside": "the array's other task runs on untouched",
        "text": "no log has an escape of the job's name",
        "left": "no process of the job is left",
    }
)
"""What is checked, by the word that a summary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One fault of a case, and how it went.

    Attributes:
        target: what it hit, in the laboratory's words.
        began_unix: right before it was done.
        hit_unix: right after.
        over_unix: when it was undone.
        missed: why it did not come after all; empty where it came.
    """

    injection: Injection
    target: str = ""
    began_unix: float = 0.0
    hit_unix: float = 0.0
    over_unix: float = 0.0
    missed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFacts:
    """What a case left behind.

    Attributes:
        injected: every fault, in the order in which they came.
        state: of the job in the end, in Slurm's words.
        reason: why it waits, in Slurm's words.
        ended_unix: when Slurm said so; 0 where it never did within the bound.
        restarts: by Slurm's count.
        lines: of all ranks of all attempts, by time.
        fed: in what the feeding differed from each sample once an epoch.
        late: what came of older attempts after their fence.
        incidents: of the watchdog's record, or of the launchers' where there is no watchdog.
        allocated: the job's nodes in each of its runs, by Slurm's count of restarts.
        jobs: every job of the user's in the end, by its address.
        beside: what is wrong with the array's other task.
        left: processes of the job that lived on.
        gpus_s: how long a job of all GPUs waited in the end.
        escapes: whose log has a raw escape.
    """

    injected: tuple[Injected, ...] = ()
    state: str = ""
    reason: str = ""
    ended_unix: float = 0.0
    restarts: int = 0
    lines: tuple[Line, ...] = ()
    fed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    incidents: tuple[Told, ...] = ()
    allocated: Mapping[int, Collection[str]] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()
    beside: str = ""
    left: tuple[str, ...] = ()
    gpus_s: float = 0.0
    escapes: tuple[str, ...] = ()

    @property
    def came(self) -> tuple[Injected, ...]:
        """Faults that came."""
        return tuple(one for one in self.injected if not one.missed)

    @property
    def tried(self) -> tuple[Injected, ...]:
        """Faults that came, and those that were broken off: they may have hit all the same."""
        return tuple(one for one in self.injected if one.began_unix)

    @property
    def completed(self) -> bool:
        """Whether the job has come to its end."""
        return self.state == JobState.COMPLETED.value


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold: its word, and what was seen."""

    invariant: str
    seen: str


def violations(facts: CaseFacts) -> list[Violation]:
    """Return every invariant that does not hold, once for each thing that was seen."""
    seen: dict[str, Iterable[str]] = {
        "ends": () if facts.completed else [f"it is {facts.state or 'unknown'} {facts.reason}".rstrip()],
        "samples": facts.fed if facts.completed else (),
        "fence": facts.late,
        "alone": _beside_successors(facts.lines),
        "held": _held(facts),
        "same-id": [f"the user has {len(facts.jobs)} jobs: {', '.join(facts.jobs)}"]
        if len(facts.jobs) > 1
        else (),
        "healthy": _healthy(facts),
        "incidents": _incidents(facts),
        "placing": drained_used(facts.lines, facts.came, facts.allocated),
        "beside": [facts.beside] if facts.beside else (),
        "text": [f"{who} has a raw escape" for who in facts.escapes],
        "left": facts.left,
    }
    return [Violation(word, text) for word, texts in seen.items() for text in texts]


def _held(facts: CaseFacts) -> list[str]:
    found = []
    ends = [line.unix for line in facts.lines if line.what == "end"]
    away = any(one.injection.what.startswith("controller-") for one in facts.came)
    most = HELD_S + (RETRY_S if away else 0.0)
    if facts.completed and ends and (held := facts.ended_unix - max(ends)) > most:
        found.append(f"the allocation was held for {held:.0f} s after the last rank's end")
    if facts.gpus_s > HELD_S:
        found.append(f"a job of all GPUs waited for {facts.gpus_s:.0f} s after the end")
    return found


ALL_SILENT = incident_id(None, IncidentKind.AGENTS_SILENT)


def _trained(lines: Iterable[Line]) -> list[Attempt]:
    return sorted({line.attempt for line in lines if line.what == "step"})


def _healthy(facts: CaseFacts) -> list[str]:
    trained = _trained(facts.lines)
    may = sum(one.injection.may_cost for one in facts.tried)
    if len(trained) - 1 <= may:
        return []
    told = ", ".join(map(str, trained))
    return [f"{len(trained)} attempts trained ({told}), with {may} faults that may cost one"]


def _incidents(facts: CaseFacts) -> list[str]:
    found = []
    # On a machine that stands still all agents are silent at once: the watchdog says so, and touches nothing.
    by_id = {told.id: told for told in facts.incidents if not told.id.startswith(ALL_SILENT)}
    if len(by_id) > len(facts.tried):
        found.append(f"{len(by_id)} incidents of {len(facts.tried)} faults: {', '.join(sorted(by_id))}")
    first = min((one.began_unix for one in facts.tried), default=float("inf"))
    found += [f"before any fault: {told.id}" for told in by_id.values() if told.detected_unix < first]
    restarted = len(_trained(facts.lines)) > 1
    if restarted and not by_id:
        found.append("the ranks were started again, and no incident says why")
    return found


def _beside_successors(lines: Sequence[Line]) -> list[str]:
    """Return the nodes on which a rank of an older attempt went on beside one of a newer."""
    began: dict[str, dict[Attempt, float]] = {}
    last: dict[str, dict[Attempt, float]] = {}
    for line in lines:
        of = began.setdefault(line.node, {})
        of[line.attempt] = min(line.unix, of.get(line.attempt, line.unix))
        ended = last.setdefault(line.node, {})
        ended[line.attempt] = max(line.unix, ended.get(line.attempt, line.unix))
    return [
        f"attempt {old} went on for {last[node][old] - began[node][new]:.1f} s beside {new} on {node}"
        for node in sorted(began)
        for old, new in pairwise(sorted(began[node]))
        if last[node][old] > began[node][new]
    ]


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


def drained_used(
    lines: Sequence[Line], came: Iterable[Injected], allocated: Mapping[int, Collection[str]]
) -> list[str]:
    """Return the relaunches that put a rank on a node drained by then, while one that had done nothing was left.

    Args:
        lines: the ranks' logs.
        came: faults that came.
        allocated: the job's nodes in each of its runs, by Slurm's count of restarts.
    """
    drains = [one for one in came if one.injection.what == "node-drained"]
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
        fresh = {*allocated.get(new.restart, ())} - used - out - _lost(came, began[new])
        if old.restart == new.restart and fresh:
            taken = sorted(out & (nodes[new] - nodes[old]))
            found += [
                f"attempt {new} has ranks on {node}, which is drained, not on {min(fresh)}" for node in taken
            ]
    return found


def _lost(came: Iterable[Injected], unix: float) -> set[str]:
    """Return what other faults had in their hands at a moment: no reason to prefer it."""
    return {
        one.target
        for one in came
        if one.injection.what != "node-drained" and one.began_unix <= unix <= one.over_unix + HELD_S
    }


def fed_wrongly(folder: Path, expected: DeliveryDigest) -> list[str]:
    """Return in what a job that left its digest in `folder` was fed otherwise than each sample once an epoch."""
    try:
        text = (folder / "digest.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ["it left no digest"]
    fed = DeliveryDigest()
    fed.load_state_dict(json.loads(text))
    return fed.differences(expected)
