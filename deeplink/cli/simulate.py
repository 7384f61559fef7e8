"""`deeplink simulate`: the way to benchmarks/simulate, a study that the repository has and the package has not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

import deeplink
from deeplink.core.errors import DeepLinkError


def found(repository: Path) -> click.Command:
    """Return the study's command, or one that says where it is to be had."""
    if not (repository / "benchmarks" / "simulate").is_dir():
        return _nowhere
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))  # before any other package called benchmarks
    study: click.Command = importlib.import_module("benchmarks.simulate.command").command
    return study


@click.command("simulate", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="TRACE [OPTIONS]")
def _nowhere(words: tuple[str, ...]) -> None:  # noqa: ARG001 - whatever they are
    """Replay a trace of jobs on a cluster and compare who chooses the nodes."""
    raise DeepLinkError(
        "the simulation is part of DeepLink's repository, not of the installed package",
        remedy="Run it from a checkout: `make venv`, then `.venv/bin/deeplink simulate`.",
        exit_code=2,
    )


command = found(Path(deeplink.__file__).resolve().parent.parent)
