"""Looking at each check once, all at the same time, within a bounded time: for the command."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.health.check import hung_look
from deeplink.scheduler.health.hysteresis import as_complained
from deeplink.scheduler.health.look import Look, gravity, one_line
from deeplink.scheduler.watch.records import HealthFinding, HealthSeverity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.clock import Clock
    from deeplink.scheduler.health.check import HealthCheck


@dataclass(frozen=True, slots=True)
class Looked:
    """What a check saw, and how long that took; `took_s` is None for one that did not end."""

    check: HealthCheck
    look: Look
    took_s: float | None


def looked_at(checks: Iterable[HealthCheck], clock: Clock, longest_s: float) -> list[Looked]:
    """Return what each check sees, within `longest_s`; one that has not ended by then hangs."""
    answers: queue.SimpleQueue[tuple[str, Look, float]] = queue.SimpleQueue()
    began = clock.monotonic()
    waiting = {check.name: check for check in checks}
    for check in waiting.values():
        threading.Thread(
            target=_look, args=(check, clock, answers), name=f"deeplink-{check.name}", daemon=True
        ).start()
    done: list[Looked] = []
    while waiting:
        latest = began + min(longest_s, max(check.timing.deadline_s for check in waiting.values()))
        try:
            name, look, took_s = answers.get(timeout=max(0.0, latest - clock.monotonic()))
        except queue.Empty:
            break
        check = waiting.pop(name)
        done.append(Looked(check, look.bounded(), took_s))
    passed = clock.monotonic() - began
    return [*done, *(Looked(check, hung_look(check, passed), None) for check in waiting.values())]


def _look(check: HealthCheck, clock: Clock, answers: queue.SimpleQueue[tuple[str, Look, float]]) -> None:
    began = clock.monotonic()
    try:
        look = check.look()
    except Exception as problem:  # noqa: BLE001 - whatever a check stumbles over says nothing of the node
        look = Look((), one_line(f"{type(problem).__name__}: {problem}"))
    answers.put((check.name, look, clock.monotonic() - began))


def found_by(looked: Iterable[Looked], unix: float) -> list[HealthFinding]:
    """Return the findings of looks at a time, the gravest first; a check's UNKNOWN only where it found nothing."""
    found = []
    for one in looked:
        name, look = one.check.name, one.look
        rule = one.check.timing.rule
        severities = [(as_complained(complaint, rule), complaint.problem) for complaint in look.complaints]
        if look.unknown and not severities:
            severities.append((HealthSeverity.UNKNOWN, look.unknown))
        found += [
            HealthFinding(check=name, severity=how, problem=said, since_unix=unix) for how, said in severities
        ]
    return sorted(found, key=lambda finding: (-gravity(finding.severity), finding.check, finding.problem))
