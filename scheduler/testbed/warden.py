"""Process 1 of a machine where there are no namespaces: adopts every orphan, so that nothing of it gets away.

Started as `python -m deeplink.scheduler.testbed.warden JSON`, JSON a list of argument lists: its daemons, in the
foreground. It ends, and with it everything below it, on SIGTERM, or when standard input ends before `stay`
was read. SIGHUP starts the daemons again that are gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from deeplink.core.clock import SystemClock
from deeplink.core.prctl import become_subreaper
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed.processes import descendants, table

if TYPE_CHECKING:
    from collections.abc import Sequence

STAY = b"stay\n"
_LOOK_S = 0.5
_END_S = 8.0
_PAUSE_S = 0.01


class Warden:
    """Keeps the daemons of one machine and whatever they start."""

    def __init__(self, daemons: Sequence[Sequence[str]]) -> None:
        self._daemons = [tuple(argv) for argv in daemons]
        self._running: dict[int, tuple[str, ...]] = {}
        self._ending = self._starting = False

    def run(self) -> None:
        """Return once all is over."""
        become_subreaper()
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        # Signals end the wait below through this pipe; what they mean is decided there.
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, self._noted)
        self._start()
        stdin: int | None = sys.stdin.fileno()
        while not self._ending:
            ready, _, _ = select.select([reads, *([] if stdin is None else [stdin])], [], [], _LOOK_S)
            if reads in ready:
                os.read(reads, 4096)
            if stdin in ready and stdin is not None:
                if os.read(stdin, len(STAY)) != STAY:
                    self._ending = True
                stdin = None
            self._reap()
            if self._starting:
                self._starting = False
                self._start()
        self._end()

    def _noted(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            self._starting = True
        elif number != signal.SIGCHLD:
            self._ending = True

    def _start(self) -> None:
        for argv in self._daemons:
            if argv not in self._running.values():
                # Should the warden be killed, its daemons go with it.
                process = command.spawn(["setpriv", "--pdeathsig=KILL", *argv])
                self._running[process.pid] = argv
                process.returncode = 0  # `_reap` takes its exit code, as it does for every orphan

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._running.pop(pid, None)

    def _end(self) -> None:
        clock = SystemClock()
        deadline = clock.monotonic() + _END_S
        while below := descendants(os.getpid(), table()):
            for who in below:
                who.send(signal.SIGKILL)
            clock.sleep(_PAUSE_S)
            self._reap()
            if clock.monotonic() > deadline:
                sys.exit(f"still there after {_END_S:g} s: {below}")


if __name__ == "__main__":
    Warden(json.loads(sys.argv[1])).run()
