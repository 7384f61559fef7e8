"""`deeplink get`: samples into local files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.completion import PlaceType

if TYPE_CHECKING:
    from deeplink.copy_out import CopyTask

_EPILOG = """
As cp does: several places, or a DEST that is a folder or ends in a slash, go into that folder; one place becomes
DEST. A file appears whole or not at all; one that is there is replaced.

\b
Examples:
  deeplink get mnist/train/7/00001.png seven.png
  deeplink get mnist/train/7/00001.png mnist/train/7/00002.png pictures/
  deeplink get -r mnist/train/7 sevens            the whole folder
  deeplink get -r mnist@3f2a91 old --dry-run      what it would come to

\b
Exit codes: 0 done, 1 some samples could not be read (the others are there), 2 wrong usage.
"""
_SHOWN = 10


@click.command("get", epilog=_EPILOG)
@click.argument("places", type=PlaceType(), nargs=-1, required=True, metavar="NAME[@VERSION][/PATH]...")
@click.argument("dest", type=click.Path())
@click.option("-r", "--recursive", is_flag=True, help="Folders, with all that is below them.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; progress goes to standard error.")
def command(*, places: tuple[str, ...], dest: str, recursive: bool, dry_run: bool, as_json: bool) -> int:
    """Copy samples into local files."""
    from deeplink.cli.get_progress import shown_progress
    from deeplink.copy_out import fetch, planned
    from deeplink.library import Library

    if not dest:
        raise click.UsageError("DEST is empty: name a file or a folder")
    errands = planned(Library(), places, dest, recursive=recursive)
    if dry_run:
        _say_plan(errands, as_json=as_json)
        return 0
    with shown_progress("copying", len(errands)) as progress:
        failed = [(errand, str(problem)) for errand, problem in fetch(errands, progress=progress)]
    _say_result(errands, failed, as_json=as_json)
    return 1 if failed else 0


def _say_plan(errands: list[CopyTask], *, as_json: bool) -> None:
    import json

    from deeplink.text import counted, sized

    size = sum(errand.bytes for errand in errands)
    if as_json:
        files = {str(errand.target): errand.path for errand in errands}
        click.echo(json.dumps({"files": len(errands), "bytes": size, "targets": files}))
        return
    click.echo(f"would write {counted(len(errands), 'file')}, {sized(size)}")
    for errand in errands[:_SHOWN]:
        click.echo(f"  {sized(errand.bytes):>10}  {errand.path} -> {errand.target}")
    if len(errands) > _SHOWN:
        click.echo(f"  ... and {len(errands) - _SHOWN:,} more")


def _say_result(errands: list[CopyTask], failed: list[tuple[CopyTask, str]], *, as_json: bool) -> None:
    import json

    from deeplink.text import counted, sized

    files = len(errands) - len(failed)
    size = sum(errand.bytes for errand in errands) - sum(errand.bytes for errand, _ in failed)
    if as_json:
        problems = {errand.path: problem for errand, problem in failed}
        click.echo(json.dumps({"files": files, "bytes": size, "failed": problems}))
        return
    click.echo(f"{counted(files, 'file')}, {sized(size)}")
    for _, problem in failed[:_SHOWN]:
        click.echo(f"deeplink: {problem}", err=True)
    if failed:
        click.echo(f"deeplink: {counted(len(failed), 'sample')} could not be read", err=True)
