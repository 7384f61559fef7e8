"""Reads the fabric for `deeplink topology`: from the files that are named, or from Slurm."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import file_trouble
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold
from deeplink.scheduler.topology.network import Network
from deeplink.scheduler.topology.sources.assemble import Format, NodeInternals, assembled, format_of, read
from deeplink.scheduler.topology.sources.gathering import Reading, read_node_names
from deeplink.scheduler.topology.sources.nvidia import read_matrix
from deeplink.scheduler.topology.sources.slurm_topology import read_switches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.core.config import Config
    from deeplink.core.finding import Finding
    from deeplink.scheduler.launch.shared_network import SiteFabric

log = logging.getLogger(__name__)


def read_all(
    files: Sequence[Path], format_name: str | None, inside: Sequence[str], storage: tuple[str, ...]
) -> Reading:
    """Read all that was named, or ask Slurm, and make one graph of it."""
    readings: list[Reading] = []
    insides: list[NodeInternals] = []
    for file in files:
        text = _text(file)
        source = "standard input" if str(file) == "-" else str(file)
        found = Format(format_name) if format_name else format_of(text)
        if found is not Format.MATRIX:
            readings.append(read(text, source, found, storage=storage))
            continue
        matrix = read_matrix(text, source)
        readings.append(Reading(Network(), matrix.findings))
        if matrix.inside is not None:
            insides.append(NodeInternals(matrix.inside))
    if not files:
        slurm = Slurm()
        if switches := slurm.topology():
            readings.append(read_switches(switches, "scontrol show topology"))
        else:
            readings.append(read_node_names((row.name for row in slurm.nodes()), "scontrol show node"))
    for one in inside:
        fitted, findings = _fitted(one)
        insides.append(fitted)
        readings.append(Reading(Network(), findings))
    return assembled(readings, insides)


def _inside_problem(text: str, problem: str) -> DeepLinkError:
    remedy = "Give NODES=FILE, say `n[0-7]=topo.txt`, with what `nvidia-smi topo -m` printed there."
    return DeepLinkError(f"--inside {text}: {problem}", remedy=remedy, exit_code=2)


def _fitted(text: str) -> tuple[NodeInternals, tuple[Finding, ...]]:
    names, _, file = text.partition("=")
    try:
        nodes = unfold(names)
    except NodeSetError as problem:
        raise _inside_problem(text, str(problem)) from problem
    if not nodes or not Path(file).exists() or Path(file).is_dir():  # a pipe of the shell's is no regular file
        raise _inside_problem(text, "no such file" if nodes else "it names no node")
    reading = read_matrix(_text(Path(file)), file)
    if reading.inside is None:
        raise _inside_problem(text, "there is no matrix of GPUs in the file")
    return NodeInternals(reading.inside, nodes), reading.findings


def _text(file: Path) -> str:
    if str(file) == "-" and sys.stdin is None:  # who started us closed it
        raise file_trouble("read", file, OSError(errno.EBADF, os.strerror(errno.EBADF)))
    try:
        with click.open_file(str(file), "rb") as opened:
            data: bytes = opened.read()
    except OSError as problem:
        raise file_trouble("read", file, problem) from problem
    # A name with a byte that is no UTF-8 is reported where it stands.
    return data.decode("utf-8-sig", errors="replace")


def site_of(config: Config) -> SiteFabric | None:
    """Return what the setting `topology` describes; None where it is not set, or cannot be read."""
    if config.topology is None:
        return None
    from deeplink.scheduler.launch.shared_network import SiteFabric

    try:
        return SiteFabric.of(read_all([config.topology], None, (), ()).network, str(config.topology))
    except DeepLinkError as problem:
        # Slurm's word is worse, not wrong: no reason for every job of the site not to run.
        log.warning("the setting topology: %s", problem)
        return None
