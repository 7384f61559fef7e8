"""`deeplink demo`: the whole story on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from deeplink.cli.options import flag, json_option, option, path_option
from deeplink.cli.output import print_json
from deeplink.core.clock import SystemClock

_EPILOG = """
\b
Examples:
  deeplink demo                          digits, a node death, recovery
  deeplink demo --data mnist-pngs        any folder of {train,test}/<class>/<image>
  deeplink demo --keep                   leave the cluster up, with instructions
  deeplink demo --write-digits digits    only write the 1,797 small image files
"""


@click.command("demo", epilog=_EPILOG)
@path_option("--data", "Folder of images as {train,test}/<class>/<file>.")
@flag("--keep", "Leave the cluster up afterwards, and say how to use it.")
@path_option("--facts", "Where to write the figures, as JSON.", default=Path("build/demo.json"))
@option("--name", "Name of the sandbox.", default="demo")
@option(
    "--backend",
    "auto: a Slurm cluster in namespaces when root, else on loopback, else none; or the lesser ones at once.",
    type=click.Choice(["auto", "loopback", "local"]),
    default="auto",
)
@path_option("--write-digits", "Only write the digits' image files there.")
@json_option("Print the figures as JSON at the end, the story on stderr.")
def command(
    *,
    data: Path | None,
    keep: bool,
    facts: Path,
    name: str,
    backend: str,
    write_digits: Path | None,
    as_json: bool,
) -> None:
    """Pack, train, lose a node, recover: the whole story on this machine."""
    if write_digits is not None:
        from deeplink.demo.lesson import write_digits as write

        click.echo(f"{write(write_digits):,} image files in {write_digits}")
        return
    from rich.console import Console

    from deeplink.demo.stage import RANKS
    from deeplink.demo.story import Story

    story = Story(SystemClock(), Console(stderr=as_json), data, keep, facts, name=name, backend=backend)
    found = story.tell(RANKS)
    if as_json:
        print_json(found.as_dict())
    if not found.digest_equal:
        raise click.exceptions.Exit(1)
