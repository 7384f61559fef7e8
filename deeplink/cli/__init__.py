"""The `deeplink` command: a module per verb, or for verbs that belong together, loaded when one is used."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

import deeplink
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_PROCESS = "own process"  # the context's object where the process is the command's, which may become another

# Verb -> first line of its help. A table, not imports: `deeplink --help` and `deeplink sbatch` must not pay for
# grpc, pyarrow or torch. tests/deeplink/cli/test_main.py holds it against the modules.
VERBS = {
    "pack": "Pack a folder of small files, or what is in tars and tables, into shards.",
    "index": "Show, verify, rebuild, merge or remove the index of a dataset's version.",
    "ls": "List datasets, folders and samples.",
    "info": "Show all that is known of a dataset, folder or sample.",
    "cat": "Write samples to standard output, one after another.",
    "get": "Copy samples into local files.",
    "verify": "Read every copy of every sample of a dataset and compare it with what was packed.",
    "warm": "Bring a dataset onto the nodes' SSDs, and verify it there.",
    "prefetch": "Warm the SSDs of nodes before a job starts there, or empty one ahead of its drain.",
    "evict": "Drop a dataset's shards from the nodes' SSDs, as far as they can be had again.",
    "rm": "Remove a dataset from the catalog, and its shards from the nodes' SSDs.",
    "node": "Serve this node's shards and watch over its ranks.",
    "sbatch": "Submit a batch script: sbatch, watched and restartable.",
    "plan": "Look after waiting jobs: their hints are kept, mended or dropped.",
    "run": "Start and supervise the ranks of a job inside its allocation.",
    "checkpoints": "List, verify and prune checkpoints.",
    "calibrate": "Time all-reduces and reading on a job's nodes, and derive the cost model's constants from that.",
    "status": "Show how your jobs are, or one of them on one screen.",
    "top": "Show jobs live, sorted as you like.",
    "logs": "Show what a job wrote, and follow it over restarts.",
    "cancel": "Cancel jobs, tasks of arrays or steps, or send them a signal.",
    "requeue": "Have a running job started again, as far as that is safe, on other nodes if wanted.",
    "srun": "Run a command interactively: srun, with its ranks in the fabric's order.",
    "shim": "Stand in for srun and torchrun inside a job (put on PATH by `deeplink sbatch --deeplink-shim`).",
    "watch": "Watch jobs from outside and restart those that lost a node.",
    "operate": "Have the watchdog do by hand what an operator decides.",
    "incidents": "List what went wrong, and how it ended.",
    "incident": "Show one incident: evidence, timeline, actions, cost, and where the ranks hung.",
    "report": "Show what the hours that jobs held were for: what moved training on, and what was lost, by cause.",
    "topology": "Discover, draw, check and export the fabric the nodes hang on.",
    "health": "Look after this node's health: run its checks once, and say what is wrong.",
    "doctor": "Check a site before the first job, and say what is to be changed.",
    "simulate": "Replay a trace of jobs on a cluster and compare who chooses the nodes: queueing, leaves, steps.",
    "console": "Serve the operator's page.",
    "sandbox": "A real multi-host Slurm cluster on this machine.",
    "demo": "Pack, train, lose a node, recover: the whole story on this machine.",
}

_SHARED_MODULES = {
    **{verb: ("samples", verb) for verb in ("ls", "info", "cat", "get")},
    **{verb: ("warm", verb) for verb in ("prefetch", "evict", "rm")},
    **{verb: ("status", verb) for verb in ("top", "logs")},
    "requeue": ("cancel", "requeue"),
    "incident": ("incidents", "incident"),
    "shim": ("srun", "shim"),
    "demo": ("sandbox", "demo"),
}
"""Verbs whose module has those of others too, and the command's name in it."""

_GC_AFTER = 20_000
"""Imports make many objects and no garbage: at Python's default of 700, looking took 8 % of an agent's start."""

_EPILOG = """
`deeplink VERB --help` shows a verb's options and examples.
Completion: eval "$(_DEEPLINK_COMPLETE=bash_source deeplink)".

\b
Exit codes:
  0    done
  1    failed
  2    wrong usage or configuration
  75   stranded: nodes were lost, and nothing could replace them
  77   fenced: a newer attempt runs in this one's place
  127  a program is missing
  130  interrupted
Besides, `deeplink run` has the first failed rank's and `deeplink sbatch` has sbatch's own.
"""


