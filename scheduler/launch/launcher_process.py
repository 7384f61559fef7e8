"""The launcher as a child of the process that holds its place in the batch script (`parent.py`), and their pipe.

By it come the run's secret, signals, and how processes ended that a launcher before this one had started; its end
is the parent's. Signals that this process gets itself are the same ones once more - Slurm and a terminal signal
every process - and count for nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, Self

from deeplink.core.errors import DeepLinkError
from deeplink.core.prctl import become_subreaper
from deeplink.scheduler.launch import parent
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.launcher_role import SPOKEN_S, launcher_on, run_of
from deeplink.scheduler.launch.process import AdoptedProcess, end_all
from deeplink.scheduler.slurm.command import become

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, MutableMapping

    from deeplink.scheduler.launch.launcher_role import RoleClaims

log = logging.getLogger(__name__)
GREETED_S = 10.0  # for the parent's first words
CLAIM_READ_S = 10.0  # for the job's folder to say whose the role is
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


class ParentLink:
    """The pipe from the parent, read by a thread. Until `forward`, being told to end ends the first launcher."""

    def __init__(self, pipe: int) -> None:
        self.secret = ""
        self.term = 0  # how often the launcher's role was taken on another node before that of our parent
        self.is_elsewhere = False  # the batch script is on another node, whose launcher is followed
        # What ended the launcher of this run before us; None for the first.
        self.died: signal.Signals | None = None
        self.died_at = 0.0
        self.is_last = False  # too many have died: we are there to end the run
        self.is_under_way = False  # there are agents, and what a launcher before us had started is taken over
        self.others: set[int] = set()  # children of the parent that are none of the run's
        self._ends: dict[int, int] = {}
        self._gone_at: float | None = None
        self._signals: list[signal.Signals] | deque[signal.Signals] = []
        self._is_forwarded = False
        self._greeted = threading.Event()
        self._late: list[signal.Signals] = []  # what came since the parent died
        parent.prepare_launcher(self._note)
        self._pipe, self._parent = pipe, os.getppid()
        threading.Thread(target=self._read, name="deeplink-parent", daemon=True).start()

    @classmethod
    def of_this_process(cls, env: MutableMapping[str, str]) -> Self:
        """Return the link of a launcher: this process, or a child of it while this one becomes the parent."""
        words = env.pop(parent.VARIABLE, "").split()
        if words[:1] == [str(os.getppid())]:  # else it is of a launcher above us
            pipe = int(words[1])
            os.set_inheritable(pipe, False)  # noqa: FBT003 - its only form
            return cls(pipe)
        command = [sys.executable, *sys.orig_argv[1:]]
        become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, {*parent.FORWARDED, signal.SIGCHLD})
        read, write = os.pipe()
        launcher = os.fork()
        if launcher:
            os.set_inheritable(write, True)  # noqa: FBT003
            become([sys.executable, "-I", "-S", parent.__file__, str(launcher), str(write), *command])
        os.close(write)
        return cls(read)

    @property
    def run(self) -> str:
        """What tells this run from others of the job; no secret."""
        return run_of(self.secret)

    def greeted(self) -> Self:
        """Return this once the parent has said what it knows."""
        if not self._greeted.wait(GREETED_S) or not self.secret:
            problem = "the process that holds the launcher's place in the batch script has died, or says nothing"
            raise LaunchError(problem, "Was it killed? `dmesg` tells whether memory ran out.", exit_code=1)
        return self

    @contextmanager
    def outlived(self) -> Iterator[None]:
        """Have an error of ours end this process at once, by a signal, and nothing of what the run has started.

        The parent then starts another launcher; an exit code would be the run's. Errors that are the run's own end
        are raised: those before anything was started, and those of the last launcher; once the run is under way
        each DeepLinkError.
        """
        try:
            yield
        except Exception as problem:
            is_ours = not isinstance(problem, DeepLinkError) if self.is_under_way else self.died is not None
            if is_ours and not self.is_last:
                log.exception("an error in the launcher, which is started again")
                os.kill(os.getpid(), signal.SIGKILL)
            raise

    def lose_role(self) -> NoReturn:
        """End this process at once, and nothing of what the run has started: the next one finds the claim."""
        log.warning("another node has taken the launcher's role: this one touches nothing more")
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def given_up(self, claims: RoleClaims, here: str) -> int | None:
        """Return the run's exit code once it has ended, where another node has the role; else None."""
        if self.died is None:
            return None
        if not self._is_lost(claims, here):
            return None
        if self.is_elsewhere and not {*parent.children(os.getppid())} - {os.getpid(), *self.others}:
            return 0  # of nobody's script, and nothing was started: this node may try for the role again
        log.warning("the launcher is another node's: this process holds its place until the run has ended")
        self.forward(deque(maxlen=64))  # what Slurm ends it ends everywhere
        while self._gone_at is None:
            with suppress(OSError, ValueError):  # of a shared folder: it may come back
                if (code := claims.hear_end()) is not None:
                    return code
            time.sleep(SPOKEN_S)
        return 128 + signal.SIGKILL

    def _is_lost(self, claims: RoleClaims, here: str) -> bool:
        """Whether another node has the role. Of a launcher before us here we take its term."""
        deadline = time.monotonic() + CLAIM_READ_S
        while True:
            try:
                newest = claims.newest()
                if newest > self.term and claims.claimant(newest) == launcher_on(here):
                    self.term = newest
            except OSError as problem:
                if time.monotonic() >= deadline or self._gone_at is not None:
                    log.warning("whose the launcher's role is cannot be read, agents will tell: %s", problem)
                    return False
            else:
                return newest > self.term
            time.sleep(SPOKEN_S)

    def forward(self, signals: deque[signal.Signals]) -> None:
        """Put signals there from here on."""
        signals.extend(self._signals)
        self._signals, self._is_forwarded = signals, True

    def gone_s(self) -> float | None:
        """Return for how long the parent has been dead; None while it lives."""
        return None if self._gone_at is None else time.monotonic() - self._gone_at

    def heed(self) -> None:
        """From here on, where the parent is dead, what this process is told itself counts, as if it were told."""
        late, self._late = self._late, []
        self._signals.extend(late)

    def end_of(self, pid: int) -> int | None:
        """Return how a process ended that a launcher before us had started; None while it runs."""
        return self._ends.get(pid)

    def end_strays(self, known: Collection[int]) -> None:
        """End what launchers before us had started and nobody knows of any more, in bounded time."""
        above = os.getppid()
        strays = {*parent.children(above)} - {*known} - self.others - {os.getpid()}
        if above == self._parent:
            end_all(AdoptedProcess(pid, self.end_of) for pid in strays)

    def _note(self, number: int, _frame: object) -> None:
        # A handler, and not SIG_IGN: programs that we start have theirs.
        if self._gone_at is not None:
            self._late.append(signal.Signals(number))

    def _read(self) -> None:
        with open(self._pipe, encoding="ascii") as lines:  # noqa: PTH123 - a descriptor
            for line in lines:
                word, *numbers = line.split()
                self._take(word, numbers)
        self._gone_at = time.monotonic()
        self._greeted.set()

    def _take(self, word: str, words: list[str]) -> None:
        if word == "secret":
            self.secret = words[0]
        elif word == "term":
            self.term = int(words[0])
            self.is_elsewhere = self.term > 0
        elif word == "died":
            self.died, self.died_at, self.is_last = signal.Signals(int(words[0])), float(words[1]), words[2] == "1"
        elif word == "ended":
            self._ends[int(words[0])] = int(words[1])
        elif word == "other":
            self.others.add(int(words[0]))
        elif word == "greeted":
            self._greeted.set()
        elif word == "signal":
            number = signal.Signals(int(words[0]))
            if number in _ENDING and not (self._is_forwarded or self.died):
                os._exit(128 + number)  # nothing is there yet that would have to be ended
            self._signals.append(number)


def follow(argv: list[str]) -> NoReturn:
    """Become the parent of a launcher that follows another node's (`parent.py`): `TERM SINCE COMMAND...`."""
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*parent.FORWARDED, signal.SIGCHLD})
    become([sys.executable, "-I", "-S", parent.__file__, "0", *argv])


if __name__ == "__main__":
    follow(sys.argv[1:])
