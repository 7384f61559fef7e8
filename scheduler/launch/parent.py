"""Holds the batch script's place for the launcher, and starts it again when it dies. Run by its path.

`python -I -S parent.py LAUNCHER PIPE COMMAND...`: the process that `launcher_process.py` turned into this one, its
child the launcher, and the pipe to that. With `0 TERM SINCE COMMAND...` it follows a launcher of another node that
is silent since then: it starts the first one itself, and standard input tells the run's secret. The standard
library alone, and little of it: the last to be killed for want of memory, and nothing in it that could fail.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

VARIABLE = "DEEPLINK_PARENT"  # to a launcher that is started again: our process id, and the pipe to it
FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2})
MOST_DEATHS, WITHIN_S = 5, 600.0  # of launchers: then one more is started, to end the run in order
LAST_S = 60.0  # for how long that one may take
CHILDREN_S = 3.0  # how long what is left at the end may take to end by itself
MOST_ENDS = 1024  # of processes that dead launchers had started
OOM_SCORE = 10  # how much sooner than us, in thousandths of the memory, the launcher and its children are killed


def prepare_launcher(handler: object) -> None:
    """In a child that is to be the launcher: signals come by the pipe alone, and memory is taken from it first."""
    for number in FORWARDED:
        signal.signal(number, handler)  # type: ignore[arg-type] # one for `signal.signal`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    except OSError:
        return  # no such kernel: then the larger one is killed first, which we are not


def children(of: int) -> list[int]:
    """Return the processes that a process is the parent of; those that have ended and are not reaped yet, too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(words[1]) == of:
            found.append(int(stat.parent.name))
    return found


class Parent:
    """The parent of one run: of one launcher after the other."""

    def __init__(self, command: list[str], secret: str = "", term: int = 0) -> None:
        self._command, self._secret, self._term = command, secret or os.urandom(32).hex(), term
        self._ends: dict[int, int] = {}  # of processes that were started by launchers that died
        self._told: list[int] = []  # the signals that told us to end
        self._deaths: list[float] = []
        self._how = 0  # the last launcher ended
        self._others: set[int] = set()  # children that are none of the run's: of a script that became us

    def follow(self, since: float) -> int:
        """Do the same for a run whose launcher was on a host that has died, and is silent since then."""
        self._how, self._deaths = -signal.SIGKILL, [since]
        return self.hold(*self._start())

    def hold(self, launcher: int, pipe: int) -> int:
        """Return the exit code of the run, once it has ended with all that it started."""
        self._others = {*children(os.getpid())} - {launcher}
        deadline = None
        while True:
            self._greet(pipe)
            self._how = self._await(launcher, pipe, deadline)
            os.close(pipe)
            if self._how >= 0 or self._told or deadline is not None:
                self._end_children()
                return self._how if self._how >= 0 else 128 - self._how
            now = time.monotonic()
            self._deaths = [at for at in self._deaths if now - at < WITHIN_S] + [now]
            then = "it is started again, and the ranks go on"
            if len(self._deaths) >= MOST_DEATHS:
                deadline = now + LAST_S
                then = f"{len(self._deaths)} times in {WITHIN_S / 60:.0f} minutes: the run ends"
            _say(f"the launcher was ended by signal {-self._how}; {then}")
            launcher, pipe = self._start()

    def _start(self) -> tuple[int, int]:
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(read)
            return child, write
        try:
            prepare_launcher(signal.SIG_IGN)  # until it has a handler
            os.set_inheritable(read, True)  # noqa: FBT003 - its only form
            os.environ[VARIABLE] = f"{os.getppid()} {read}"
            os.execv(self._command[0], self._command)  # noqa: S606 - what it is for
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # an exit code would be the run's

    def _greet(self, pipe: int) -> None:
        """Tell a launcher the run's secret, what became of those before it, and how processes of theirs ended."""
        os.set_blocking(pipe, False)
        _tell(pipe, f"secret {self._secret}")
        _tell(pipe, f"term {self._term}")
        if self._deaths:
            is_last = int(len(self._deaths) >= MOST_DEATHS)
            _tell(pipe, f"died {-self._how} {self._deaths[-1]} {is_last}")
        for pid, code in self._ends.items():
            _tell(pipe, f"ended {pid} {code}")
        for pid in self._others:
            _tell(pipe, f"other {pid}")
        _tell(pipe, "greeted")

    def _await(self, launcher: int, pipe: int, deadline: float | None) -> int:
        """Return how the launcher ended: its exit code, or minus the signal. Meanwhile signals are passed on."""
        while True:
            how = self._reaped(launcher, pipe)
            if how is not None:
                return how
            if deadline is not None and time.monotonic() > deadline:
                os.kill(launcher, signal.SIGKILL)
            found = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, 1.0 if deadline is not None else 3600.0)
            if found is not None and found.si_signo in FORWARDED:
                if found.si_signo in {signal.SIGTERM, signal.SIGINT}:
                    self._told.append(found.si_signo)
                _tell(pipe, f"signal {found.si_signo}")

    def _reaped(self, launcher: int, pipe: int) -> int | None:
        how = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return how
            if not pid:
                return how
            code = os.waitstatus_to_exitcode(status)
            if pid == launcher:
                how = code
            elif len(self._ends) < MOST_ENDS:
                self._ends[pid] = code
                _tell(pipe, f"ended {pid} {code}")

    def _end_children(self) -> None:
        """End what launchers left behind, each with its process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + CHILDREN_S
            for pid in (left := self._left()):
                try:
                    os.kill(-pid if os.getpgid(pid) == pid else pid, number)
                except OSError:
                    continue
            while left and time.monotonic() < deadline:
                signal.sigtimedwait({signal.SIGCHLD}, 0.1)
                self._reaped(0, -1)
                left = self._left()

    def _left(self) -> set[int]:
        return {*children(os.getpid())} - self._others


def _tell(pipe: int, line: str) -> None:
    try:
        os.write(pipe, f"{line}\n".encode())
    except OSError:
        return  # it is dead, or takes nothing in: that it is will be seen


def _say(sentence: str) -> None:
    try:
        os.write(2, f"deeplink: {sentence}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    if sys.argv[1] == "0":
        if not (secret := sys.stdin.readline().strip()):
            _say("the agent that started this launcher has died, and told no secret: nothing is followed")
            sys.exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.exit(Parent(sys.argv[4:], secret, int(sys.argv[2])).follow(float(sys.argv[3])))
    sys.exit(Parent(sys.argv[3:]).hold(int(sys.argv[1]), int(sys.argv[2])))
