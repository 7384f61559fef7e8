"""Starting our own modules on nodes, and ending processes in bounded time."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.recipes import host_file
from deeplink.scheduler.slurm import command as processes

if TYPE_CHECKING:
    from deeplink.scheduler.launch.environment import Launch, NodeFacts

log = logging.getLogger(__name__)

TERM_WAIT_S = 0.5
KILL_WAIT_S = 2.0
"""srun, told to end, kills the ranks of living nodes within 0.1 s (measured), then waits 5 s for the dead one."""
LONGEST_WORDS = 2048  # bytes
OUR_WORDS = "deeplink: "
"""Before what ended a program of ours."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules on a node, safe from files in the user's working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def leave_host_file(launch: Launch) -> None:
    """Write the file with an attempt's nodes in rank order, for who starts something on them himself."""
    if launch.host_file:
        Path(launch.host_file).write_text(host_file(launch), encoding="utf-8")


def last_line(log_file: Path, start: int) -> str:
    """Return the last line of a file, of what was written from byte `start` on, that says something.

    What a program of ours says of itself counts before what its starter says of its end. Empty where nothing was.
    """
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - LONGEST_WORDS))
            lines = file.read(LONGEST_WORDS).decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in reversed(lines) if line.strip()]
    return next((line for line in said if line.startswith(OUR_WORDS)), next(iter(said), ""))


def drained(said: queue.Queue[NodeFacts]) -> list[NodeFacts]:
    """Take everything out of a queue without waiting."""
    found = []
    while True:
        try:
            found.append(said.get_nowait())
        except queue.Empty:
            return found


def abandon_process(process: processes.Process[bytes]) -> None:
    """Kill a process group at once, so that an srun has no time to ask Slurm for the end of its step.

    Its step's number may belong to a newer run of the job by now, which Slurm would end in its place.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_process(process: processes.Process[bytes]) -> None:
    """End a process group: ask, wait a moment, insist; returns in bounded time whatever the kernel does."""
    for number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait_s)
        except processes.TimeoutExpired:
            log.info("pid %d is still there %.1f s after %s", process.pid, wait_s, number.name)
