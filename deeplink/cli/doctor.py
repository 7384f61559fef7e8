"""`deeplink doctor`: is this site fit for the first job, and what is to be changed where it is not?"""

from __future__ import annotations

import os
import sys

import click

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
@click.option(
    "--nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Look at so many nodes. [default: all of the allocation, else up to 4 idle ones]",
)
@click.option("--here", is_flag=True, help="Look at this host alone, without a step.")
@click.option("--quick", is_flag=True, help="Look at no node: ask Slurm only.")
@click.option(
    "--disk-mib",
    type=click.IntRange(0, 16_384),
    default=256,
    show_default=True,
    metavar="MIB",
    help="So much is written to each store and read back; 0: nothing.",
)
@click.option(
    "--srun-option",
    "srun_options",
    multiple=True,
    metavar="OPTION",
    help="Hand an option to the step's srun; repeatable.",
)
@click.option("--explain", metavar="CHECK", help="Say what a check tells and why it matters, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON object.")
@click.option("--as-node", metavar="RUN", hidden=True, help="Be a node of the step.")
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
    from deeplink.cli.doctor_printing import as_json_text, as_text
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.doctor.checks import check_named, judge
    from deeplink.scheduler.doctor.examine import DoctorRequest, Examination
    from deeplink.scheduler.doctor.finding import DoctorSeverity
    from deeplink.scheduler.slurm.command import run

    if explain is not None:
        check = check_named(explain)
        click.echo(f"{check.name} ({check.group})\n\n{check.about}")
        return 0
    if [here, quick, nodes is not None].count(True) > 1:
        raise click.UsageError("--here, --quick and --nodes contradict each other: give one")
    wish = DoctorRequest(nodes=nodes, here=here, quick=quick, disk_bytes=disk_mib << 20, srun_options=srun_options)
    findings = judge(Examination(load_config(), wish, run, SystemClock(), _say, os.environ).evidence())
    click.echo(as_json_text(findings) if as_json else as_text(findings))
    return int(any(finding.severity is DoctorSeverity.ERROR for finding in findings))


def _say(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


def _be_node(run: str) -> None:
    """Take part in a step: the doctor speaks to us over standard input, and we to it over standard output."""
    import signal

    from deeplink.clock import SystemClock
    from deeplink.config import ConfigError, load_config
    from deeplink.daemon import member_name
    from deeplink.scheduler.doctor.part import NodePart, take_part, tell_problem

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)  # so that the markers are removed
    try:
        config = load_config()
    except ConfigError as problem:
        tell_problem(member_name(""), str(problem), click.echo)
        return
    take_part(NodePart(config, run, SystemClock()), sys.stdin.fileno(), click.echo)
