"""`deeplink sandbox`: bring up, break and take down a real Slurm cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.cli.sandbox_fault import command as fault
from deeplink.ranges import FiniteRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.sandbox.cluster import Options, Sandbox
    from deeplink.scheduler.sandbox.shape import Shape

_UP_EPILOG = """
As root every node is a machine of its own: network, host name, processes, /tmp, /local/ssd. As an ordinary user
(or with --loopback) the nodes are several slurmd on this host: jobs run, nodes crash, but links cannot be cut.

\b
Examples:
  deeplink sandbox up                              8 nodes on two leaf switches
  deeplink sandbox up --shape 2x2x2 --interleave   4 leaves; names do not follow the switches
  deeplink sandbox up --nodes 4 --name four        a second one beside the first
  deeplink sandbox up --expose /root/data --extra RequeueExit=17
  deeplink sandbox up --dry-run                    show every file and step, start nothing
"""
_EXEC_EPILOG = """
The command runs in the user's home (shared by all machines) with an environment of its own; its input, output and
exit code are this command's. Options of `exec` come before NODE.

\b
Examples:
  deeplink sandbox exec ctl sinfo -N -l
  deeplink sandbox exec ctl sbatch -N4 train.sh
  deeplink sandbox exec ctl bash
  deeplink sandbox exec --root n3 pkill -9 slurmd
"""
_CRASH_EPILOG = """
\b
Examples:
  deeplink sandbox crash n3               power loss: its link is cut, then all its processes end
  deeplink sandbox crash --keep-link n3   only the processes end: peers see connections reset
  deeplink sandbox boot n3
"""
_CUT_EPILOG = """
\b
Examples:
  deeplink sandbox cut n3       a node
  deeplink sandbox cut leaf1    a leaf switch from its spine: its nodes reach each other and nobody else
  deeplink sandbox heal leaf1
  deeplink sandbox heal         everything: faults undone, every machine on and connected
"""
_DOWN_EPILOG = """
\b
Examples:
  deeplink sandbox down
  deeplink sandbox down --name four
  deeplink sandbox down --dry-run         what would be ended and removed
"""
_STATUS_EPILOG = """
\b
Examples:
  deeplink sandbox status
  deeplink sandbox status --json | jq .links
"""
_GROUP_EPILOG = """
\b
Examples:
  deeplink sandbox up                     8 nodes on two leaf switches
  deeplink sandbox exec ctl srun -N2 -l hostname
  deeplink sandbox crash n3
  deeplink sandbox fault rank-stopped n2  one of many: deeplink sandbox fault --list
  deeplink sandbox status
  deeplink sandbox down
