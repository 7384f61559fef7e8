"""`deeplink operate`: have the watchdog do by hand what an operator decides."""

from __future__ import annotations

import secrets
import shlex
import time
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, json_option, option, path_option
from deeplink.cli.output import print_json, warn
from deeplink.core.config import load_config
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.scheduler.watch.operator_requests import OperatorClient
    from deeplink.v1.watch_pb2 import OperationPlan, OperationReply, OperationRequest

FOLLOW_S = 2.0  # between two questions whether it has ended
VERBS = (
    "acknowledge",
    "reopen",
    "drain",
    "resume",
    "requeue",
    "release",
    "cancel",
    "warm",
    "evict",
    "pause-watchdog",
    "resume-watchdog",
)
_EPILOG = """
The watchdog at `watch` of the configuration does it, with its own rights, and writes down who, when and why; the
console's actions go the same way. First it says which commands it will run, and asks; where something has changed
between the question and the answer, nothing is done. A node that somebody else drained is resumed with --force
alone. Operators are root, the watchdog's user and those of `deeplink watch --operators`, as MUNGE proves, and
holders of a token of `deeplink watch --mint USER --operator`.

\b
Verbs:
  acknowledge, reopen INCIDENT       say that you look after it; take that back
  drain, resume NODE                 take a node out of Slurm's service; back into it
  requeue, release, cancel JOB       start it again; let a held one start; end it
  warm DATASET --nodes LIST          bring its shards onto these nodes
  evict DATASET                      drop its shards from the nodes' SSDs
  pause-watchdog, resume-watchdog    have it take no action of its own; have it act again

\b
Examples:
  deeplink operate drain n7 --why "fan is loud"
  deeplink operate resume n7 --why "fan replaced"
  deeplink operate release 4711 --why "quota raised" --yes
  deeplink operate acknowledge 12 --why "on it"
  deeplink operate warm imagenet --nodes n[0-7] --why "tonight's run"
  deeplink operate pause-watchdog --why "rewiring leaf 3"
  deeplink operate drain n7 --why x --dry-run       what it would do

\b
Exit codes: 0 done; 1 refused or failed; 2 wrong usage.
"""


@click.command("operate", epilog=_EPILOG)
@click.argument("verb", type=click.Choice(VERBS), metavar="VERB")
@click.argument("target", default="", metavar="[NODE|JOB|DATASET|INCIDENT]")
@option("--why TEXT", "The reason, written down with it.", default="")
@option("--nodes LIST", "Of warm: onto these nodes.", default="")
@flag("--force", "Resume what is not ours to resume, or evict what cannot be had again.")
@flag("-y --yes", "Do not ask.")
@flag("--dry-run", "Only say what would be done.")
@path_option("--token-file", "0600 file with an operator's token; without it MUNGE proves who asks.")
@json_option()
def command(
    *,
    verb: str,
    target: str,
    why: str,
    nodes: str,
    force: bool,
    yes: bool,
    dry_run: bool,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Have the watchdog do by hand what an operator decides."""
    from deeplink.scheduler.watch.operator_requests import (
        DEFAULT_WATCH,
        OperatorCallError,
        OperatorClient,
        by_hand,
    )
    from deeplink.v1.watch_pb2 import OperationRequest

    if not why and not dry_run:
        raise click.UsageError("--why TEXT: the reason is written down with what is done")
    client = OperatorClient(load_config().watch or DEFAULT_WATCH, token_file=token_file)
    request = OperationRequest(
        request=secrets.token_hex(16), verb=verb, target=target, nodes=nodes, why=why, force=force
    )
    try:
        plan = client.plan(request)
    except OperatorCallError as problem:
        if not problem.is_away:
            raise
        commands = "; ".join(by_hand(request)) or "none: only a watchdog keeps it"
        raise DeepLinkError(f"no watchdog does it: {problem}", remedy=f"By hand: {commands}") from problem
    _show(plan, as_json=as_json and dry_run)
    if dry_run:
        return
    if plan.refused:
        raise DeepLinkError(plan.refused, remedy=plan.remedy)
    if not yes:
        click.confirm("Do it?", abort=True, err=True)
    request.saw = plan.saw
    done = _followed(client, request)
    if as_json:
        facts = {"outcome": done.outcome, "result": done.result, "undo": done.undo}
        print_json({"request": request.request, **facts, "commands": list(done.commands)})
    else:
        click.echo(printable(f"{done.outcome}: {done.result}"))
        if done.outcome == "done" and done.undo:
            words = ["deeplink", "operate", done.undo, *filter(None, [target]), "--why", "TEXT"]
            click.echo(f"taken back by: {shlex.join(words)}")
    if done.outcome != "done":
        raise click.exceptions.Exit(1)


def _followed(client: OperatorClient, request: OperationRequest) -> OperationReply:
    """Return the end of it; interrupted, it goes on, and is found again by its id."""
    done = client.act(request)
    try:
        while not done.outcome:
            time.sleep(FOLLOW_S)
            done = client.act(request)
    except KeyboardInterrupt:
        warn("it goes on; the console shows its end")
        raise
    return done


def _show(plan: OperationPlan, *, as_json: bool) -> None:
    if as_json:
        facts = {"refused": plan.refused, "remedy": plan.remedy, "undo": plan.undo, "remarks": list(plan.remarks)}
        print_json({"commands": list(plan.commands), "saw": plan.saw, **facts})
        return
    for line in plan.commands:
        click.echo(printable(line), err=True)
    for line in plan.remarks:
        click.echo(printable(f"  {line}"), err=True)
    if plan.refused:
        click.echo(printable(f"  it would be refused: {plan.refused}. {plan.remedy}".rstrip()), err=True)
