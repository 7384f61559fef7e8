"""Starting our own modules on nodes, and ending processes in bounded time."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.launch.backend import AgentStep
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.slurm import command as processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

TERM_WAIT_S = 0.5
KILL_WAIT_S = (
    2.0  # srun, told to end, kills the ranks of living nodes within 0.1 s, then waits 5 s for the dead one
)
LONGEST_WORDS = 2048  # bytes
OUR_WORDS = "deeplink: "  # before what ended a program of ours


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules on a node, safe from files in the user's working folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def last_line(log_file: Path, start: int) -> str:
    """Return the last line of a file, of what was written from byte `start` on, that says something."""
    # What a program of ours says of itself counts before what its starter says of its end. Empty where nothing
    # was.
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - LONGEST_WORDS))
            lines = file.read(LONGEST_WORDS).decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in reversed(lines) if line.strip()]
    return next((line for line in said if line.startswith(OUR_WORDS)), next(iter(said), ""))


def abandon_process(process: processes.Process[bytes]) -> None:
    """Kill a process group at once, so that an srun has no time to ask Slurm for the end of its step."""
    # Its step's number may belong to a newer run of the job by now, which Slurm would end in its place.
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
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except processes.TimeoutExpired:
            log.info("pid %d is still there %.1f s after %s", process.pid, wait_s, number.name)


def end_all(running: Iterable[processes.Process[bytes]]) -> None:
    """End process groups, all at once."""
    enders = [threading.Thread(target=end_process, args=(process,), daemon=True) for process in running]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


class AgentProcesses(AgentStep):
    """Agents below processes of ours: the secret goes in by standard input, the announcements come out."""

    def __init__(
        self, commands: Iterable[Sequence[str]], env: Mapping[str, str], *, secret: str, logfile: Path, count: int
    ) -> None:
        self._said: queue.Queue[NodeFacts] = queue.Queue(maxsize=count)  # each says one line
        self._logfile = logfile
        with logfile.open("ab") as errors:
            self._log_start = errors.tell()
            pipe = processes.PIPE
            self._processes = [
                processes.spawn(argv, env=env, stdin=pipe, stdout=pipe, stderr=errors) for argv in commands
            ]
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), name="deeplink-announced", daemon=True).start()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it failed at once; `ended` will tell
                    process.stdin.write(f"{secret}\n".encode())
                    process.stdin.flush()

    def _read(self, process: processes.Process[bytes]) -> None:
        for line in process.stdout or ():
            try:
                self._said.put_nowait(NodeFacts.announced(line))
            except (ValueError, TypeError, queue.Full):
                log.warning("not an announcement: %.200r", line)

    @override
    def announced(self) -> list[NodeFacts]:
        found: list[NodeFacts] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    @override
    def ended(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return None if None in codes else max(code or 0 for code in codes)

    @override
    def last_words(self) -> str:
        return last_line(self._logfile, self._log_start)

    @override
    def abandon(self) -> None:
        for process in self._processes:
            abandon_process(process)

    @override
    def stop(self) -> None:
        end_all(self._processes)
        for process in self._processes:
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
