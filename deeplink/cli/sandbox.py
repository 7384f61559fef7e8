"""`deeplink sandbox` and `demo`: a real Slurm cluster on this machine, to try and to break; and a story on one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import flag, grouped, integer, json_option, option, path_option, real
from deeplink.cli.output import print_json, print_table
from deeplink.core.clock import SystemClock
from deeplink.scheduler.slurm.command import become
from deeplink.scheduler.testbed.cluster import Options, Sandbox, plan
from deeplink.scheduler.testbed.errors import NotUpError
from deeplink.scheduler.testbed.lab.faults import FAULTS, fault_of
from deeplink.scheduler.testbed.lab.laboratory import How, Laboratory
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.testbed.lab.laboratory import Wound

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
_FAULT_EPILOG = """
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
_name = option("--name", "Which sandbox.", default="default")


@click.group("sandbox", epilog=_GROUP_EPILOG)
def command() -> None:
    """A real multi-host Slurm cluster on this machine: to try, to test, to break."""


_options = grouped(
    "options",
    Options,
    option("--user", "Who jobs run as, by name or number. [default: deeplink, or ourselves]", default=""),
    path_option("--expose", "Let the user read PATH. Repeatable.", multiple=True),
    integer("--slurmd-timeout", "SlurmdTimeout, s.", 0, default=10),
    integer("--return-to-service", "ReturnToService.", 0, 2, default=2),
    option("--extra LINE", "One more line of slurm.conf. Repeatable.", multiple=True),
    real("--wait", "Seconds to wait until all nodes are idle.", 0, name="wait_s", default=30.0),
    flag("--loopback", "No namespaces, also as root: slurmds on this host's loopback."),
    flag("--unpacked", "On loopback: download Slurm's packages, also if installed."),
    flag("--freezable", "Homes on a file system of their own: storage that can stall."),
)


