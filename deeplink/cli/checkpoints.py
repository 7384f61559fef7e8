"""`deeplink checkpoints`: list, verify and prune a folder of checkpoints."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deeplink.cli.options import flag, integer, json_option, real
from deeplink.cli.output import ShownProgress, moment, print_json
from deeplink.core.clock import SystemClock
from deeplink.core.publish import file_trouble
from deeplink.core.text import counted, printable, sized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.checkpoints.inspection import InspectedCheckpoint
    from deeplink.checkpoints.interval import Advice

_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER")
_JSON = json_option("Print one JSON object.")

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
The newest --keep whole ones stay, and those whose step is a multiple of --every. Older ones are removed, and so
are those of fenced attempts, earlier saves of one step and unfinished saves of earlier attempts; all of them only
if they are older than a checkpoint that was read to its last byte and is whole. Damaged ones are kept, as
.damaged-*.

\b
Examples:
  deeplink checkpoints prune checkpoints --keep 2 --dry-run
  deeplink checkpoints prune checkpoints --keep 1 --every 10000

\b
Exit codes: 0 done, 1 no such folder or it refuses, 2 wrong usage.
"""


@contextmanager
def _file_errors(doing: str, folder: Path) -> Iterator[None]:
    """Raise what the file system refuses with the folder's name."""
    try:
        yield
    except OSError as problem:
        raise file_trouble(doing, folder, problem) from problem


@click.group("checkpoints", epilog="Example: deeplink checkpoints ls FOLDER")
def command() -> None:
    """List, verify and prune checkpoints."""


@command.command("ls", epilog=_LS_EPILOG)
@_FOLDER
@real("--mtbf HOURS", "One failure per so long.", 0, min_open=True)
@integer("--nodes N", "Nodes of the job, at the published rate.", 1)
@real("--restart SECONDS", "From a failure to the first new step.", 0, default=60.0)
@_JSON
def ls(*, folder: Path, mtbf: float | None, nodes: int | None, restart: float, as_json: bool) -> None:
    """List what is in a folder of checkpoints, newest first, and advise how often to save."""
    if mtbf is not None and nodes is not None:
        raise click.UsageError("--mtbf and --nodes are two ways to say one thing")
    from deeplink.checkpoints import inspection

    with _file_errors("list", folder):
        found = list(inspection.look(folder, inspection.chosen(folder), contents=False))
        advice, no_advice = _advice(folder, mtbf, nodes, restart)
        holder, kept = inspection.newest_claim(folder).attempt, inspection.set_aside_before(folder)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "attempt": str(holder) if holder else None,
                "checkpoints": [_fields(one) for one in found],
                "set_aside": kept,
                "advice": dataclasses.asdict(advice) if advice else None,
                "no_advice": no_advice,
            }
        )
        return
    for one in found:
        click.echo(_line(one))
    if not found:
        click.echo("no checkpoints")
    for one in found:
        if one.manifest and (bad := one.manifest.nonfinite):
            names = ", ".join(f"{name} ({kind})" for name, kind in list(bad.items())[:5])
            click.echo(f"{one.entry.name}: {counted(len(bad), 'tensor')} not finite: {names}")
    for name in kept:
        click.echo(f"{name}: set aside as damaged; remove it when it is not needed")
    click.echo(_advised(advice) if advice else f"no advice how often to save: {no_advice}")


def _advice(folder: Path, mtbf: float | None, nodes: int | None, restart: float) -> tuple[Advice | None, str]:
    from deeplink.checkpoints.interval import NoAdviceError, advice_for, mtbf_of_nodes

    mtbf_s = mtbf_of_nodes(nodes) if nodes else (mtbf * 3600 if mtbf else None)
    try:
        return advice_for(folder, now_unix=SystemClock().unix(), mtbf_s=mtbf_s, restart_s=restart), ""
    except NoAdviceError as none:
        return None, f"{none.what}. {none.remedy}"


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


def _line(found: InspectedCheckpoint) -> str:
    manifest = found.manifest
    when = moment(manifest.created_unix) if manifest else "-"
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
    from deeplink.checkpoints.inspection import CheckpointState, chosen, look

    found = []
    with _file_errors("verify", folder):
        which = chosen(folder, names)
        with ShownProgress("verifying", "checkpoints", len(which)) as progress:
            for one in look(folder, which, contents=True, read=lambda size: progress.add(0, size)):
                progress.add(1)
                found.append(one)
                if not as_json:
                    click.echo(_line(one))
    wrong = {CheckpointState.DAMAGED, CheckpointState.UNREADABLE}
    right = bool(found) and not any(one.state in wrong for one in found)
    if as_json:
        print_json({"folder": str(folder), "right": right, "checkpoints": list(map(_fields, found))})
    elif not found:
        click.echo("no checkpoints")
    return 0 if right else 1


@command.command("prune", epilog=_PRUNE_EPILOG)
@_FOLDER
@integer("--keep", "Newest ones that stay.", 1, default=3)
@integer("--every STEPS", "Multiples of this step stay, too.", 1)
@flag("--dry-run", "Only say what would go.")
@_JSON
def prune(*, folder: Path, keep: int, every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints that are no longer needed."""
    from deeplink.checkpoints import inspection
    from deeplink.checkpoints.claims import Retention

    with _file_errors("prune", folder):
        pruning = inspection.plan_pruning(folder, Retention(keep, every or 0))
        going = (*pruning.names, *pruning.drafts)
        if not dry_run:
            with ShownProgress("removing", "checkpoints", len(going)) as progress:
                inspection.prune(folder, pruning, lambda _name: progress.add(1))
    if as_json:
        facts = {"folder": str(folder), "dry_run": dry_run, "removed": list(pruning.names)}
        rest = {"drafts": list(pruning.drafts), "damaged": list(pruning.damaged), "bytes": pruning.bytes}
        print_json({**facts, **rest})
        return
    would = "would remove" if dry_run else "removed"
    for name in going:
        click.echo(f"{would} {name}")
    for name in pruning.damaged:
        click.echo(f"{'would set' if dry_run else 'set'} {name} aside: it is damaged")
    click.echo(f"{would} {counted(len(going), 'checkpoint')}, {sized(pruning.bytes)}")
