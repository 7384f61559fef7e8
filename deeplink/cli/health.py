"""`deeplink health`: run a node's checks once."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import click
from typing_extensions import override

from deeplink.cli.options import flag, json_option, option, real
from deeplink.cli.output import print_json, print_table
from deeplink.core.clock import SystemClock
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.finding import Severity
from deeplink.core.text import printable
from deeplink.core.timeouts import call_with_timeout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import NoReturn

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.finding import Finding
    from deeplink.scheduler.node.settings import Off
    from deeplink.scheduler.node.watching import HealthCheck, Looked

DEADLINE_S = 30.0
BETWEEN_S = 1.0  # between the two looks: what rises is seen by comparing
_NAGIOS = {
    Severity.ERROR: ("CRITICAL", 2),
    Severity.WARNING: ("WARNING", 1),
    Severity.NOTE: ("OK", 0),
    Severity.UNKNOWN: ("UNKNOWN", 3),
}
_NAMED = 3  # findings in Nagios's one line

_EPILOG = """
All checks look at the same time, twice, a second apart, each in a thread or child of its own: one that hangs is
reported and left alone. Nothing is restarted; only what this node had at its best is kept. What the agents find,
after several bad looks, is in their metrics and at the watchdog.

\b
Examples:
  deeplink health
  deeplink health --list
  deeplink health --check disk --check gpu
  deeplink health --once --nagios      as a Nagios plugin, or in Slurm's HealthCheckProgram
  deeplink health --json | jq '.findings[] | select(.severity == "drain")'

\b
Exit codes: 0 nothing wrong, or nothing that asks for a comment or a drain; 1 something does; 2 wrong usage or
configuration. With --nagios: 0 OK, 1 a comment, 2 a drain, 3 unknown.
"""


class _Plugin(click.Command):
    """With --nagios, whatever is wrong with us is UNKNOWN: it says nothing of the node.

    Wrong usage, too: click's own exit code for it, 2, would ask for a drain.
    """

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        nagios = "--nagios" in args  # click takes them out
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as problem:
            if not nagios or ctx.resilient_parsing:
                raise
            raise _unknown(problem) from problem

    @override
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as problem:
            if not ctx.params["nagios"]:
                raise
            raise _unknown(problem) from problem


def _unknown(problem: Exception) -> click.exceptions.Exit:
    """Say what is wrong with us as a plugin does; return what ends the command so."""
    if isinstance(problem, click.ClickException):
        said = problem.format_message()
    else:
        said = str(problem) if isinstance(problem, DeepLinkError) else f"{type(problem).__name__}: {problem}"
    click.echo(f"UNKNOWN: {' '.join(said.split())}")
    return click.exceptions.Exit(_NAGIOS[Severity.UNKNOWN][1])


def _check_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from deeplink.scheduler.node.settings import BUILT_IN

    return [name for name in BUILT_IN if name.startswith(incomplete)]


@click.command("health", cls=_Plugin, epilog=_EPILOG)
@flag("--once", "Look once: quicker, but does not detect counters that rise.")
@option("--check NAME", "This check only; repeatable.", name="names", multiple=True, shell_complete=_check_names)
@flag("--list", "List the checks of this node, and end.", name="as_list")
@json_option("Print one JSON object.")
@flag("--nagios", "Print one line, and exit as a Nagios plugin.")
@real(
    "--deadline SECONDS",
    "End by then, whatever hangs. Slurm ends a HealthCheckProgram after 60.",
    1,
    3600,
    default=DEADLINE_S,
)
@flag("--forget", "Forget what this node had at its best (GPUs, links), and end.")
def command(
    *,
    once: bool,
    names: tuple[str, ...],
    as_list: bool,
    as_json: bool,
    nagios: bool,
    deadline: float,
    forget: bool,
) -> None:
    """Look after this node's health: run its checks once, and say what is wrong."""
    from deeplink.scheduler.node.reading import file_in

    config, clock = load_config(), SystemClock()
    if forget:
        click.echo(_forgotten(file_in(config.state)))
        return
    end = clock.monotonic() + deadline
    off, checks = _checks(config, clock, deadline)
    chosen = _chosen(checks, names)
    if as_list:
        _list(chosen, off, as_json=as_json)
        return
    on = [check for check in chosen if config.health and not (_why_off(check, off) or check.absent)]
    looked, findings = _looked(on, clock, end, once=once)
    if nagios:
        line, code = nagios_line(findings, any_looked=bool(looked))
        click.echo(line)
        _end(code)
    if as_json:
        facts = [{"check": one.check, "severity": one.severity.action, "problem": one.text} for one in findings]
        times = [{"check": one.check.name, "took_s": one.took_s} for one in looked]
        worst = findings[0].severity.action if findings else None
        print_json({"worst": worst, "findings": facts, "checks": times}, indent=1)
    else:
        _print(chosen, looked, findings, off)
    _end(exit_code(findings))


