"""Slurm's daemon on this node: does it live, and where the site allows it, it is started anew.

Its process is looked for, and its port is tried only where none is found, and seldom while it answers: slurmd logs
two error lines for a connection that says nothing.
"""

from __future__ import annotations

import errno
import logging
import shlex
import socket
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.child import CheckProcess
from deeplink.scheduler.health.look import GOOD, Look, comment, observe, one_line
from deeplink.scheduler.health.restart import Restarts, RestartStep, next_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.health.settings import SlurmdSettings

log = logging.getLogger(__name__)

_CONNECT_S = 0.5
KNOCK_S = 30.0
"""A port that answered is not tried again for so long: all there is where /proc hides the processes of others."""
_SUBJECT = "slurmd"
STARTED_ANEW = "slurmd was gone, and was started anew"
"""What is told of it once, to be observed: else nobody would learn that it had died."""


class SlurmdState(Enum):
    """How slurmd is."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def processes_of_slurmd(proc: Path, node: str) -> Iterator[int]:
    """Yield the process numbers of this node's slurmd; several nodes may share a host (slurmd -N NODE)."""
    for path in proc.iterdir():
        if path.name.isdigit() and is_slurmd(path, node):
            yield int(path.name)


def is_slurmd(process: Path, node: str) -> bool:
    """Return whether a folder below /proc is that of this node's slurmd. A zombie is none."""
    try:
        # Debian calls it slurmd-wlm; slurmstepd is another program.
        if (process / "comm").read_bytes().strip() not in {b"slurmd", b"slurmd-wlm"}:
            return False
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    names = [after for word, after in pairwise(words) if word == "-N"]
    names += [word.removeprefix("-N") for word in words if word.startswith("-N") and word != "-N"]
    return any(words) and (not names or node in names)


def knock(port: int) -> SlurmdState:
    """Return whether somebody listens on a port of this host."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S):
            return SlurmdState.ALIVE
    except OSError as problem:
        return SlurmdState.DEAD if problem.errno == errno.ECONNREFUSED else SlurmdState.UNKNOWN


def _hides_others(proc: Path) -> bool:
    """Return whether /proc hides the processes of others: the first one is always there."""
    try:
        (proc / "1" / "comm").read_bytes()
    except OSError:
        return True
    return False


@dataclass(slots=True)
class SlurmdCheck:
    """Looks for slurmd, and starts it anew with the command that the configuration gives.

    Attributes:
        node: this node's name in Slurm.
        restart: the command, empty for none: then it is told, and left to Slurm.
        expected: slurmd is to run here; else it is missed only once it was seen. One that was never seen alive is
            told, and not started: somebody may have stopped it.
    """

    settings: SlurmdSettings
    clock: Clock
    node: str
    restart: str = ""
    expected: bool = False
    proc: Path = Path("/proc")
    _process: int = 0
    _restarts: Restarts = field(default_factory=Restarts)
    _child: CheckProcess | None = None
    _said: str = ""
    _lived: bool = False
    _tried: bool = False
    _answered: float = float("-inf")

    def look(self) -> Look:
        """Look once; a command that is given is waited for within the deadline."""
        life = self._life()
        if life is SlurmdState.ALIVE:
            self.expected = self._lived = True
        elif life is SlurmdState.UNKNOWN:
            return Look((), "neither its process nor its port tells whether slurmd lives")
        elif not self.expected:
            return GOOD
        step, self._restarts = next_step(
            self._restarts, alive=life is SlurmdState.ALIVE, now=self.clock.monotonic(), most=self.settings.tries
        )
        if step is RestartStep.RESTART and self.restart and self._lived:
            self._start_anew()
            self._tried, life = True, self._life()
        if life is SlurmdState.ALIVE and self._tried:
            log.warning("slurmd was gone and was started anew (%s)", self.restart)
            self._tried = False
            return Look((observe(_SUBJECT, STARTED_ANEW, certain=True),))
        if life is SlurmdState.ALIVE:
            return GOOD
        return Look((comment(_SUBJECT, self._problem(step)),))

    def close(self) -> None:
        """End a command that still runs."""
        if self._child is not None:
            self._child.kill()

    def _life(self) -> SlurmdState:
        if self._process and is_slurmd(self.proc / str(self._process), self.node):
            return SlurmdState.ALIVE
        try:
            self._process = next(processes_of_slurmd(self.proc, self.node), 0)
        except OSError:
            self._process = 0
        now = self.clock.monotonic()
        if self._process:
            self._answered = float("-inf")  # it can be seen: what its port once said is no word on it any more
            return SlurmdState.ALIVE
        if now - self._answered < KNOCK_S:
            return SlurmdState.ALIVE
        life = knock(self.settings.port)
        if life is SlurmdState.ALIVE:
            self._answered = now
        elif not self._lived and _hides_others(self.proc):
            return SlurmdState.UNKNOWN  # nobody listens there: it may be another port that it listens on
        return life

    def _start_anew(self) -> None:
        try:
            argv = shlex.split(self.restart)
        except ValueError as problem:
            self._said = f"slurmd_restart: {problem}"
            return
        child = self._child = self._child or CheckProcess(self.clock)
        try:
            child.begin(argv)
        except OSError as problem:
            self._said = one_line(str(problem))
            return
        answer = child.answer(self.settings.deadline_s * 0.8)
        if answer is None:
            child.kill()
            self._said = f"{argv[0]} did not end"
        else:
            said = one_line(answer.stderr or answer.stdout)
            self._said = f"{argv[0]} exited {answer.code}{f': {said}' if said else ''}" if answer.code else ""

    def _problem(self, step: RestartStep) -> str:
        tries = self._restarts.tries
        if not (self.restart and self._lived):
            return "slurmd is gone"
        if step is RestartStep.GIVEN_UP:
            why = f": {self._said}" if self._said else ""
            return f"slurmd is gone, and {tries} tries to start it anew did not help{why}"
        return f"slurmd is gone, being started anew{f' (try {tries}: {self._said})' if self._said else ''}"
