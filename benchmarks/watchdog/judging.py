"""From facts to figures and broken promises. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.watchdog.facts import newest_step
from benchmarks.watchdog.scenarios import EVERY, After, Never, Scenario
from deeplink.scheduler.recovery.evidence import Remedy, WatchPolicy
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.slurm.states import HELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.watchdog.facts import Facts, Told

AT_ONCE_S = 10.0
"""A job of all GPUs begins within so long where nothing is leaked (Slurm's scheduler looks every 5 s here)."""
CHECK_S = WatchPolicy().resume_s - 1.0
"""A node is to answer for so long before it is taken back; the first question may have been under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run came to; None where it never came.

    Attributes:
        detected_s: from the fault to the first incident of the right kind.
        noticed: whether there is such an incident, and the job's output says so where it is to.
        first_step_s: from the fault to the first training step of the next attempt.
        start_s: of that, until the first process of the next attempt started.
        import_s: of that, from process start to the end of importing, the slowest rank.
        repeated: steps done again.
        zombie_s: for how long a rank of the old attempt went on after the first step of the new one.
        back_s: from the end of the fault until the watchdog took a node back.
        broken: what must not be and was, with what happened.
        missing: what was expected and never came.
    """

    detected_s: float | None = None
    first_step_s: float | None = None
    start_s: float | None = None
    import_s: float | None = None
    repeated: int | None = None
    zombie_s: float | None = None
    back_s: float | None = None
    noticed: bool = False
    broken: dict[str, str]
    missing: tuple[str, ...] = ()


def judge(scenario: Scenario, facts: Facts) -> Figures:
    """Return what a run came to."""
    right = right_ones(scenario, facts)
    detected = min((told.detected_unix for told in right), default=None)
    first = facts.first_step
    broken = {}
    for never in scenario.never:
        why = _CHECKS[never](scenario, facts)
        if why:
            broken[never.value] = why
    if facts.early:
        broken["an incident before the fault"] = ", ".join(facts.early)
    missing = []
    says = bool(scenario.says) and scenario.says in facts.output
    if scenario.says and not says:
        missing.append(f"the job's output does not say {scenario.says!r}")
    if scenario.kinds and not right:
        seen = ", ".join(sorted({told.kind for told in facts.incidents})) or "none"
        missing.append(f"no incident of kind {'/'.join(sorted(scenario.kinds))} (there were: {seen})")
    if scenario.after is After.AGAIN and first is None:
        missing.append(f"no newer attempt trained (job {facts.state} {facts.reason})".rstrip())
    if scenario.after is After.HELD and not (facts.state == "PENDING" and facts.reason.startswith(HELD)):
        missing.append(f"the job is not held: {facts.state} {facts.reason}".rstrip())
    if scenario.after is After.HELD and IncidentKind.APPLICATION_FAILED not in {
        told.kind for told in facts.incidents
    }:
        missing.append("no incident says that the application is at fault")
    return Figures(
        detected_s=None if detected is None else max(0.0, detected - facts.fault_unix),
        first_step_s=None if first is None else first.unix - facts.fault_unix,
        start_s=_started(facts),
        import_s=_imported(facts),
        repeated=_repeated(facts),
        zombie_s=_zombie(facts),
        back_s=_back(facts),
        noticed=(bool(right) or not scenario.kinds) and (says or not scenario.says),
        broken=broken,
        missing=tuple(missing),
    )


def right_ones(scenario: Scenario, facts: Facts) -> list[Told]:
    """Return the incidents of the expected kinds."""
    return [told for told in facts.incidents if told.kind in scenario.kinds]


def _started(facts: Facts) -> float | None:
    begun = [line.unix for line in facts.newer if line.what == "process"]
    return min(begun) - facts.fault_unix if begun else None


def _imported(facts: Facts) -> float | None:
    first = facts.first_step
    if first is None:
        return None
    began = {
        line.rank: line.unix for line in facts.newer if line.what == "process" and line.attempt == first.attempt
    }
    ended = {
        line.rank: line.unix for line in facts.newer if line.what == "imported" and line.attempt == first.attempt
    }
    return max((ended[rank] - began[rank] for rank in began.keys() & ended.keys()), default=None)


def _repeated(facts: Facts) -> int | None:
    first = facts.first_step
    if first is None:
        return None
    before = newest_step(line for line in facts.lines if line.attempt == facts.attempt)
    return max(0, before - (first.step - 1))


def _zombie(facts: Facts) -> float | None:
    first = facts.first_step
    if first is None:
        return None
    old = [line.unix for line in facts.lines if line.attempt <= facts.attempt and line.what == "step"]
    return max(0.0, max(old, default=first.unix) - first.unix)


def _back(facts: Facts) -> float | None:
    """Return how long after the fault was over all nodes that it hit were checked and taken back."""
    checked = [_checked_unix(node, facts) for node in facts.victims]
    return max(checked) - facts.over_unix if facts.over_unix and checked and max(checked) < math.inf else None


def _checked_unix(node: str, facts: Facts) -> float:
    """Return when the watchdog first wrote down that a node is well and to be taken back; inf where it did not."""
    resumed = [one.began_unix for one in facts.actions if one.remedy == Remedy.RESUME and one.node == node]
    return min(resumed, default=math.inf)


def _bad_node(_scenario: Scenario, facts: Facts) -> str:
    there = sorted(
        {line.node for line in facts.newer if line.node in facts.victims and _while_bad(line.unix, facts)}
    )
    return f"ranks of a newer attempt on {', '.join(there)}" if there else ""


def _while_bad(unix: float, facts: Facts) -> bool:
    return not facts.over_unix or unix < facts.over_unix


def _too_many(_scenario: Scenario, facts: Facts) -> str:
    repeated = _repeated(facts)
    return f"{repeated} steps" if repeated is not None and repeated > EVERY else ""


def _gres(_scenario: Scenario, facts: Facts) -> str:
    if facts.gpus_s is None:
        return "not tried: the job never trained again"
    return "" if facts.gpus_s <= AT_ONCE_S else f"it waited {facts.gpus_s:.0f} s"


def _history(_scenario: Scenario, facts: Facts) -> str:
    if not facts.newer:
        return ""
    about = [told for told in facts.incidents if told.attempt == str(facts.attempt)]
    return "" if about else f"no incident of attempt {facts.attempt} is on record"


def _saves(_scenario: Scenario, facts: Facts) -> str:
    return ", ".join(facts.saves)


def _late_lines(_scenario: Scenario, facts: Facts) -> str:
    return f"{facts.late_lines} lines" if facts.late_lines else ""


def _late_points(_scenario: Scenario, facts: Facts) -> str:
    return f"{facts.late_points} points" if facts.late_points else ""


def _unchecked(_scenario: Scenario, facts: Facts) -> str:
    for node in facts.victims:
        checked = _checked_unix(node, facts)
        if checked < facts.over_unix + CHECK_S:
            return f"{node} was taken back {checked - facts.over_unix:.1f} s after its link was healed"
        if node not in facts.drained and checked == math.inf:
            return f"{node} is back in service, and no check is on record"
        if any(line.node == node and line.unix < checked for line in facts.newer):
            return f"ranks of a newer attempt on {node} before it was checked"
    return ""


def _stacks(scenario: Scenario, facts: Facts) -> str:
    return "" if any(told.stacks for told in right_ones(scenario, facts)) else "no stack is kept"


def _loop(_scenario: Scenario, facts: Facts) -> str:
    most = 4
    return f"{len(facts.attempts)} attempts" if len(facts.attempts) > most else ""


def _hang(_scenario: Scenario, facts: Facts) -> str:
    return "" if facts.newer or facts.state != "RUNNING" else "it runs, and no rank makes a step"


def _restart(_scenario: Scenario, facts: Facts) -> str:
    if facts.newer or facts.restarts:
        return f"attempts {', '.join(map(str, facts.attempts))}, {facts.restarts} restarts"
    grown = any(line.what == "step" and line.unix > (facts.over_unix or facts.fault_unix) for line in facts.lines)
    return "" if grown else "no step was made after the fault was over"


def _drained(_scenario: Scenario, facts: Facts) -> str:
    return ", ".join(f"{node} ({why})" for node, why in sorted(facts.drained.items()))


def _requeued(_scenario: Scenario, facts: Facts) -> str:
    return f"{facts.restarts} times" if facts.restarts else ""


def _incidents(scenario: Scenario, facts: Facts) -> str:
    by = Counter(told.by for told in facts.incidents)
    wrong = sorted({told.kind for told in facts.incidents} - scenario.kinds)
    # Launcher and watchdog each keep a journal; in either it is to be one.
    if wrong or any(count > 1 for count in by.values()) or not by:
        said = ", ".join(f"{told.by}: {told.kind} {told.node}".rstrip() for told in facts.incidents)
        return said or "none"
    return ""


def _unnamed(_scenario: Scenario, facts: Facts) -> str:
    named = any(told.kind == IncidentKind.SWITCH_SUSPECT for told in facts.incidents)
    silent = [node for node in facts.victims if node in facts.drained]
    theirs = [node for node in silent if "leaf" not in facts.drained[node] and "switch" not in facts.drained[node]]
    if theirs and not named:
        return ", ".join(f"{node} ({facts.drained[node]})" for node in theirs)
    return ""


def _from_zero(_scenario: Scenario, facts: Facts) -> str:
    resumed = [line.step for line in facts.newer if line.what == "resumed"]
    first = facts.first_step
    if (resumed and min(resumed) == 0) or (first and not resumed):
        return "it started from step 0"
    return "" if "skipped step-" in facts.output or not resumed else "the log does not say what was passed over"


def _twice(_scenario: Scenario, facts: Facts) -> str:
    if facts.restarts > 1:
        return f"requeued {facts.restarts} times"
    counts = Counter(f"{one.remedy} {one.node or one.attempt}" for one in facts.actions)
    return ", ".join(what for what, count in counts.items() if count > 1)


_CHECKS: dict[Never, Callable[[Scenario, Facts], str]] = {
    Never.BAD_NODE: _bad_node,
    Never.REPEATED: _too_many,
    Never.GRES: _gres,
    Never.HISTORY: _history,
    Never.ZOMBIE_SAVES: _saves,
    Never.ZOMBIE_LINES: _late_lines,
    Never.ZOMBIE_METRICS: _late_points,
    Never.UNCHECKED: _unchecked,
    Never.STACKS: _stacks,
    Never.LOOP: _loop,
    Never.HANG: _hang,
    Never.RESTART: _restart,
    Never.DRAINED: _drained,
    Never.REQUEUED: _requeued,
    Never.INCIDENTS: _incidents,
    Never.UNNAMED_LEAF: _unnamed,
    Never.FROM_ZERO: _from_zero,
    Never.TWICE: _twice,
}