def _is_of_output(problem: OSError) -> bool:
    """Whether it was raised where `click.echo`, and nothing below it, wrote to standard output."""
    last = problem.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code is click.echo.__code__ and not last.tb_frame.f_locals["err"]


@contextmanager
def output_minded(*, only_output: bool = False) -> Iterator[None]:
    """End quietly where standard output is closed, with an error where it cannot be written."""
    try:
        yield
    except OSError as problem:
        if not (only_output or _is_of_output(problem)):
            raise  # a verb's own trouble
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it ends
        if isinstance(problem, BrokenPipeError):
            raise click.exceptions.Exit(0) from None  # `deeplink cat big | head` is no failure
        remedy = "Write to a place that has room, and run it again."
        raise DeepLinkError(f"standard output: {problem.strerror or problem}", remedy=remedy) from problem


class _LazyGroup(click.Group):
    """Imports a verb's module only when the verb is used, and ends well where standard output fails."""

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with output_minded():
            return super().invoke(ctx)

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with output_minded():  # --help
            return super().make_context(info_name, args, parent, **extra)

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        if cmd_name == "simulate":
            return study(cmd_name, Path(deeplink.__file__).resolve().parent.parent)
        module, name = _SHARED_MODULES.get(cmd_name, (cmd_name, "command"))
        command: click.Command = getattr(importlib.import_module(f"deeplink.cli.{module}"), name)
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]  # click takes it away where it begins as an option does
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as problem:
            from deeplink.core.text import nearest

            meant = nearest(word, VERBS)
            if not meant or "Did you mean" in problem.format_message():
                raise
            raise click.UsageError(f"{problem.message} Did you mean {meant}?", ctx) from None

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def study(verb: str, repository: Path) -> click.Command:
    """Return a study's command, which the repository has and the package has not, or what says where it is."""
    if (repository / "benchmarks" / verb).is_dir():
        if str(repository) not in sys.path:
            sys.path.insert(0, str(repository))  # before any other package called benchmarks
        found: click.Command = importlib.import_module(f"benchmarks.{verb}.command").command
        return found

    @click.command(verb, help=VERBS[verb], context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
    def elsewhere(words: tuple[str, ...]) -> None:  # noqa: ARG001 - whatever they are
        raise DeepLinkError(
            f"`deeplink {verb}` is part of DeepLink's repository, not of the installed package",
            remedy=f"Run it from a checkout: `make venv`, then `.venv/bin/deeplink {verb}`.",
            exit_code=2,
        )

    return elsewhere


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 115},
    epilog=_EPILOG,
)
@click.version_option(deeplink.__version__, prog_name="deeplink")
@click.option("-v", "--verbose", count=True, help="Say more (-v: what is done, -vv: every detail).")
@click.option("--log-json", is_flag=True, help="Log one JSON object a line.")
@click.pass_context
def cli(ctx: click.Context, verbose: int, *, log_json: bool) -> None:
    """DeepLink makes a Slurm cluster good at deep learning."""
    _warn_of_misspelt()
    if ctx.invoked_subcommand == "sbatch" and not verbose:
        return  # it logs nothing, and would wait for what logs
    from deeplink.cli.output import log_to_stderr

    log_to_stderr(verbose, as_json=log_json)


def _warn_of_misspelt() -> None:
    if not any(name.startswith("DEEPLINK_") for name in os.environ):
        return  # `deeplink sbatch` does not pay for what there is no need of
    from deeplink.core.config import misspelt

    for name, meant in misspelt(os.environ).items():
        click.echo(f"deeplink: {name} is set and means nothing; is {meant} meant?", err=True)


def main() -> None:
    """Run the command and exit, with the exit codes that the help lists."""
    gc.set_threshold(_GC_AFTER)
    if "DEEPLINK_PATH_ROOTS" in os.environ:
        from deeplink.paths import uninstall

        uninstall()  # a command of ours, started by a rank, wants the files themselves
    try:
        code = cli.main(prog_name="deeplink", standalone_mode=False, obj=OWN_PROCESS)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except DeepLinkError as problem:
        from deeplink.core.text import printable_lines

        click.echo(printable_lines(f"deeplink: {problem}"), err=True)
        if problem.remedy:
            click.echo(f"  {problem.remedy}", err=True)
        sys.exit(problem.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
