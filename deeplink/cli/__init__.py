"""The `deeplink` command: one module per verb, loaded when the verb is used."""

from __future__ import annotations

import importlib
import logging
import os
import sys

import click
from typing_extensions import override

import deeplink
from deeplink.errors import DeepLinkError

# Verb -> first line of its help. A table, not imports: `deeplink --help` and `deeplink sbatch` must not pay for
# grpc, pyarrow or torch. tests/deeplink/cli/test_main.py holds it against the modules.
VERBS = {
    "pack": "Pack a folder of small files into shards.",
    "index": "Show, verify, rebuild or remove the index of a dataset's version.",
    "ls": "List datasets, folders and samples.",
    "info": "Tell all that is known of a dataset, folder or sample.",
    "cat": "Write samples to standard output, one after another.",
    "get": "Copy samples into local files.",
    "verify": "Read every copy of every sample of a dataset and compare it with what was packed.",
    "warm": "Bring a dataset onto the nodes' SSDs, and verify it there.",
    "evict": "Drop a dataset's shards from the nodes' SSDs, as far as they can be had again.",
    "node": "Serve this node's shards and watch over its ranks.",
    "sbatch": "Submit a batch script: sbatch, watched and restartable.",
    "run": "Start and supervise the ranks of a job inside its allocation.",
    "shim": "Stand in for srun and torchrun inside a job (put on PATH by `deeplink sbatch --deeplink-shim`).",
    "watch": "Watch jobs from outside and restart those that lost a node.",
    "incidents": "List what went wrong, and how it ended.",
    "console": "Serve the operator's page.",
    "sandbox": "A real multi-host Slurm cluster on this machine.",
    "demo": "Pack, train, lose a node, recover: the whole story on this machine.",
}


_EPILOG = """
`deeplink VERB --help` shows a verb's options and examples.
Completion: eval "$(_DEEPLINK_COMPLETE=bash_source deeplink)".

\b
Exit codes:
  0    done
  1    failed
  2    wrong usage or configuration
  75   stranded: nodes were lost and nobody could help
  77   fenced: a newer attempt runs in this one's place
  127  a program is missing
  130  interrupted
Besides, `deeplink run` has the first failed rank's and `deeplink sbatch` has sbatch's own.
"""


class _LazyGroup(click.Group):
    """Imports a verb's module only when the verb is used."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"deeplink.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"deeplink.cli.{cmd_name}.command is no click command")
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 115},
    epilog=_EPILOG,
)
@click.version_option(deeplink.__version__, prog_name="deeplink")
@click.option("-v", "--verbose", count=True, help="Say more (-v: what is done, -vv: every detail).")
def cli(verbose: int) -> None:
    """DeepLink makes a Slurm cluster good at deep learning."""
    _warn_of_misspelt()
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbose, 2)]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _warn_of_misspelt() -> None:
    if not any(name.startswith("DEEPLINK_") for name in os.environ):
        return  # `deeplink sbatch` does not pay for what there is no need of
    from deeplink.config import misspelt

    for name, meant in misspelt(os.environ).items():
        click.echo(f"deeplink: {name} is set and means nothing; is {meant} meant?", err=True)


def main() -> None:
    """Run the command and exit.

    0 done, 1 failed, 2 wrong usage or configuration, 75 stranded (nodes were lost and nobody could help),
    77 fenced (a newer attempt runs in this one's place), 127 a program is missing, 130 interrupted. `deeplink run`
    has the first failed rank's code besides, and `deeplink sbatch` sbatch's own.
    """
    try:
        code = cli.main(prog_name="deeplink", standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except DeepLinkError as problem:
        click.echo(f"deeplink: {problem}", err=True)
        if problem.remedy:
            click.echo(f"  {problem.remedy}", err=True)
        sys.exit(problem.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
