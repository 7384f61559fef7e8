"""`deeplink srun` and `shim`: srun with its ranks in the fabric's order, and the stand-ins in jobs."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from deeplink.cli.options import Verbatim, script_text
from deeplink.scheduler.slurm.command import STAND_INS, CommandMissingError, become, real_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.topology.graph import Fabric

log = logging.getLogger(__name__)

_SCRIPT_BYTES = 64 << 10  # of a script that are looked at

_SRUN_EPILOG = """
Options, messages and exit code are srun's own. Where a step is over all nodes of an allocation, its ranks are
numbered along the fabric in place of by name; outside of an allocation `-N 2` or more makes one by salloc. Any
other command (--pty, --nodelist, --distribution, --multi-prog, parts of the nodes, ...) goes to srun unchanged.
Interactive jobs are neither watched nor started again: that is `deeplink sbatch` and `deeplink run`.

\b
Examples:
  deeplink srun -N2 --pty bash
  deeplink srun -N8 --ntasks-per-node=4 --gres=gpu:4 python train.py
  deeplink srun --dry-run -N8 hostname     the command it would be
"""
_SHIM_EPILOG = """
\b
Examples (as the stand-ins on PATH call it):
  deeplink shim srun --cpu-bind=cores python train.py
  deeplink shim torchrun --nproc-per-node=4 train.py
DEEPLINK_SHIM=off in front of a command of the script leaves it alone.
"""


@click.command("srun", cls=Verbatim, epilog=_SRUN_EPILOG, options_metavar="[SRUN OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
def command(words: tuple[str, ...]) -> None:
    """Run a command interactively: srun, with its ranks in the fabric's order."""
    from deeplink.scheduler.launch.srun_shim import interactive, understood

    asked = understood(words)
    made = interactive(asked, os.environ, _fabric, [sys.executable, "-P", "-m", "deeplink", "srun"])
    if asked.dry_run:
        click.echo(shlex.join(made.argv))
        click.echo(made.because, err=True)
        return
    _become_real(made.argv[0], made.argv[1:])


def _become_real(name: str, words: Sequence[str]) -> NoReturn:
    # Not a stand-in of ours: in a job of `deeplink sbatch --deeplink-shim` it is first on the PATH.
    program = real_program(name, os.environ.get("PATH", ""))
    if program is None:
        raise CommandMissingError(name)
    sys.stdout.flush()
    become([program, *words])


def _fabric() -> Fabric:
    """Return where Slurm says that nodes hang; nowhere where it does not answer: srun has words for that."""
    import logging

    from deeplink.core.clock import SystemClock
    from deeplink.core.config import load_config
    from deeplink.core.errors import DeepLinkError
    from deeplink.scheduler.jobs.job_view import shared
    from deeplink.scheduler.slurm.client import Slurm
    from deeplink.scheduler.topology.graph import Fabric
    from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches

    try:
        return fabric_from_switches(Slurm(shared(load_config().state, SystemClock(), 2.0)).topology())
    except DeepLinkError as problem:
        logging.getLogger(__name__).warning("ranks stay in the order of names: %s", problem)
        return Fabric({})


@click.command("shim", cls=Verbatim, epilog=_SHIM_EPILOG, options_metavar="")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="{srun|torchrun} [ARGS]...")
def shim(words: tuple[str, ...]) -> None:
    """Stand in for srun and torchrun inside a job (put on PATH by `deeplink sbatch --deeplink-shim`)."""
    program, words = "".join(words[:1]), words[1:]
    if program == "-h":
        click.echo(click.get_current_context().get_help())
        return
    if program not in STAND_INS:
        raise click.UsageError(f"{program!r} is neither {' nor '.join(STAND_INS)}")
    from deeplink.scheduler.launch import srun_shim
    from deeplink.scheduler.slurm.submission import SHIM_VARIABLE

    env = os.environ
    if env.get(SHIM_VARIABLE) == "off":
        _become_real(program, words)
    elif program == "torchrun" and srun_shim.in_rank(env):
        _become_real(program, srun_shim.torchrun_in_rank(words, env))
    if program == "srun":
        becomes = srun_shim.srun_becomes(words, env, partial(script_text, most=_SCRIPT_BYTES))
    else:
        becomes = srun_shim.torchrun_becomes(words, env)
    if isinstance(becomes, srun_shim.LeftAlone):
        log.info("%s is left alone: %s", program, becomes.because)
        _become_real(program, words)
    sys.stdout.flush()
    become([sys.executable, "-P", "-m", "deeplink", "run", *becomes])
