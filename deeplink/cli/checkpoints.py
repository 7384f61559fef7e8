"""`deeplink checkpoints`: what is in a folder of checkpoints, whether it is whole, and what can go."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.checkpoints.inspection import InspectedCheckpoint, Pruning
    from deeplink.checkpoints.interval import Advice

_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

_LS_EPILOG = """
Looks at sizes, reads no contents, and claims nothing: a running job is not disturbed. Besides it advises how often
to save: from what the saves there cost, and from how often the job was restarted, or as you say.

\b
Examples:
  deeplink checkpoints ls checkpoints
  deeplink checkpoints ls checkpoints --mtbf 12             something fails every 12 hours
  deeplink checkpoints ls checkpoints --nodes 64 --json     at the failure rate published for 8-GPU nodes

\b
Exit codes: 0 listed, 1 no such folder or its claim cannot be read, 2 wrong usage.
"""
_VERIFY_EPILOG = """
Every byte is read and compared with the manifest. What a fenced attempt published is named, and does not count.

\b
Examples:
  deeplink checkpoints verify checkpoints
  deeplink checkpoints verify checkpoints step-0000000120.a3 --json

\b
Exit codes: 0 all are whole, 1 one is not or cannot be read (it is named) or there is none, 2 wrong usage.
"""
_PRUNE_EPILOG = """
The newest --keep whole ones stay, and those whose step is a multiple of --every. What is older goes, what fenced
attempts published too, earlier saves of one step, and unfinished saves of earlier attempts. Nothing goes unless it
is older than a checkpoint that was read to its last byte and is whole. What is damaged is kept, as .damaged-*.

\b
Examples:
  deeplink checkpoints prune checkpoints --keep 2 --dry-run
  deeplink checkpoints prune checkpoints --keep 1 --every 10000

\b
Exit codes: 0 done, 1 no such folder or it refuses, 2 wrong usage.
"""


@contextmanager
def _told(doing: str, folder: Path) -> Iterator[None]:
    """Say what the file system refuses, by the folder's name."""
    from deeplink.files import FileTroubleError

    try:
        yield
    except OSError as problem:
        raise FileTroubleError(doing, folder, problem) from problem


@click.group("checkpoints", epilog="Example: deeplink checkpoints ls FOLDER")
def command() -> None:
    """List, verify and prune checkpoints."""


@command.command("ls", epilog=_LS_EPILOG)
@_FOLDER
@click.option("--mtbf", type=FiniteRange(min=0, min_open=True), metavar="HOURS", help="One failure per so long.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes of the job, at the published rate.")
@click.option(
    "--restart",
    type=FiniteRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="From a failure to the first new step.",
)
@_JSON
def ls(*, folder: Path, mtbf: float | None, nodes: int | None, restart: float, as_json: bool) -> None:
    """List what is in a folder of checkpoints, newest first, and advise how often to save."""
    import json

    from deeplink.checkpoints.inspection import chosen, look, newest_claim, set_aside_before

    if mtbf is not None and nodes is not None:
        raise click.UsageError("--mtbf and --nodes are two ways to say one thing")
    with _told("list", folder):
        found = list(look(folder, chosen(folder), contents=False))
        advice, no_advice = _advice(folder, mtbf, nodes, restart)
        holder, kept = newest_claim(folder).attempt, set_aside_before(folder)
    if as_json:
        facts = {
            "folder": str(folder),
            "attempt": str(holder) if holder else None,
            "checkpoints": [_fields(one) for one in found],
            "set_aside": kept,
            "advice": _advice_fields(advice),
            "no_advice": no_advice,
        }
        click.echo(json.dumps(facts))
        return
    _list(found)
    for name in kept:
        click.echo(f"{name}: set aside as damaged; remove it when nobody needs it")
    click.echo(_advised(advice) if advice else f"no advice how often to save: {no_advice}")


def _advice(folder: Path, mtbf: float | None, nodes: int | None, restart: float) -> tuple[Advice | None, str]:
    from deeplink.checkpoints.advising import NoAdviceError, advice_for
    from deeplink.checkpoints.interval import mtbf_of_nodes
    from deeplink.clock import SystemClock

    mtbf_s = mtbf_of_nodes(nodes) if nodes else (mtbf * 3600 if mtbf else None)
    try:
        return advice_for(folder, now_unix=SystemClock().unix(), mtbf_s=mtbf_s, restart_s=restart), ""
    except NoAdviceError as none:
        return None, f"{none.what}. {none.remedy}"


def _advice_fields(advice: Advice | None) -> dict[str, Any] | None:
    import dataclasses

    return dataclasses.asdict(advice) if advice else None