"""
_name = click.option("--name", default="default", show_default=True, help="Which sandbox.")


@click.group("sandbox", epilog=_GROUP_EPILOG)
def command() -> None:
    """A real multi-host Slurm cluster on this machine: to try, to test, to break."""


@command.command(epilog=_UP_EPILOG)
@_name
@click.option("--shape", metavar="SxLxN", help="Spines x leaves per spine x nodes per leaf. [default: 1x2x4]")
@click.option("--nodes", type=click.IntRange(1), help="So many nodes; without --shape on two leaves.")
@click.option("--interleave", is_flag=True, help="Deal nodes to leaves round robin: names do not follow switches.")
@click.option("--cpus", type=click.IntRange(1), default=4, show_default=True, help="CPUs of a node, for Slurm.")
@click.option("--gpus", type=click.IntRange(0), default=2, show_default=True, help="Fake GPUs of a node.")
@click.option("--user", default="", help="Who jobs run as, by name or number. [default: deeplink, or ourselves]")
@click.option(
    "--expose", multiple=True, type=click.Path(path_type=Path), help="Let the user read PATH. Repeatable."
)
@click.option("--slurmd-timeout", type=click.IntRange(0), default=10, show_default=True, help="SlurmdTimeout, s.")
@click.option(
    "--return-to-service", type=click.IntRange(0, 2), default=2, show_default=True, help="ReturnToService."
)
@click.option("--extra", multiple=True, metavar="LINE", help="One more line of slurm.conf. Repeatable.")
@click.option(
    "--wait",
    type=FiniteRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to wait until all nodes are idle.",
)
@click.option("--loopback", is_flag=True, help="No namespaces, also as root: slurmds on this host's loopback.")
@click.option("--unpacked", is_flag=True, help="On loopback: download Slurm's packages, also if installed.")
@click.option("--freezable", is_flag=True, help="Homes on a file system of their own: storage that can stall.")
@click.option("--json", "as_json", is_flag=True, help="Print what is up as JSON.")
@click.option("--dry-run", is_flag=True, help="Print the files and steps; start nothing.")
def up(  # noqa: PLR0913 - one for each option
    *,
    name: str,
    shape: str | None,
    nodes: int | None,
    interleave: bool,
    cpus: int,
    gpus: int,
    user: str,
    expose: tuple[Path, ...],
    slurmd_timeout: int,
    return_to_service: int,
    extra: tuple[str, ...],
    wait: float,
    loopback: bool,
    unpacked: bool,
    freezable: bool,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Bring a cluster up; every node is idle when it returns."""
    import time

    from deeplink.scheduler.sandbox.cluster import Options, Sandbox

    wanted = _shape(shape, nodes, interleave=interleave, cpus=cpus, gpus=gpus)
    options = Options(
        user=user,
        expose=expose,
        slurmd_timeout=slurmd_timeout,
        return_to_service=return_to_service,
        extra=extra,
        wait_s=wait,
        loopback=loopback,
        unpacked=unpacked,
        freezable=freezable,
    )
    if dry_run:
        _show_plan(name, wanted, options)
        return
    began = time.monotonic()
    sandbox = Sandbox.up(name, wanted, options)
    took = time.monotonic() - began
    _tell_left_over()
    if as_json:
        _print_json(sandbox, up_s=round(took, 3))
        return
    _announce(sandbox, took)


def _tell_left_over() -> None:
    """Name what commands that were killed have left of other sandboxes: nobody else would."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    for name in Sandbox.left_over():
        click.echo(f"left over, and not up: {name}; `deeplink sandbox down --name {name}` removes it", err=True)


def _announce(sandbox: Sandbox, took_s: float) -> None:
    click.echo(
        f"sandbox {sandbox.name!r} is up after {took_s:.1f} s: {len(sandbox.nodes)} nodes, shape {sandbox.shape}"
    )
    if not sandbox.has_network:
        click.echo(
            "  on loopback, without namespaces: nodes share this host's network and processes, and no link can"
        )
        click.echo("  be cut (cut, heal); bring it up as root for machines of their own")
    click.echo(
        f"  user {sandbox.user.name}, home {sandbox.home} (shared), SSD of each node at {sandbox.ssd_in_jobs}"
    )
    click.echo("  differs from Slurm's defaults:")
    for tuned in sandbox.record.settings.differing:
        click.echo(f"    {tuned.key}={tuned.value} (default {tuned.default}): {tuned.why}")
    click.echo(f"  try: deeplink sandbox exec --name {sandbox.name} ctl srun -N2 -l hostname")


def _shape(shape: str | None, nodes: int | None, *, interleave: bool, cpus: int, gpus: int) -> Shape:
    import dataclasses

    from deeplink.scheduler.sandbox.shape import Shape

    of_nodes = {"interleave": interleave, "cpus": cpus, "gpus": gpus}
    if shape is None:
        return Shape(**of_nodes) if nodes is None else Shape.of(nodes, **of_nodes)  # type: ignore[arg-type]
    return dataclasses.replace(Shape.parse(shape, **of_nodes), total=nodes or 0)


def _show_plan(name: str, shape: Shape, options: Options) -> None:
    from deeplink.scheduler.sandbox.cluster import plan

    for path, text in plan(name, shape, options).items():
        click.echo(f"# ---- {path}\n{text}")


def _print_json(sandbox: Sandbox, **more: object) -> None:
    import dataclasses
    import json

    facts = {
        "name": sandbox.name,
        "shape": dataclasses.asdict(sandbox.shape),
        "folder": str(sandbox.layout.folder),
        "user": sandbox.user.name,
        "home": str(sandbox.home),
        "slurm_conf": str(sandbox.layout.slurm_conf),
        "machines": [dataclasses.asdict(machine) for machine in sandbox.status()],
        "links": sandbox.links(),
        **more,
    }
    click.echo(json.dumps(facts, indent=1))


@command.command(epilog=_DOWN_EPILOG)
@_name
@click.option("--dry-run", is_flag=True, help="Say what would be ended and removed.")
def down(name: str, dry_run: bool) -> None:
    """End everything of a sandbox and remove what it left; nothing to do is no error."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    if dry_run:
        for line in Sandbox.remains(name):
            click.echo(line)
        return
    was = Sandbox.clear(name)
    click.echo(f"sandbox {name!r} is down" if was else f"sandbox {name!r} was not up")
    _tell_left_over()


