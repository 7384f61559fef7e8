"""`deeplink health`: is this node well?"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import click
from typing_extensions import override

from deeplink.errors import DeepLinkError
from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from pathlib import Path
    from typing import NoReturn

    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.scheduler.health.check import HealthCheck
    from deeplink.scheduler.health.once import Looked
    from deeplink.scheduler.health.switch import Off
    from deeplink.scheduler.watch.records import HealthFinding

DEADLINE_S = 30.0
BETWEEN_S = 1.0
"""Between the two looks: what rises is seen by comparing."""
NAGIOS_UNKNOWN = 3

_EPILOG = """
All checks look at the same time, twice, a second apart, each in a thread or child of its own: one that hangs is
told and left alone. Nothing is started anew; kept is only what this node had at its best. What the agents find,
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


class HangsError(DeepLinkError):
    """The checks cannot even be listed."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(
            f"the checks could not be put together within {deadline_s:g} s",
            remedy="A folder hangs: that of health_folder, of the state, or one on PATH.",
        )


class ForgetError(DeepLinkError):
    """What this node had at its best cannot be dropped."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; nothing is forgotten",
            remedy="Run it as the agent's user, with its DEEPLINK_STATE; where the Ansible role set it up: "
            "`deeplink-node health --forget`.",
        )
        self.path, self.problem = path, problem


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
    return click.exceptions.Exit(NAGIOS_UNKNOWN)


def _check_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from deeplink.scheduler.health.settings import BUILT_IN

    return [name for name in BUILT_IN if name.startswith(incomplete)]


@click.command("health", cls=_Plugin, epilog=_EPILOG)
@click.option("--once", is_flag=True, help="Look once: quicker, and blind for what rises.")
@click.option(
    "--check",
    "names",
    multiple=True,
    metavar="NAME",
    shell_complete=_check_names,
    help="This check only; repeatable.",
)
@click.option("--list", "as_list", is_flag=True, help="List the checks of this node, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--nagios", is_flag=True, help="Print one line, and exit as a Nagios plugin.")
@click.option(
    "--deadline",
    type=FiniteRange(1, 3600),
    default=DEADLINE_S,
    show_default=True,
    metavar="SECONDS",
    help="End by then, whatever hangs. Slurm ends a HealthCheckProgram after 60.",
)
@click.option("--forget", is_flag=True, help="Forget what this node had at its best (GPUs, links), and end.")
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
    from deeplink.cli import health_printing as printing
    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.scheduler.health.seen import file_in

    config, clock = load_config(), SystemClock()
    if forget:
        click.echo(_forgotten(file_in(config.state)))
        return
    end = clock.monotonic() + deadline
    off, checks = _checks(config, clock, deadline)
    chosen = _chosen(checks, names)
    if as_list:
        click.echo(printing.listed_json(chosen, off) if as_json else printing.listed(chosen, off))
        return
    looking = [check for check in chosen if not (check.absent or check.timing.off or check.name in off)]
    if not config.health:
        looking = []
    looked, findings = _looked(looking, clock, end, once=once)
    if nagios:
        line, code = printing.nagios(findings, any_looked=bool(looked))
        click.echo(line)
        _end(code)
    if as_json:
        click.echo(printing.as_json_text(looked, findings))
    else:
        click.echo(printing.as_text(chosen, looked, findings, off))
    _end(printing.exit_code(findings))


def _forgotten(path: Path) -> str:
    """Drop what this node had at its best; return what to say of it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return f"nothing to forget: there is no {path} (a standing agent's is below its own DEEPLINK_STATE)"
    except OSError as problem:
        raise ForgetError(path, problem.strerror or str(problem)) from problem
    agent = "an agent that runs has it still, and may write it again: stop it first"
    return f"forgotten: what this node had at its best, in {path}; {agent}"


def _checks(config: Config, clock: Clock, deadline: float) -> tuple[Off, list[HealthCheck]]:
    """Return the switch and the checks; the folders that they come from may hang."""
    from deeplink.call_with_timeout import call_with_timeout
    from deeplink.daemon import member_name
    from deeplink.scheduler.health.builtin import CheckPaths, checks_of
    from deeplink.scheduler.health.switch import read_switch, switch_paths

    place = CheckPaths(node=member_name(config.node), store=config.store.absolute(), once=True)

    def prepared() -> tuple[Off, list[HealthCheck]]:
        return read_switch(switch_paths(config)), checks_of(config, place, clock)

    try:
        return call_with_timeout(prepared, deadline)
    except TimeoutError:
        raise HangsError(deadline) from None


def _chosen(checks: list[HealthCheck], names: tuple[str, ...]) -> list[HealthCheck]:
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no check {name!r}; there are {', '.join(known)}", param_hint="--check")
    return [check for check in checks if not names or check.name in names]


def _looked(
    checks: list[HealthCheck], clock: Clock, end: float, *, once: bool
) -> tuple[list[Looked], list[HealthFinding]]:
    """Return the looks that count, and what they find."""
    from deeplink.scheduler.health.check import closed
    from deeplink.scheduler.health.once import found_by, looked_at

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
    import os

    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name.startswith("deeplink-") for thread in threading.enumerate()):
        os._exit(code)
    raise click.exceptions.Exit(code)
