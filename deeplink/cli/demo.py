"""`deeplink demo`: the whole main job on this machine, told as it goes."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  deeplink demo                          digits, a node death, recovery
  deeplink demo --data mnist-pngs        any folder of {train,test}/<class>/<image>
  deeplink demo --keep                   leave the cluster up, with instructions
  deeplink demo --write-digits digits    only write the 1,797 small image files
""",
)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of images as {train,test}/<class>/<file>.")
@click.option("--keep", is_flag=True, help="Leave the cluster up afterwards, and say how to use it.")
@click.option(
    "--facts",
    type=click.Path(path_type=Path),
    default=Path("build/demo.json"),
    show_default=True,
    help="Where to write the figures, as JSON.",
)
@click.option("--name", default="demo", show_default=True, help="Name of the sandbox.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "loopback", "local"]),
    default="auto",
    show_default=True,
    help="auto: a Slurm cluster in namespaces when root, else on loopback, else none; or the lesser ones at once.",
)
@click.option("--write-digits", type=click.Path(path_type=Path), help="Only write the digits' image files there.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON at the end, the story on stderr.")
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
        from deeplink.demo.digits import write_digits as write

        click.echo(f"{write(write_digits):,} image files in {write_digits}")
        return
    import json

    from rich.console import Console

    from deeplink.clock import SystemClock
    from deeplink.demo.stage import RANKS
    from deeplink.demo.story import Story

    console = Console(stderr=as_json)
    story = Story(SystemClock(), console, data, keep, facts, name=name, backend=backend)
    found = story.tell(RANKS)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    if not found.digest_equal:
        raise click.exceptions.Exit(1)