@command.command(epilog=_STATUS_EPILOG)
@_name
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str, as_json: bool) -> None:
    """Show machines and links: what Slurm says, and what really runs."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    sandbox = Sandbox.open(name)
    if as_json:
        _print_json(sandbox)
        return
    rows = [("machine", "slurm", "address", "switch", "link", "process 1", "daemon")]
    for machine in sandbox.status():
        link = {True: "up", False: "cut", None: "-"}[machine.link]
        running = str(machine.process_1) if machine.process_1 else "off"
        daemon = str(machine.daemon) if machine.daemon else "-"
        row = (machine.name, machine.state or "?", machine.address, machine.switch or "-", link, running, daemon)
        rows.append(row)
    _print_table(rows)
    switches = [
        part for part, whole in sandbox.links().items() if not whole and part not in sandbox.shape.machines
    ]
    if switches:
        click.echo(f"cut: {' '.join(switches)}")


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command.command(
    "exec",
    epilog=_EXEC_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_name
@click.option("--root", is_flag=True, help="As root, not as the sandbox's user.")
@click.argument("node")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def execute(name: str, root: bool, node: str, argv: tuple[str, ...]) -> None:
    """Run COMMAND on NODE (`ctl`: the control and login host)."""
    from deeplink.scheduler.sandbox.cluster import Sandbox
    from deeplink.scheduler.slurm.command import become

    # `exec NODE -- COMMAND`, as ssh and srun users type it.
    words = argv[1:] if argv[0] == "--" and len(argv) > 1 else argv
    become(Sandbox.open(name).inside(node, words, root=root))


@command.command(epilog=_CRASH_EPILOG)
@_name
@click.option("--power-loss/--keep-link", default=True, help="Cut the link first, or leave it. [default: cut]")
@click.argument("node")
def crash(name: str, power_loss: bool, node: str) -> None:
    """Take the power of NODE (or ctl): every process on it ends at once."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    Sandbox.open(name).crash(node, keep_link=not power_loss)
    click.echo(f"{node} is off")


@command.command(epilog=_CRASH_EPILOG)
@_name
@click.argument("node")
def boot(name: str, node: str) -> None:
    """Start a crashed NODE again; on a running one start its dead daemon. Its link is healed."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    Sandbox.open(name).boot(node)
    click.echo(f"{node} is on")


@command.command(epilog=_CUT_EPILOG)
@_name
@click.argument("part")
def cut(name: str, part: str) -> None:
    """Cut PART (a node, ctl, leafN or spineN) off from the switch above it."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    Sandbox.open(name).cut(part)
    click.echo(f"{part} is cut off")


@command.command(epilog=_CUT_EPILOG)
@_name
@click.argument("part", required=False)
def heal(name: str, part: str | None) -> None:
    """Connect PART to the switch above it again; without PART heal all: faults undone, every machine on."""
    from deeplink.scheduler.sandbox.cluster import Sandbox

    sandbox = Sandbox.open(name)
    if part is not None:
        sandbox.heal(part)
        click.echo(f"{part} is connected")
        return
    from deeplink.scheduler.sandbox.lab.laboratory import Laboratory

    for wound in Laboratory(sandbox).heal():
        click.echo(f"{wound.name} {wound.target}".rstrip() + ": undone")
    click.echo("every machine is on and connected")


command.add_command(fault)
