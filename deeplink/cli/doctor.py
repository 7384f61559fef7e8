"""`deeplink doctor`: check a site before its first job, and say what is to be changed."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, integer, json_option, option
from deeplink.cli.output import print_json
from deeplink.core.clock import SystemClock
from deeplink.core.config import ConfigError, load_config
from deeplink.core.finding import Severity
from deeplink.core.text import counted, printable
from deeplink.scheduler.sitecheck.doctor_checks import CHECKS, CheckGroup, check_named, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.core.finding import Finding


_GUIDE = "docs/doctor.md"
_EPILOG = """
Slurm is asked for its settings, nodes, partitions and switches. Then a step of some seconds runs on some nodes (up
to four idle ones, or those of the allocation it is started in): versions, folders, limits, clocks; the nodes
connect to each other's ports, leave markers in store, state and catalog and look for each other's, and write and
read a file in the store. All of that is removed again. No setting is changed, and no right is needed but to submit
a job.

\b
Examples:
  deeplink doctor                              Slurm's settings, and up to 4 idle nodes
  deeplink doctor --quick                      no step on the nodes
  deeplink doctor --nodes 8 --srun-option=--partition=gpu
  deeplink doctor --here                       this host instead of nodes
  deeplink doctor --explain credential-expiry  what a check tells, and why it matters
  deeplink doctor --json | jq '.findings[] | select(.severity == "error")'

\b
Exit codes: 0 no errors found (there may be warnings), 1 errors found, 2 wrong usage.
"""


@click.command("doctor", epilog=_EPILOG)
@integer("--nodes N", "Look at so many nodes. [default: all of the allocation, else up to 4 idle ones]", 1)
@flag("--here", "Look at this host alone, without a step.")
@flag("--quick", "Look at no node: ask Slurm only.")
@integer("--disk-mib MIB", "So much is written to each store and read back; 0: nothing.", 0, 16_384, default=256)
@option(
    "--srun-option OPTION", "Hand an option to the step's srun; repeatable.", name="srun_options", multiple=True
)
@option("--explain CHECK", "Say what a check tells and why it matters, and end.")
@json_option("Print the findings as one JSON object.")
@option("--as-node RUN", "Be a node of the step.", hidden=True)
def command(
    *,
    nodes: int | None,
    here: bool,
    quick: bool,
    disk_mib: int,
    srun_options: tuple[str, ...],
    explain: str | None,
    as_json: bool,
    as_node: str | None,
) -> int:
    """Check a site before the first job, and say what is to be changed."""
    if as_node is not None:
        _be_node(as_node)
        return 0
    if explain is not None:
        check = check_named(explain)
        click.echo(f"{check.name} ({check.group})\n\n{check.about}")
        return 0
    from deeplink.scheduler.sitecheck.examine import DoctorRequest, Examination
    from deeplink.scheduler.slurm.command import run

    if [here, quick, nodes is not None].count(True) > 1:
        raise click.UsageError("--here, --quick and --nodes contradict each other: give one")
    wanted = DoctorRequest(
        nodes=nodes, here=here, quick=quick, disk_bytes=disk_mib << 20, srun_options=srun_options
    )
    findings = judge(Examination(load_config(), wanted, run, SystemClock(), _say, os.environ).evidence())
    if as_json:
        print_json(document(findings), indent=1)
    else:
        click.echo(as_text(findings))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _say(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


def _be_node(run: str) -> None:
    """Take part in a step: the doctor speaks to us over standard input, and we to it over standard output."""
    from deeplink.rpc.daemon import member_name
    from deeplink.scheduler.sitecheck.part import NodePart, take_part, tell_problem

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)  # so that the markers are removed
    try:
        config = load_config()
    except ConfigError as problem:
        tell_problem(member_name(""), str(problem), click.echo)
        return
    take_part(NodePart(config, run, SystemClock()), sys.stdin.fileno(), click.echo)


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings in their groups, then the remedies, then how many of which kind there are."""
    lines: list[str] = []
    for group in CheckGroup:
        lines += [f"{group}:", *_lines([one for one in findings if check_named(one.check).group is group]), ""]
    remedies: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        if finding.remedy and finding.severity is not Severity.UNKNOWN:
            remedies.setdefault((finding.check, finding.remedy), finding)
    if remedies:
        worst_first = sorted(remedies.values(), key=lambda finding: -finding.severity)
        lines += ["What to change (worst first):", *(_line(one, one.remedy) for one in worst_first), ""]
    count = Counter(finding.severity for finding in findings)
    said = ", ".join(
        [
            counted(count[Severity.ERROR], "error"),
            counted(count[Severity.WARNING], "warning"),
            counted(count[Severity.NOTE], "note"),
            f"{count[Severity.UNKNOWN]} not looked at",
            f"{count[Severity.OK]} ok",
        ]
    )
    return "\n".join([*lines, f"{said}. Why each matters: `deeplink doctor --explain CHECK`, or {_GUIDE}"])


def _lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each finding; checks that could not look for one and the same reason share a line."""
    lines: list[str] = []
    unseen: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        if one.severity is Severity.UNKNOWN:
            unseen.setdefault((one.text, one.where), []).append(one)
        else:
            lines.append(_finding_line(one))
    for (said, _), alike in unseen.items():
        if len(alike) == 1:
            lines.append(_finding_line(alike[0]))
        else:
            checks = ", ".join(one.check for one in alike)
            lines.append(printable(f"  {Severity.UNKNOWN.word:<8} {said}: {checks}"))
    return lines


def _finding_line(finding: Finding) -> str:
    return _line(finding, finding.text + (f"  [{finding.where}]" if finding.where else ""))


def _line(finding: Finding, said: str) -> str:
    widest = max(len(check.name) for check in CHECKS)
    return printable(f"  {finding.severity.word:<8} {finding.check:<{widest}}  {said}")


def document(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the same as JSON has it."""
    count = Counter(finding.severity for finding in findings)
    return {
        "errors": count[Severity.ERROR],
        "counts": {severity.word: count[severity] for severity in Severity},
        "findings": [
            {
                "check": finding.check,
                "group": check_named(finding.check).group.value,
                "severity": finding.severity.word,
                "where": finding.where,
                "said": finding.text,
                "remedy": finding.remedy,
                "see": f"{_GUIDE}#{finding.check}",
            }
            for finding in findings
        ],
    }
