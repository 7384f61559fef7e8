"""Starting our own modules on nodes, and ending processes in bounded time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.launch.backend import AgentStep, RankStep
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.recovery.rank_failure import Failed
from deeplink.scheduler.slurm import command as processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.launch.backend import EndOf

log = logging.getLogger(__name__)

TERM_WAIT_S = 0.5
KILL_WAIT_S = (
    2.0  # srun, told to end, kills the ranks of living nodes within 0.1 s, then waits 5 s for the dead one
)
LEAVE_S = 1.0  # how long slots that were told to leave take: of a step of theirs that is ended srun complains
LONGEST_WORDS = 2048  # bytes
OUR_WORDS = "deeplink: "  # before what ended a program of ours
UNTOLD_S = 1.0  # how long the word on how a process ended may take after its end
_MOST_SAID = 16 << 20  # bytes of announcements: a node says one line, some 1 KiB


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


class AdoptedProcess:
    """A process that a launcher before this one started: the parent of both reaps it, and tells how it ended.

    With 0 for its id it is on another host: nothing is known of it, and nothing done to it.
    """

    def __init__(self, pid: int, end_of: EndOf) -> None:
        if pid < 0 or pid == 1:  # to a signal that would be everybody
            raise ValueError(f"{pid} is no process of ours")
        self.pid, self._end_of = pid, end_of
        self.returncode: int | None = None
        self._missed_at: float | None = None

    def poll(self) -> int | None:
        """Return how it ended, as `Popen.poll` does; as killed where nobody can say."""
        if not self.pid:
            return None
        if self.returncode is None:
            self.returncode = self._end_of(self.pid)
        if self.returncode is None and not Path(f"/proc/{self.pid}").exists():
            self._missed_at = self._missed_at or time.monotonic()
            if time.monotonic() - self._missed_at > UNTOLD_S:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the same once it has ended."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise processes.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code


class EndedRanks(RankStep):
    """The ranks of an attempt that has none: its launcher died after their end, or before their start."""

    def __init__(self, code: int = 128 + signal.SIGKILL) -> None:
        self._code = code

    @override
    def exit_code(self) -> int:
        return self._code

    @override
    def failed(self) -> Failed:
        return Failed()


StarterProcess = processes.Process[bytes] | AdoptedProcess


def abandon_process(process: StarterProcess) -> None:
    """Kill a process group at once, so that an srun has no time to ask Slurm for the end of its step."""
    # Its step's number may belong to a newer run of the job by now, which Slurm would end in its place.
    if process.pid and process.poll() is None:  # to a signal 0 would be our own group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_process(process: StarterProcess) -> None:
    """End a process group: ask, wait a moment, insist; returns in bounded time whatever the kernel does."""
    for number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        if not process.pid or process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except processes.TimeoutExpired:
            log.info("pid %d is still there %.1f s after %s", process.pid, wait_s, number.name)


def end_all(running: Iterable[StarterProcess]) -> None:
    """End process groups, all at once."""
    enders = [threading.Thread(target=end_process, args=(process,), daemon=True) for process in running]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


@dataclass(frozen=True, slots=True)
class StartedAgents:
    """What is needed to go on with agents that another process started."""

    pids: tuple[int, ...]  # of their starters
    said: str  # the file of their announcements
    log_start: int  # where their part of the log file begins


@dataclass(frozen=True, slots=True)
class StartedSlots:
    """What is needed to go on with slots for ranks that another process started."""

    number: int
    has_begun: bool
    steps: tuple[tuple[int, Mapping[NodeName, int]], ...]  # of each the id of its starter, and slots of each node


class AgentProcesses(AgentStep):
    """Agents below processes of ours: the secret goes in by standard input, the announcements into a file.

    A file, for a pipe would end with us: agents outlive their launcher. With `adopted` none is started.
    """

    def __init__(
        self,
        commands: Iterable[Sequence[str]],
        env: Mapping[str, str],
        *,
        secret: str,
        logfile: Path,
        adopted: tuple[StartedAgents, EndOf] | None = None,
    ) -> None:
        self._logfile, self._read_to = logfile, 0
        self._processes: list[StarterProcess]
        if adopted is not None:
            self.started, end_of = adopted
            self._processes = [AdoptedProcess(pid, end_of) for pid in self.started.pids]
            return
        said, path = tempfile.mkstemp(prefix="announced-", dir=logfile.parent)
        with logfile.open("ab") as errors, os.fdopen(said, "wb") as output:
            log_start = errors.tell()
            running = [
                processes.spawn(argv, env=env, stdin=processes.PIPE, stdout=output, stderr=errors)
                for argv in commands
            ]
        self._processes = [*running]
        self.started = StartedAgents(tuple(process.pid for process in running), path, log_start)
        for process in running:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it failed at once; `ended` will tell
                    process.stdin.write(f"{secret}\n".encode())
                    process.stdin.flush()

    @override
    def announced(self) -> list[NodeFacts]:
        try:
            with Path(self.started.said).open("rb") as file:
                file.seek(self._read_to)
                whole = file.read(_MOST_SAID).rpartition(b"\n")[0]
        except FileNotFoundError:  # they were let go of
            return []
        except OSError as problem:
            log.warning("announcements: %s", problem)
            return []
        if not whole:
            return []
        self._read_to += len(whole) + 1
        found: list[NodeFacts] = []
        for line in whole.split(b"\n"):
            try:
                found.append(NodeFacts.announced(line))
            except (ValueError, TypeError):
                log.warning("not an announcement: %.200r", line)
        return found

    @override
    def ended(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return None if None in codes or not codes else max(code or 0 for code in codes)

    @override
    def last_words(self) -> str:
        return last_line(self._logfile, self.started.log_start)

    @override
    def abandon(self) -> None:
        for process in self._processes:
            abandon_process(process)
        self._forget()

    @override
    def stop(self) -> None:
        end_all(self._processes)
        for process in self._processes:
            if isinstance(process, processes.Process) and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._forget()

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            Path(self.started.said).unlink(missing_ok=True)
