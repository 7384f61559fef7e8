"""Passes srun's standard error through, and reads from it which rank failed first.

With --kill-on-bad-exit srun ends the other ranks and then exits with the greatest code of all: 143 of those it
ended hides the 5 of the one that failed (measured, 22.05.8). Its messages tell them apart.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import threading
from typing import IO, TYPE_CHECKING

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.text import printable
from deeplink.scheduler.recovery.rank_failure import Clue, Failed, hints_in
from deeplink.scheduler.slurm.command import unstarted_step
from deeplink.scheduler.slurm.nodeset import NodeSetError, unfold

if TYPE_CHECKING:
    from deeplink.core.types import NodeName

# Behind what a rank wrote without a line break, too: a bar of progress, say.
_EXITED = re.compile(rb"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.*)")
_OWN = re.compile(rb"srun: (?:(?:error|fatal): |(?=(?:unrecognized |invalid )?option ))(?P<why>.*)")
_LAUNCH = re.compile(rb"srun: error: Task launch for \S+ failed on node (?P<node>\S+?):? ")
_WITH_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {(signal.strsignal(number) or "").lower(): number for number in signal.valid_signals()}
_LONGEST_LINE = 64 << 10
FINISH_WAIT_S = 2.0
# What was said longer before the end has nothing to do with it: a batch too large that was made smaller, say.
HINT_S = 30.0


def exit_code_of(how: str) -> int | None:
    """Return the exit code behind srun's words; None if they say nothing of the kind.

    >>> exit_code_of("Exited with exit code 5"), exit_code_of("Segmentation fault (core dumped)")
    (5, 139)
    >>> exit_code_of("Out Of Memory")  # the kernel's doing
    137
    """
    if how == "Out Of Memory":
        return 128 + signal.SIGKILL
    found = _WITH_CODE.fullmatch(how)
    if found:
        return int(found[1])
    number = _SIGNALS.get(how.removesuffix(" (core dumped)").strip().lower())
    return None if number is None else 128 + number


class FailureWatcher:
    """Copies `source` to standard error from a thread until it ends, and closes it."""

    def __init__(self, source: IO[bytes], clock: Clock | None = None) -> None:
        # Each is empty while nothing is known: exit code of the first rank that failed, srun's words about it, and
        # where it ran, or srun could start none; why srun could start no rank, where it may be able to later.
        self.code: int | None = None
        self.said = self.node = self.unstarted = self._own = ""
        self.is_rank_named = (
            False  # srun told of the end of a rank, as it does of each that fails, also with --quiet
        )
        self._source, self._clock = source, clock or SystemClock()
        self._hints: dict[Clue, float] = {}
        self._rest = b""
        self._thread = threading.Thread(target=self._copy, name="deeplink-stderr", daemon=True)
        self._thread.start()

    def failed(self, code: int = 0) -> Failed:
        """Return what is known of the first rank that failed; of an srun that exited so, if it named no rank."""
        if code and not self.is_rank_named:
            why = f": {self._own}" if self._own else ""
            return Failed(said=f"srun itself exited {code}{why}", node=self._one_node(), is_of_rank=False)
        now = self._clock.monotonic()
        recent = frozenset(hint for hint, at in self._hints.copy().items() if now - at < HINT_S)
        return Failed(said=self.said, node=self._one_node(), hints=recent)

    def _one_node(self) -> NodeName | None:
        try:
            nodes = unfold(self.node)
        except NodeSetError:
            nodes = ()
        return nodes[0] if len(nodes) == 1 else None

    def finish(self) -> None:
        """Wait, not long, until all that was written has been passed on."""
        self._thread.join(FINISH_WAIT_S)

    def _copy(self) -> None:
        passing = True
        with self._source:
            while chunk := os.read(self._source.fileno(), 1 << 16):
                if passing:
                    try:
                        _pass_on(chunk)
                    except OSError as problem:  # a full disk may have room again; what is gone is gone
                        passing = problem.errno == errno.ENOSPC
                self._scan(chunk)
            self._scan(b"\n")  # a last line without an end

    def _scan(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for hint in hints_in(b"\n".join(lines)):
            self._hints[hint] = self._clock.monotonic()
        for line in lines if self.code is None else ():
            if line.startswith(b"srun: error: Unable to "):
                self.unstarted = self.unstarted or unstarted_step(_text(line))
            found = _EXITED.search(line)
            if not found:
                self._note_own(line)
                continue
            self.is_rank_named = True
            how = _text(found["how"].strip())
            code = exit_code_of(how)
            if code:
                self.node = _text(found["node"])
                self.said = f"rank {_text(found['tasks'])} on {self.node}: {how}"
                self.code = code
                return

    def _note_own(self, line: bytes) -> None:
        found = _OWN.match(line)
        if found and not self._own:
            self._own = _text(found["why"].strip())
        if (launch := _LAUNCH.match(line)) and not self.node:
            self.node = _text(launch["node"])


def _pass_on(chunk: bytes) -> None:
    """Write to standard error; where another process made it non-blocking, what it takes in no time is dropped."""
    while chunk:
        try:
            chunk = chunk[os.write(2, chunk) :]
        except BlockingIOError:
            if not select.select([], [2], [], FINISH_WAIT_S)[1]:
                return


def _text(said: bytes) -> str:
    """Return what goes into records and onto terminals: a rank may write what looks like srun's words."""
    return printable(said.decode(errors="replace"))
