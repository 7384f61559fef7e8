"""What `deeplink doctor` prints: groups of checks, a line each, then what to change."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from deeplink.scheduler.doctor.checks import CHECKS, CheckGroup
from deeplink.scheduler.doctor.finding import DoctorFinding, DoctorSeverity
from deeplink.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GROUP_OF = {check.name: check.group for check in CHECKS}
_WIDEST = max(len(check.name) for check in CHECKS)
_GUIDE = "docs/doctor.md"


def as_text(findings: Sequence[DoctorFinding]) -> str:
    """Return the page: findings in their groups, then the remedies, then how many of which kind."""
    lines: list[str] = []
    for group in CheckGroup:
        lines += [f"{group}:", *_lines([one for one in findings if _GROUP_OF[one.check] is group]), ""]
    remedies = [
        finding for finding in findings if finding.remedy and finding.severity is not DoctorSeverity.UNKNOWN
    ]
    if remedies:
        lines += ["What to change (worst first):", *_remedies(remedies), ""]
    return "\n".join([*lines, _summary(findings)])


def _lines(findings: Sequence[DoctorFinding]) -> list[str]:
    """Return a line for each finding; what could not be looked at for one reason is told once, at the end."""
    told = [_line(finding) for finding in findings if finding.severity is not DoctorSeverity.UNKNOWN]
    unseen: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.severity is DoctorSeverity.UNKNOWN:
            unseen.setdefault((finding.said, finding.where), []).append(finding.check)
    for (said, where), checks in unseen.items():
        if len(checks) == 1:
            told.append(_line(DoctorFinding(DoctorSeverity.UNKNOWN, said, where=where, check=checks[0])))
        else:
            told.append(printable(f"  {DoctorSeverity.UNKNOWN:<8} {said}: {', '.join(checks)}"))
    return told


def _line(finding: DoctorFinding) -> str:
    where = f"  [{finding.where}]" if finding.where else ""
    return printable(f"  {finding.severity:<8} {finding.check:<{_WIDEST}}  {finding.said}{where}")


def _remedies(findings: Iterable[DoctorFinding]) -> list[str]:
    order = (DoctorSeverity.ERROR, DoctorSeverity.WARNING, DoctorSeverity.NOTE)
    told: dict[tuple[str, str], DoctorFinding] = {}
    for finding in findings:
        told.setdefault((finding.check, finding.remedy), finding)
    worst_first = sorted(told.values(), key=lambda finding: order.index(finding.severity))
    return [printable(f"  {one.severity:<8} {one.check:<{_WIDEST}}  {one.remedy}") for one in worst_first]


def _summary(findings: Sequence[DoctorFinding]) -> str:
    count = Counter(finding.severity for finding in findings)
    parts = [
        counted(count[DoctorSeverity.ERROR], "error"),
        counted(count[DoctorSeverity.WARNING], "warning"),
        counted(count[DoctorSeverity.NOTE], "note"),
        f"{count[DoctorSeverity.UNKNOWN]} not looked at",
        f"{count[DoctorSeverity.OK]} ok",
    ]
    return f"{', '.join(parts)}. Why each matters: `deeplink doctor --explain CHECK`, or {_GUIDE}"


def as_json_text(findings: Sequence[DoctorFinding]) -> str:
    """Return the same as one JSON object."""
    count = Counter(finding.severity for finding in findings)
    facts = {
        "errors": count[DoctorSeverity.ERROR],
        "counts": {severity.value: count[severity] for severity in DoctorSeverity},
        "findings": [
            {
                "check": finding.check,
                "group": _GROUP_OF[finding.check].value,
                "severity": finding.severity.value,
                "where": finding.where,
                "said": finding.said,
                "remedy": finding.remedy,
                "see": f"{_GUIDE}#{finding.check}",
            }
            for finding in findings
        ],
    }
    return json.dumps(facts, indent=1)
