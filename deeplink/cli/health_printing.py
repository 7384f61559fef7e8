"""What `deeplink health` prints: a line per check, then what is wrong; or JSON; or Nagios's one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import gravity
from deeplink.scheduler.watch.records import HealthSeverity
from deeplink.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.health.check import HealthCheck
    from deeplink.scheduler.health.once import Looked
    from deeplink.scheduler.health.switch import Off
    from deeplink.scheduler.watch.records import HealthFinding

_WORDS = {
    HealthSeverity.DRAIN: "CRITICAL",
    HealthSeverity.COMMENT: "WARNING",
    HealthSeverity.OBSERVE: "OK",
    HealthSeverity.UNKNOWN: "UNKNOWN",
}
_CODES = {HealthSeverity.DRAIN: 2, HealthSeverity.COMMENT: 1, HealthSeverity.OBSERVE: 0, HealthSeverity.UNKNOWN: 3}
_NAMED = 3


def exit_code(findings: Sequence[HealthFinding]) -> int:
    """Return 1 when something asks for a comment or a drain, else 0."""
    return int(any(gravity(finding.severity) >= gravity(HealthSeverity.COMMENT) for finding in findings))


def nagios(findings: Sequence[HealthFinding], *, any_looked: bool = True) -> tuple[str, int]:
    """Return the line and the exit code of a Nagios plugin; `findings` begin with the gravest.

    What is only observed leaves it OK. UNKNOWN only where nothing worse is known.
    """
    bad = [finding for finding in findings if gravity(finding.severity) >= gravity(HealthSeverity.COMMENT)]
    unknown = [finding for finding in findings if finding.severity is HealthSeverity.UNKNOWN]
    told = bad or unknown or findings
    if not told:
        return "OK: all checks are well" if any_looked else "OK: no check is on, or has anything to look at", 0
    more = f" (and {len(told) - _NAMED} more)" if len(told) > _NAMED else ""
    said = "; ".join(f"{finding.check}: {finding.problem}" for finding in told[:_NAMED])
    worst = told[0].severity
    # A bar would begin performance data.
    return printable(f"{_WORDS[worst]}: {said}{more}".replace("|", "/")), _CODES[worst]


def as_text(
    chosen: Sequence[HealthCheck], looked: Sequence[Looked], findings: Sequence[HealthFinding], off: Off
) -> str:
    """Return a line per check, and one per finding below it."""
    width = max((len(check.name) for check in chosen), default=0)
    times = {one.check.name: one.took_s for one in looked}
    lines = []
    for check in chosen:
        own = [finding for finding in findings if finding.check == check.name]
        lines.append(f"{check.name:<{width}}  {_state(check, own, times, off)}")
        lines += [f"{'':<{width}}  {finding.severity}: {finding.problem}" for finding in own]
    return "\n".join(map(printable, lines))


def _state(check: HealthCheck, own: Sequence[HealthFinding], times: dict[str, float | None], off: Off) -> str:
    if check.absent:
        return f"-  {check.absent}"
    if check.name not in times:
        return "off (health-off)" if check.name in off else "off (configuration)"
    took_s = times[check.name]
    took = f"{took_s:.2f} s" if took_s is not None else "hangs"
    worst = max((finding.severity for finding in own), key=gravity, default=None)
    return f"{worst or 'ok'}  ({took})"


def as_json_text(looked: Sequence[Looked], findings: Sequence[HealthFinding]) -> str:
    """Return the same as one JSON object."""
    facts = {
        "worst": findings[0].severity.value if findings else None,
        "findings": [
            {"check": one.check, "severity": one.severity.value, "problem": one.problem} for one in findings
        ],
        "checks": [{"check": one.check.name, "took_s": one.took_s} for one in looked],
    }
    return json.dumps(facts, indent=1)


def listed(checks: Sequence[HealthCheck], off: Off) -> str:
    """Return the checks as a table."""
    rows = [("check", "every", "deadline", "bad", "good", "at most", "", "")]
    for check in checks:
        timing = check.timing
        rows.append(
            (
                check.name,
                f"{timing.interval_s:g} s",
                f"{timing.deadline_s:g} s",
                str(timing.bad),
                str(timing.good),
                timing.most,
                _why_not(check, off),
                check.about,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(printable(line.rstrip()) for line in lines)


def listed_json(checks: Sequence[HealthCheck], off: Off) -> str:
    """Return the checks as one JSON object."""
    rows = [
        {
            "check": check.name,
            "about": check.about,
            "interval_s": check.timing.interval_s,
            "deadline_s": check.timing.deadline_s,
            "bad": check.timing.bad,
            "good": check.timing.good,
            "most": check.timing.most.value,
            "off": check.name in off or check.timing.off,
            "absent": check.absent,
        }
        for check in checks
    ]
    return json.dumps({"checks": rows}, indent=1)


def _why_not(check: HealthCheck, off: Off) -> str:
    if check.absent:
        return f"none: {check.absent}"
    return "off" if check.timing.off or check.name in off else "on"