def _advised(advice: Advice) -> str:
    return (
        f"save every {advice.every_s:,.0f} s: a save costs {advice.stall_s:.3g} s of training and is whole after"
        f" {advice.save_s:.3g} s; one failure per {advice.mtbf_s / 3600:,.1f} h ({advice.basis}),"
        f" {advice.restart_s:g} s to restart\n"
        f"  availability-optimal {advice.optimal_s:,.0f} s, Young {advice.young_s:,.0f} s,"
        f" Daly {advice.daly_s:,.0f} s; {advice.availability:.2%} of the time is work that lasts"
    )


def _fields(found: InspectedCheckpoint) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "name": found.entry.name,
        "step": found.entry.step,
        "state": found.state.value,
        "reason": found.reason,
        "latest": found.is_latest,
        "attempt": (manifest.attempt or None) if manifest else None,
        "created_unix": manifest.created_unix if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "files": len(manifest.files) if manifest else None,
        "ranks": manifest.world if manifest else None,
        "stall_s": manifest.stall_s if manifest else None,
        "save_s": manifest.save_s if manifest else None,
        "nonfinite": manifest.nonfinite if manifest else {},
    }


def _list(found: list[InspectedCheckpoint]) -> None:
    from deeplink.text import counted

    for one in found:
        click.echo(_line(one))
    if not found:
        click.echo("no checkpoints")
    for one in found:
        if one.manifest and one.manifest.nonfinite:
            names = ", ".join(f"{name} ({kind})" for name, kind in list(one.manifest.nonfinite.items())[:5])
            click.echo(f"{one.entry.name}: {counted(len(one.manifest.nonfinite), 'tensor')} not finite: {names}")


def _line(found: InspectedCheckpoint) -> str:
    import time

    from deeplink.text import printable, sized

    manifest = found.manifest
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_unix)) if manifest else "-"
    size, attempt = (sized(manifest.bytes), manifest.attempt or "-") if manifest else ("-", "-")
    state = f"{found.state.value}, latest" if found.is_latest else found.state.value
    reason = f": {printable(found.reason)}" if found.reason else ""
    return f"{found.entry.name:<24}  {when:<19}  {attempt:<10}  {size:>10}  {state}{reason}"


@command.command("verify", epilog=_VERIFY_EPILOG)
@_FOLDER
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_JSON
def verify(*, folder: Path, names: tuple[str, ...], as_json: bool) -> int:
    """Read checkpoints to the last byte and compare them with their manifests."""
    import json

    from deeplink.checkpoints.inspection import CheckpointState

    found = []
    for one in _verified(folder, names):
        found.append(one)
        if not as_json:
            click.echo(_line(one))
    right = bool(found) and not any(
        one.state in {CheckpointState.DAMAGED, CheckpointState.UNREADABLE} for one in found
    )
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "right": right, "checkpoints": list(map(_fields, found))}))
    elif not found:
        click.echo("no checkpoints")
    return 0 if right else 1


def _verified(folder: Path, names: tuple[str, ...]) -> Iterator[InspectedCheckpoint]:
    from deeplink.checkpoints.inspection import chosen, look
    from deeplink.cli.get_progress import shown_progress

    with _told("verify", folder):
        which = chosen(folder, names)
        with shown_progress("verifying", len(which), "checkpoints") as show:
            for one in look(folder, which, contents=True, read=lambda size: show(0, size)):
                show(1, 0)
                yield one


@command.command("prune", epilog=_PRUNE_EPILOG)
@_FOLDER
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Newest ones that stay.")
@click.option("--every", type=click.IntRange(min=1), metavar="STEPS", help="Multiples of this step stay, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_JSON
def prune(*, folder: Path, keep: int, every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints that are no longer needed."""
    import json

    from deeplink.checkpoints import inspection
    from deeplink.checkpoints.entries import Retention
    from deeplink.cli.get_progress import shown_progress

    with _told("prune", folder):
        pruning = inspection.plan_pruning(folder, Retention(keep, every or 0))
        if not dry_run:
            total = len(pruning.names) + len(pruning.drafts)
            with shown_progress("removing", total, "checkpoints") as show:
                inspection.prune(folder, pruning, lambda _name: show(1, 0))
    if as_json:
        facts = {"folder": str(folder), "dry_run": dry_run, "removed": list(pruning.names)}
        rest = {"drafts": list(pruning.drafts), "damaged": list(pruning.damaged), "bytes": pruning.bytes}
        click.echo(json.dumps({**facts, **rest}))
    else:
        _say_pruned(pruning, dry_run=dry_run)


def _say_pruned(pruning: Pruning, *, dry_run: bool) -> None:
    from deeplink.text import counted, sized

    would = "would remove" if dry_run else "removed"
    for name in (*pruning.names, *pruning.drafts):
        click.echo(f"{would} {name}")
    for name in pruning.damaged:
        click.echo(f"{'would set' if dry_run else 'set'} {name} aside: it is damaged")
    count = counted(len(pruning.names) + len(pruning.drafts), "checkpoint")
    click.echo(f"{would} {count}, {sized(pruning.bytes)}")
