"""`deeplink sandbox fault`: one fault from the list, done to a sandbox and undone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from deeplink.scheduler.sandbox.lab.record import Wound

_EPILOG = """
Without TARGET one is drawn, from the nodes on which ranks run where there are any: --seed draws the same again. A
folder is named as seen from the sandbox's home.

\b
Examples:
  deeplink sandbox fault --list
  deeplink sandbox fault node-cut n3 --for 60            cut, and healed after a minute (or at Ctrl-C)
  deeplink sandbox fault rank-stopped n2 --rank 5
  deeplink sandbox fault slow-rank n2 --share 0.7
  deeplink sandbox fault checkpoint-torn run1/checkpoints
  deeplink sandbox fault watchdog-killed --for 2         killed, and started again as it was after 2 s
  deeplink sandbox fault --undo                          all that is in effect; `fault --undo NAME [TARGET]` one
"""


@click.command("fault", epilog=_EPILOG)
@click.option("--name", "sandbox_name", default="default", show_default=True, help="Which sandbox.")
@click.option("--list", "as_list", is_flag=True, help="List the faults, and what is in effect.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--undo", is_flag=True, help="Take away what is in effect, or of that NAME and TARGET alone.")
@click.option("--for", "for_s", type=FiniteRange(min=0), metavar="SECONDS", help="Undo it after so long; wait.")
@click.option("--seed", type=int, help="Of the draw, where no TARGET is given.")
@click.option("--rank", type=click.IntRange(min=0), help="Which rank. [default: the first one on the node]")
@click.option("--step", type=click.IntRange(min=0), default=0, help="rank-exit: at which step; 0: at the next.")
@click.option("--always", is_flag=True, help="rank-exit: at each attempt, not only once.")
@click.option(
    "--share",
    type=FiniteRange(min=0.01, max=0.99),
    default=0.5,
    show_default=True,
    help="slow-rank: share of the time that it stands still.",
)
@click.argument("fault", metavar="[NAME]", required=False)
@click.argument("target", metavar="[TARGET]", required=False)
def command(  # noqa: PLR0913 - one for each option
    *,
    sandbox_name: str,
    as_list: bool,
    as_json: bool,
    undo: bool,
    for_s: float | None,
    seed: int | None,
    rank: int | None,
    step: int,
    always: bool,
    share: float,
    fault: str | None,
    target: str | None,
) -> None:
    """Do a fault to TARGET: a node, a leaf, ctl or a folder, as the fault wants it."""
    if as_list:
        _list(sandbox_name, as_json=as_json)
        return
    from deeplink.scheduler.sandbox.cluster import Sandbox
    from deeplink.scheduler.sandbox.lab.catalog import fault_of
    from deeplink.scheduler.sandbox.lab.laboratory import How, Laboratory

    if fault is None and not undo:
        raise click.UsageError("which fault? `deeplink sandbox fault --list` shows them")
    lab = Laboratory(Sandbox.open(sandbox_name))
    if undo:
        if fault is not None:
            fault_of(fault)
        _told(lab.undo(fault or "", target or ""), "undone", as_json=as_json)
        return
    wound = lab.inject(fault or "", target or "", How(rank=rank, step=step, always=always, share=share), seed=seed)
    _told([wound], "done", as_json=as_json)
    if for_s is None:
        return
    try:
        lab.sandbox.clock.sleep(for_s)
    finally:
        _told(lab.undo(wound.name, wound.target), "undone", as_json=as_json)


def _told(wounds: list[Wound] | tuple[Wound, ...], what: str, *, as_json: bool) -> None:
    if as_json:
        said = [{"name": wound.name, "target": wound.target, "unix": wound.unix, "is": what} for wound in wounds]
        click.echo(json.dumps(said))
        return
    for wound in wounds:
        click.echo(f"{wound.name} {wound.target}".rstrip() + f": {what}")
    if not wounds:
        click.echo("nothing of that is in effect")


def _list(sandbox_name: str, *, as_json: bool) -> None:
    from deeplink.scheduler.sandbox.cluster import Sandbox
    from deeplink.scheduler.sandbox.errors import NotUpError
    from deeplink.scheduler.sandbox.lab.catalog import FAULTS
    from deeplink.scheduler.sandbox.lab.laboratory import Laboratory

    try:
        wounds = Laboratory(Sandbox.open(sandbox_name)).wounds()
    except NotUpError:
        wounds = ()
    if as_json:
        faults = [
            {
                "name": fault.name,
                "target": fault.target.value,
                "like": fault.like,
                "undone": fault.undone,
                "root": fault.network,
                "in_effect": [wound.target for wound in wounds if wound.name == fault.name],
            }
            for fault in FAULTS.values()
        ]
        click.echo(json.dumps(faults, indent=1))
        return
    for fault in FAULTS.values():
        click.echo(f"{fault.name:18}{fault.target.value:14}{fault.like}")
        click.echo(f"{'':32}undone: {fault.undone}")
    if wounds:
        click.echo("in effect: " + ", ".join(f"{wound.name} {wound.target}".rstrip() for wound in wounds))
