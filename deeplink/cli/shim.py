"""`deeplink shim`: stands in for srun and torchrun in a job, so that a script need not change."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from typing_extensions import override

from deeplink.scheduler.launch.srun_shim import (
    LeftAlone,
    in_rank,
    srun_becomes,
    torchrun_becomes,
    torchrun_in_rank,
)
from deeplink.scheduler.slurm.programs import STAND_INS, real_program
from deeplink.scheduler.slurm.submission import SHIM_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

_PEEK = 64 << 10  # bytes of a script that are looked at


class _PassThrough(click.Command):
    """Takes every word behind the program's name as it is."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in STAND_INS:
            return super().parse_args(ctx, args)
        ctx.params = {"program": args[0], "words": tuple(args[1:])}
        return []


@click.command(
    "shim",
    cls=_PassThrough,
    epilog="""
\b
Examples (as the stand-ins on PATH call it):
  deeplink shim srun --cpu-bind=cores python train.py
  deeplink shim torchrun --nproc-per-node=4 train.py
DEEPLINK_SHIM=off in front of a command of the script leaves it alone.
""",
)
@click.argument("program", type=click.Choice(STAND_INS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def command(program: str, words: tuple[str, ...]) -> None:
    """Stand in for srun and torchrun inside a job (put on PATH by `deeplink sbatch --deeplink-shim`)."""
    from deeplink.scheduler.slurm.command import become

    env = os.environ
    if env.get(SHIM_VARIABLE) == "off":
        _become_real(program, words)
    elif program == "torchrun" and in_rank(env):
        _become_real(program, torchrun_in_rank(words, env))
    becomes = srun_becomes(words, env, _read) if program == "srun" else torchrun_becomes(words, env)
    if isinstance(becomes, LeftAlone):
        log.info("%s is left alone: %s", program, becomes.because)
        _become_real(program, words)
    else:
        sys.stdout.flush()
        become([sys.executable, "-P", "-m", "deeplink", "run", *becomes.arguments])


def _read(name: str) -> str:
    found = name if "/" in name or Path(name).is_file() else shutil.which(name)
    try:
        with Path(found or name).open("rb") as file:
            return file.read(_PEEK).decode(errors="replace")
    except OSError:
        return ""


def _become_real(name: str, words: Sequence[str]) -> NoReturn:
    from deeplink.scheduler.slurm.command import CommandMissingError, become

    program = real_program(name, os.environ.get("PATH", ""))
    if program is None:
        raise CommandMissingError(name)
    sys.stdout.flush()
    become([program, *words])
