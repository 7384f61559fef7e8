"""Slurm's daemon on this node: does it live, and where the site allows it, it is started again.

Its process is looked for, and its port is tried only where none is found, and seldom while it answers: slurmd logs
two error lines for a connection that says nothing.
"""

from __future__ import annotations

import errno
import logging
import shlex
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.core.tcp import connect_all
from deeplink.scheduler.node.check_result import GOOD, Look, NodeCheck, comment, observe, one_line
from deeplink.scheduler.node.child import CheckProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.settings import SlurmdSettings


PAUSES_S = (0.0, 5.0, 30.0)  # pauses before the first, second and every further try
STABLE_S = 600.0  # once it has lived for so long its earlier deaths no longer count
log = logging.getLogger(__name__)
_CONNECT_S = 0.5
PROBE_S = 30.0
"""A port that answered is not tried again for so long: all there is where /proc hides the processes of others."""
_SUBJECT = "slurmd"
STARTED_AGAIN = "slurmd was gone, and was started again"
"""What is told of it once, to be observed: else no one would learn that it had died."""


class RestartStep(Enum):
    """What to do now."""

    NOTHING = "nothing"
    WAIT = "wait"
    RESTART = "restart"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Restarts:
    """What was done so far."""

    tries: int = 0  # since it last lived for `STABLE_S`
    dead_since: float | None = None  # monotonic time; None while it lives
    alive_since: float | None = None  # monotonic time; None while it is dead, or before it was seen
    tried_at: float | None = None  # monotonic time of the last try; None before the first


def next_step(before: Restarts, *, alive: bool, now: float, most: int) -> tuple[RestartStep, Restarts]:
    """Return what to do, and what is to be remembered once it is done; a try counts when it is returned."""
    if alive:
        since = now if before.alive_since is None else before.alive_since
        after = replace(before, alive_since=since, dead_since=None)
        return RestartStep.NOTHING, Restarts(alive_since=since) if now - since >= STABLE_S else after
    dead = now if before.dead_since is None else before.dead_since
    after = replace(before, alive_since=None, dead_since=dead)
    if before.dead_since is None:  # seen once: it may be starting itself again
        return RestartStep.WAIT, after
    if before.tries >= most:
        return RestartStep.GIVEN_UP, after
    pause = PAUSES_S[min(before.tries, len(PAUSES_S) - 1)]
    if now - (dead if before.tried_at is None else before.tried_at) < pause:
        return RestartStep.WAIT, after
    return RestartStep.RESTART, replace(after, tries=before.tries + 1, tried_at=now)


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


def probe_port(port: int) -> SlurmdState:
    """Return whether a port of this host is listened on."""
    code = next(connect_all([("127.0.0.1", port)], _CONNECT_S))
    if code == 0:
        return SlurmdState.ALIVE
    return SlurmdState.DEAD if code == errno.ECONNREFUSED else SlurmdState.UNKNOWN


def _hides_others(proc: Path) -> bool:
    """Return whether /proc hides the processes of others: the first one is always there."""
    try:
        (proc / "1" / "comm").read_bytes()
    except OSError:
        return True
    return False


@dataclass(slots=True)
class SlurmdCheck(NodeCheck):
    """Looks for slurmd, and starts it again with the command that the configuration gives."""

    settings: SlurmdSettings
    clock: Clock
    node: str  # this node's name in Slurm
    restart: str = ""  # the command, empty for none: then it is told, and left to Slurm
    # slurmd is to run here; else it is missed only once it was seen. One that was never seen alive is told, and
    # not started: it may have been stopped on purpose.
    expected: bool = False
    proc: Path = Path("/proc")
    _process: int = 0
    _restarts: Restarts = field(default_factory=Restarts)
    _child: CheckProcess = field(init=False)
    _said: str = ""
    _lived: bool = False
    _tried: bool = False
    _answered: float = float("-inf")

    def __post_init__(self) -> None:
        self._child = CheckProcess(self.clock)

    @override
    def look(self) -> Look:
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
            self._start_again()
            self._tried, life = True, self._life()
        if life is SlurmdState.ALIVE and self._tried:
            log.warning("slurmd was gone and was started again (%s)", self.restart)
            self._tried = False
            return Look((observe(_SUBJECT, STARTED_AGAIN, certain=True),))
        if life is SlurmdState.ALIVE:
            return GOOD
        return Look((comment(_SUBJECT, self._problem(step)),))

    @override
    def close(self) -> None:
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
        if now - self._answered < PROBE_S:
            return SlurmdState.ALIVE
        life = probe_port(self.settings.port)
        if life is SlurmdState.ALIVE:
            self._answered = now
        elif not self._lived and _hides_others(self.proc):
            return SlurmdState.UNKNOWN  # nothing listens there: it may be another port that it listens on
        return life

    def _start_again(self) -> None:
        try:
            argv = shlex.split(self.restart)
        except ValueError as problem:
            self._said = f"slurmd_restart: {problem}"
            return
        try:
            answer = self._child.run(argv, self.settings.deadline_s * 0.8)
        except OSError as problem:
            self._said = one_line(str(problem))
            return
        if answer is None:
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
            return f"slurmd is gone, and {tries} tries to start it again did not help{why}"
        return f"slurmd is gone, being started again{f' (try {tries}: {self._said})' if self._said else ''}"
