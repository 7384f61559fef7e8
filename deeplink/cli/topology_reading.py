"""What `deeplink topology` reads: the files that are named, or what Slurm says."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.errors import DeepLinkError
from deeplink.files import FileTroubleError
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.topology.assemble import NodeInternals, assembled
from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.flat import read_node_names
from deeplink.scheduler.topology.sources.gathering import Reading
from deeplink.scheduler.topology.sources.recognise import Format, format_of, read
from deeplink.scheduler.topology.sources.slurm import read_switches
from deeplink.scheduler.topology.sources.smi import read_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.scheduler.topology.finding import TopologyFinding


class InsideOptionError(DeepLinkError):
    """An `--inside` names nodes that are no set of names, or a file without a matrix."""

    exit_code = 2

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(
            f"--inside {text}: {problem}",
            remedy="Give NODES=FILE, say `n[0-7]=topo.txt`, with what `nvidia-smi topo -m` printed there.",
        )
        self.text, self.problem = text, problem


def read_all(files: Sequence[Path], told: str | None, inside: Sequence[str], storage: tuple[str, ...]) -> Reading:
    """Read all that was named, or ask Slurm, and make one graph of it."""
    readings: list[Reading] = []
    insides: list[NodeInternals] = []
    for file in files:
        text = _text(file)
        source = "standard input" if str(file) == "-" else str(file)
        found = Format(told) if told else format_of(text)
        if found is not Format.MATRIX:
            readings.append(read(text, source, found, storage=storage))
            continue
        matrix = read_matrix(text, source)
        readings.append(Reading(Network(), matrix.findings))
        if matrix.inside is not None:
            insides.append(NodeInternals(matrix.inside))
    if not files:
        readings.append(_from_slurm())
    for one in inside:
        fitted, findings = _fitted(one)
        insides.append(fitted)
        readings.append(Reading(Network(), findings))
    return assembled(readings, insides)


def _from_slurm() -> Reading:
    slurm = Slurm()
    switches = slurm.topology()
    if switches:
        return read_switches(switches, "scontrol show topology")
    return read_node_names((row.name for row in slurm.nodes()), "scontrol show node")


def _fitted(text: str) -> tuple[NodeInternals, tuple[TopologyFinding, ...]]:
    names, _, file = text.partition("=")
    try:
        nodes = unfold(names)
    except NodeSetError as problem:
        raise InsideOptionError(text, str(problem)) from problem
    if not nodes or not Path(file).exists() or Path(file).is_dir():  # a pipe of the shell's is no regular file
        raise InsideOptionError(text, "no such file" if nodes else "it names no node")
    reading = read_matrix(_text(Path(file)), file)
    if reading.inside is None:
        raise InsideOptionError(text, "there is no matrix of GPUs in the file")
    return NodeInternals(reading.inside, nodes), reading.findings


def _text(file: Path) -> str:
    if str(file) == "-" and sys.stdin is None:  # who started us closed it
        raise FileTroubleError("read", file, OSError(errno.EBADF, os.strerror(errno.EBADF)))
    try:
        with click.open_file(str(file), "rb") as opened:
            data: bytes = opened.read()
    except OSError as problem:
        raise FileTroubleError("read", file, problem) from problem
    # A name with a byte that is no UTF-8 is reported where it stands.
    return data.decode("utf-8-sig", errors="replace")
