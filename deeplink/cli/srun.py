"""`deeplink srun`: srun, with its ranks in the fabric's order. Nothing heavy is imported."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from deeplink.verbatim import Verbatim

if TYPE_CHECKING:
    from deeplink.scheduler.topology.graph import Fabric

_EPILOG = """
Options, what is said and the exit code are srun's own. Where a step is over all nodes of an allocation, its ranks
are numbered along the fabric in place of by name; outside of an allocation `-N 2` or more makes one by salloc.
Whatever else it is (--pty, --nodelist, --distribution, --multi-prog, parts of the nodes, ...) srun gets as it is.
Interactive jobs are neither watched nor started again: that is `deeplink sbatch` and `deeplink run`.

\b
Examples:
  deeplink srun -N2 --pty bash
  deeplink srun -N8 --ntasks-per-node=4 --gres=gpu:4 python train.py
  deeplink srun --dry-run -N8 hostname     the command it would be
"""


@click.command("srun", cls=Verbatim, epilog=_EPILOG, options_metavar="[SRUN OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
def command(words: tuple[str, ...]) -> None:
    """Run a command interactively: srun, with its ranks in the fabric's order."""
    from deeplink.scheduler.launch.interactive import interactive, understood
    from deeplink.scheduler.slurm.command import CommandMissingError, become
    from deeplink.scheduler.slurm.programs import real_program

    asked = understood(words)
    made = interactive(asked, os.environ, _fabric, [sys.executable, "-P", "-m", "deeplink", "srun"])
    if asked.dry_run:
        click.echo(shlex.join(made.argv))
        click.echo(made.because, err=True)
        return
    # Not a stand-in of ours: in a job of `deeplink sbatch --deeplink-shim` it is first on the PATH.
    program = real_program(made.argv[0], os.environ.get("PATH", ""))
    if program is None:
        raise CommandMissingError(made.argv[0])
    sys.stdout.flush()
    become([program, *made.argv[1:]])


def _fabric() -> Fabric:
    """Return where Slurm says that nodes hang; nowhere where it does not answer: srun has words for that."""
    import logging

    from deeplink.clock import SystemClock
    from deeplink.config import load_config
    from deeplink.errors import DeepLinkError
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.topology.graph import Fabric, fabric_from_switches
    from deeplink.scheduler.view.look import shared

    try:
        return fabric_from_switches(Slurm(shared(load_config().state, SystemClock(), 2.0)).topology())
    except DeepLinkError as problem:
        logging.getLogger(__name__).warning("ranks stay in the order of names: %s", problem)
        return Fabric({})