@command.command(epilog=_UP_EPILOG)
@_name
@option("--shape SxLxN", "Spines x leaves per spine x nodes per leaf. [default: 1x2x4]")
@integer("--nodes", "So many nodes; without --shape on two leaves.", 1)
@flag("--interleave", "Deal nodes to leaves round robin: names do not follow switches.")
@integer("--cpus", "CPUs of a node, for Slurm.", 1, default=4)
@integer("--gpus", "Fake GPUs of a node.", 0, default=2)
@_options
@json_option("Print what is up as JSON.")
@flag("--dry-run", "Print the files and steps; start nothing.")
def up(
    *,
    name: str,
    shape: str | None,
    nodes: int | None,
    interleave: bool,
    cpus: int,
    gpus: int,
    options: Options,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Bring a cluster up; every node is idle when it returns."""
    of_nodes = {"interleave": interleave, "cpus": cpus, "gpus": gpus}
    if shape is not None:
        wanted = dataclasses.replace(Shape.parse(shape, **of_nodes), total=nodes or 0)
    else:
        wanted = Shape(**of_nodes) if nodes is None else Shape.of(nodes, **of_nodes)  # type: ignore[arg-type]
    if dry_run:
        for path, text in plan(name, wanted, options).items():
            click.echo(f"# ---- {path}\n{text}")
        return
    began = time.monotonic()
    sandbox = Sandbox.up(name, wanted, options)
    took_s = time.monotonic() - began
    _warn_of_left_over()
    if as_json:
        print_json(_facts(sandbox) | {"up_s": round(took_s, 3)}, indent=1)
    else:
        _announce(sandbox, took_s)


def _warn_of_left_over() -> None:
    """Name what commands that were killed have left of other sandboxes: no other command would."""
    for name in Sandbox.left_over():
        click.echo(f"left over, and not up: {name}; `deeplink sandbox down --name {name}` removes it", err=True)


def _announce(sandbox: Sandbox, took_s: float) -> None:
    shape = f"{len(sandbox.nodes)} nodes, shape {sandbox.shape}"
    click.echo(f"sandbox {sandbox.name!r} is up after {took_s:.1f} s: {shape}")
    if not sandbox.has_network:
        click.echo(
            "  on loopback, without namespaces: nodes share this host's network and processes, and no link can\n"
            "  be cut (cut, heal); bring it up as root for machines of their own"
        )
    home = f"user {sandbox.user.name}, home {sandbox.home} (shared)"
    click.echo(f"  {home}, SSD of each node at {sandbox.ssd_in_jobs}")
    click.echo("  differs from Slurm's defaults:")
    for tuned in sandbox.record.settings.differing:
        click.echo(f"    {tuned.key}={tuned.value} (default {tuned.default}): {tuned.why}")
    click.echo(f"  try: deeplink sandbox exec --name {sandbox.name} ctl srun -N2 -l hostname")


def _facts(sandbox: Sandbox) -> dict[str, object]:
    return {
        "name": sandbox.name,
        "shape": dataclasses.asdict(sandbox.shape),
        "folder": str(sandbox.layout.folder),
        "user": sandbox.user.name,
        "home": str(sandbox.home),
        "slurm_conf": str(sandbox.layout.slurm_conf),
        "machines": [dataclasses.asdict(machine) for machine in sandbox.status()],
        "links": sandbox.links(),
    }


@command.command(epilog=_DOWN_EPILOG)
@_name
@flag("--dry-run", "Say what would be ended and removed.")
def down(name: str, dry_run: bool) -> None:
    """End everything of a sandbox and remove what it left; nothing to do is no error."""
    if dry_run:
        for line in Sandbox.remains(name):
            click.echo(line)
        return
    was = Sandbox.clear(name)
    click.echo(f"sandbox {name!r} is down" if was else f"sandbox {name!r} was not up")
    _warn_of_left_over()


@command.command(epilog=_STATUS_EPILOG)
@_name
@json_option("Print JSON.")
def status(name: str, as_json: bool) -> None:
    """Show machines and links: what Slurm says, and what really runs."""
    sandbox = Sandbox.open(name)
    if as_json:
        print_json(_facts(sandbox), indent=1)
        return
    rows = [("machine", "slurm", "address", "switch", "link", "process 1", "daemon")]
    for machine in sandbox.status():
        link = {True: "up", False: "cut", None: "-"}[machine.link]
        running = str(machine.process_1) if machine.process_1 else "off"
        daemon = str(machine.daemon) if machine.daemon else "-"
        where = (machine.address, machine.switch or "-", link)
        rows.append((machine.name, machine.state or "?", *where, running, daemon))
    print_table(rows)
    machines = sandbox.shape.machines
    switches = [part for part, whole in sandbox.links().items() if not whole and part not in machines]
    if switches:
        click.echo(f"cut: {' '.join(switches)}")


@command.command(
    "exec",
    epilog=_EXEC_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_name
@flag("--root", "As root, not as the sandbox's user.")
@click.argument("node")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def execute(name: str, root: bool, node: str, argv: tuple[str, ...]) -> None:
    """Run COMMAND on NODE (`ctl`: the control and login host)."""
    # `exec NODE -- COMMAND`, as ssh and srun users type it.
    words = argv[1:] if argv[0] == "--" and len(argv) > 1 else argv
    become(Sandbox.open(name).inside(node, words, root=root))


@command.command(epilog=_CRASH_EPILOG)
@_name
@option("--power-loss/--keep-link", "Cut the link first, or leave it. [default: cut]", default=True)
@click.argument("node")
def crash(name: str, power_loss: bool, node: str) -> None:
    """Take the power of NODE (or ctl): every process on it ends at once."""
    Sandbox.open(name).crash(node, keep_link=not power_loss)
    click.echo(f"{node} is off")


@command.command(epilog=_CRASH_EPILOG)
@_name
@click.argument("node")
def boot(name: str, node: str) -> None:
    """Start a crashed NODE again; on a running one start its dead daemon. Its link is healed."""
    Sandbox.open(name).boot(node)
    click.echo(f"{node} is on")


@command.command(epilog=_CUT_EPILOG)
@_name
@click.argument("part")
def cut(name: str, part: str) -> None:
    """Cut PART (a node, ctl, leafN or spineN) off from the switch above it."""
    Sandbox.open(name).cut(part)
    click.echo(f"{part} is cut off")


@command.command(epilog=_CUT_EPILOG)
@_name
@click.argument("part", required=False)
def heal(name: str, part: str | None) -> None:
    """Connect PART to the switch above it again; without PART heal all: faults undone, every machine on."""
    sandbox = Sandbox.open(name)
    if part is not None:
        sandbox.heal(part)
        click.echo(f"{part} is connected")
        return

    for wound in Laboratory(sandbox).heal():
        click.echo(f"{wound.name} {wound.target}".rstrip() + ": undone")
    click.echo("every machine is on and connected")


_how = grouped(
    "how",
    How,
    integer("--rank", "Which rank. [default: the first one on the node]", 0),
    integer("--step", "rank-exit: at which step; 0: at the next.", 0, show_default=False, default=0),
    flag("--always", "rank-exit: at each attempt, not only once."),
    real("--share", "slow-rank: share of the time that it stands still.", 0.01, 0.99, default=0.5),
)


@command.command("fault", epilog=_FAULT_EPILOG)
@option("--name", "Which sandbox.", name="sandbox_name", default="default")
@flag("--list", "List the faults, and what is in effect.", name="as_list")
@json_option("Print JSON.")
@flag("--undo", "Take away what is in effect, or of that NAME and TARGET alone.")
@real("--for SECONDS", "Undo it after so long; wait.", 0, name="for_s")
@option("--seed", "Of the draw, where no TARGET is given.", type=int)
@_how
@click.argument("fault", metavar="[NAME]", required=False)
@click.argument("target", metavar="[TARGET]", required=False)
def inject(
    *,
    sandbox_name: str,
    as_list: bool,
    as_json: bool,
    undo: bool,
    for_s: float | None,
    seed: int | None,
    how: How,
    fault: str | None,
    target: str | None,
) -> None:
    """Do a fault to TARGET: a node, a leaf, ctl or a folder, as the fault wants it."""
    if as_list:
        _list(sandbox_name, as_json=as_json)
        return

    if fault is None and not undo:
        raise click.UsageError("which fault? `deeplink sandbox fault --list` shows them")
    lab = Laboratory(Sandbox.open(sandbox_name))
    if undo:
        if fault is not None:
            fault_of(fault)
        _say_of(lab.undo(fault or "", target or ""), "undone", as_json=as_json)
        return
    wound = lab.inject(fault or "", target or "", how, seed=seed)
    _say_of([wound], "done", as_json=as_json)
    if for_s is None:
        return
    try:
        lab.sandbox.clock.sleep(for_s)
    finally:
        _say_of(lab.undo(wound.name, wound.target), "undone", as_json=as_json)


def _say_of(wounds: Sequence[Wound], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json([{"name": one.name, "target": one.target, "unix": one.unix, "is": what} for one in wounds])
        return
    for wound in wounds:
        click.echo(f"{wound.name} {wound.target}".rstrip() + f": {what}")
    if not wounds:
        click.echo("nothing of that is in effect")


def _list(sandbox_name: str, *, as_json: bool) -> None:
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
        print_json(faults, indent=1)
        return
    for fault in FAULTS.values():
        click.echo(f"{fault.name:18}{fault.target.value:14}{fault.like}")
        click.echo(f"{'':32}undone: {fault.undone}")
    if wounds:
        click.echo("in effect: " + ", ".join(f"{wound.name} {wound.target}".rstrip() for wound in wounds))


_DEMO_EPILOG = """
\b
Examples:
  deeplink demo                          digits, a node death, recovery
  deeplink demo --data mnist-pngs        any folder of {train,test}/<class>/<image>
  deeplink demo --keep                   leave the cluster up, with instructions
  deeplink demo --write-digits digits    only write the 1,797 small image files
"""


@click.command("demo", epilog=_DEMO_EPILOG)
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
def demo(
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
        from deeplink.demo.story import write_digits as write

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