def _forgotten(path: Path) -> str:
    """Drop what this node had at its best; return what to say of it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return f"nothing to forget: there is no {path} (a standing agent's is below its own DEEPLINK_STATE)"
    except OSError as problem:
        raise DeepLinkError(
            f"{path}: {problem.strerror or problem}; nothing is forgotten",
            remedy="Run it as the agent's user, with its DEEPLINK_STATE; where the Ansible role set it up: "
            "`deeplink-node health --forget`.",
        ) from problem
    agent = "an agent that runs has it still, and may write it again: stop it first"
    return f"forgotten: what this node had at its best, in {path}; {agent}"


def _checks(config: Config, clock: Clock, deadline: float) -> tuple[Off, list[HealthCheck]]:
    """Return the switch and the checks; the folders that they come from may hang."""
    from deeplink.rpc.daemon import member_name
    from deeplink.scheduler.node.settings import read_switch, switch_paths
    from deeplink.scheduler.node.watching import CheckPaths, checks_of

    place = CheckPaths(node=member_name(config.node), store=config.store.absolute(), once=True)

    def prepared() -> tuple[Off, list[HealthCheck]]:
        return read_switch(switch_paths(config)), checks_of(config, place, clock)

    try:
        return call_with_timeout(prepared, deadline)
    except TimeoutError:
        raise DeepLinkError(
            f"the checks could not be put together within {deadline:g} s",
            remedy="A folder hangs: that of health_folder, of the state, or one on PATH.",
        ) from None


def _chosen(checks: list[HealthCheck], names: tuple[str, ...]) -> list[HealthCheck]:
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no check {name!r}; there are {', '.join(known)}", param_hint="--check")
    return [check for check in checks if not names or check.name in names]


def _looked(
    checks: list[HealthCheck], clock: Clock, end: float, *, once: bool
) -> tuple[list[Looked], list[Finding]]:
    """Return the looks that count, and what they find."""
    from deeplink.scheduler.node.watching import closed, found_by, looked_at

    looked = looked_at(checks, clock, end - clock.monotonic())
    again = [one.check for one in looked if one.took_s is not None]
    if not once and clock.monotonic() + 2 * BETWEEN_S < end:
        clock.sleep(BETWEEN_S)
        second = {one.check.name: one for one in looked_at(again, clock, end - clock.monotonic())}
        looked = [second.get(one.check.name, one) for one in looked]
    closed(checks, BETWEEN_S)
    order = [check.name for check in checks]
    looked.sort(key=lambda one: order.index(one.check.name))
    return looked, found_by(looked, clock.unix())


def _end(code: int) -> NoReturn:
    """Exit at once: a look that hangs in a thread must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name.startswith("deeplink-") for thread in threading.enumerate()):
        os._exit(code)
    raise click.exceptions.Exit(code)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 when something asks for a comment or a drain, else 0."""
    return int(any(finding.severity >= Severity.WARNING for finding in findings))


def nagios_line(findings: Sequence[Finding], *, any_looked: bool = True) -> tuple[str, int]:
    """Return the line and the exit code of a Nagios plugin; `findings` begin with the gravest.

    What is only observed leaves it OK. UNKNOWN only where nothing worse is known.
    """
    bad = [finding for finding in findings if finding.severity >= Severity.WARNING]
    unknown = [finding for finding in findings if finding.severity is Severity.UNKNOWN]
    shown = bad or unknown or findings
    if not shown:
        return "OK: all checks are well" if any_looked else "OK: no check is on, or has anything to look at", 0
    more = f" (and {len(shown) - _NAMED} more)" if len(shown) > _NAMED else ""
    said = "; ".join(f"{finding.check}: {finding.text}" for finding in shown[:_NAMED])
    word, code = _NAGIOS[shown[0].severity]
    return printable(f"{word}: {said}{more}".replace("|", "/")), code  # a bar would begin performance data


def _print(chosen: Sequence[HealthCheck], looked: Sequence[Looked], findings: Sequence[Finding], off: Off) -> None:
    width = max((len(check.name) for check in chosen), default=0)
    times = {one.check.name: one.took_s for one in looked}
    for check in chosen:
        own = [finding for finding in findings if finding.check == check.name]
        if check.absent:
            state = f"-  {check.absent}"
        elif check.name not in times:
            state = f"off ({_why_off(check, off) or 'configuration'})"
        else:
            took_s = times[check.name]
            took = f"{took_s:.2f} s" if took_s is not None else "hangs"
            worst = max((one.severity for one in own), default=None)
            state = f"{worst.action if worst is not None else 'ok'}  ({took})"
        click.echo(printable(f"{check.name:<{width}}  {state}"))
        for finding in own:
            click.echo(printable(f"{'':<{width}}  {finding.severity.action}: {finding.text}"))


def _why_off(check: HealthCheck, off: Off) -> str:
    if check.name in off:
        return "health-off"
    return "configuration" if check.timing.off else ""


def _list(checks: Sequence[HealthCheck], off: Off, *, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "check": check.name,
                "about": check.about,
                "interval_s": check.timing.interval_s,
                "deadline_s": check.timing.deadline_s,
                "bad": check.timing.bad,
                "good": check.timing.good,
                "most": check.timing.most.action,
                "off": bool(_why_off(check, off)),
                "absent": check.absent,
            }
            for check in checks
        ]
        print_json({"checks": rows}, indent=1)
        return
    table = [("check", "every", "deadline", "bad", "good", "at most", "", "")]
    for check in checks:
        timing = check.timing
        state = f"none: {check.absent}" if check.absent else "off" if _why_off(check, off) else "on"
        times = (f"{timing.interval_s:g} s", f"{timing.deadline_s:g} s", str(timing.bad), str(timing.good))
        table.append((check.name, *times, timing.most.action, state, check.about))
    print_table(table)
