"""A command that may hang for ever: asked, left alone, and found again when it returns. Never more than one.

Everything is started through env(1): its program lies on the node's own disk, so that our process, which holds
Python's lock while it starts another one, does not wait for a mount that the command itself lies on.
"""

from __future__ import annotations

import os
import selectors
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.command import PIPE, kill_group, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.scheduler.slurm.command import Process

ENV = "/usr/bin/env"
SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT = 64 << 10
KILLED_WAIT_S = 1.0
_LOOK_S = 0.05
NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended; `code` is negative for a signal."""

    code: int
    stdout: str
    stderr: str


def clean_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a check's command is started with: a PATH also where ours is empty, and messages in English."""
    given = dict(os.environ if env is None else env)
    path = given.get("PATH", "")
    return {**given, "PATH": f"{path}:{SAFE_PATH}" if path else SAFE_PATH, "LC_ALL": "C"}


class CheckProcess:
    """At most one running command, of whose output 64 KiB are kept; another thread may kill it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process: Process[bytes] | None = None
        self._written: dict[int, bytearray] = {}
        self._began = 0.0
        self._lock = threading.Lock()

    @property
    def age_s(self) -> float:
        """For how long the running command has; 0 where none is."""
        return self._clock.monotonic() - self._began if self._process is not None else 0.0

    def begin(self, argv: Sequence[str], *, cwd: Path | None = None) -> None:
        """Start a command, unless one still runs: then that one is waited for."""
        if self._process is not None:
            return
        self._began = self._clock.monotonic()
        process = spawn([ENV, *argv], env=clean_environment(), cwd=cwd, stdout=PIPE, stderr=PIPE)
        self._written = {}
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._written[pipe.fileno()] = bytearray()
        self._process = process

    def run(self, argv: Sequence[str], wait_s: float, *, cwd: Path | None = None) -> CommandResult | None:
        """Run a command, and kill it where it takes longer; None then, or where an earlier one hangs."""
        if self.age_s:
            self.kill()
            if self.age_s:  # in the kernel: left alone, and no other is started
                return None
        self.begin(argv, cwd=cwd)
        result = self.answer(max(0.0, wait_s))
        if result is None:
            self.kill()
        return result

    def answer(self, wait_s: float) -> CommandResult | None:
        """Return how the command ended; None when it has not within `wait_s`. It is left alone then."""
        if not self._lock.acquire(timeout=wait_s):
            return None
        try:
            return self._answered(wait_s)
        finally:
            self._lock.release()

    def _answered(self, wait_s: float) -> CommandResult | None:
        process = self._process
        if process is None:
            return None
        end = self._clock.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            for number in self._written:
                selector.register(number, selectors.EVENT_READ)
            while process.poll() is None:
                left = end - self._clock.monotonic()
                if left <= 0:
                    return None
                self._read(selector, min(_LOOK_S, left))
            self._read(selector, 0.0)
        return self._ended(process)

    def kill(self, wait_s: float = KILLED_WAIT_S) -> None:
        """End the command with all it started, if that works at once; one that hangs in the kernel is kept."""
        process = self._process
        if process is None:
            return
        kill_group(process)
        self.answer(wait_s)

    def _read(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        if not selector.get_map():
            self._clock.sleep(wait_s)
            return
        for key, _ in selector.select(wait_s):
            kept = self._written[key.fd]
            # Not until it is empty: of one that writes faster than we read it never would be.
            chunk = os.read(key.fd, _KEPT)
            kept += chunk[: _KEPT - len(kept)]
            if not chunk:
                selector.unregister(key.fd)

    def _ended(self, process: Process[bytes]) -> CommandResult:
        said = [kept.decode(errors="replace") for kept in self._written.values()]
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        self._process, self._written = None, {}
        return CommandResult(process.returncode, *said)
