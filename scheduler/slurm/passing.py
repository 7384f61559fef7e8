"""A command run as if it were ourselves: what it writes comes out as it comes, what is sent to us reaches it."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.command import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.scheduler.slurm.command import Process

FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CHUNK = 1 << 16


def run_passing_on(argv: Sequence[str], *, env: Mapping[str, str], write: Callable[[bytes], None]) -> int:
    """Run a command to its end and return its exit code, or minus the signal that ended it.

    Standard input and error are ours. It ends when the command ends, whenever that is: `sbatch --wait` waits for a
    job. Must be called from the main thread.

    Args:
        argv: the command.
        env: its environment.
        write: gets what it writes to standard output, piece by piece, as soon as it is written.

    Raises:
        CommandMissingError: no such program.
    """
    with _forwarding() as started:
        ours, theirs = _channel()
        try:
            try:
                process = spawn(argv, env=env, stdin=None, stdout=theirs, new_session=False)
            finally:
                os.close(theirs)
            started(process)
            while data := _read(ours):
                write(data)
        finally:
            os.close(ours)
        return process.wait()


def _channel() -> tuple[int, int]:
    """Return both ends of a terminal: into a pipe a program writes only when it ends, or has written much.

    Where there are no terminals to be had (a container without devpts) it is a pipe all the same.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:
        return os.pipe()
    plain = termios.tcgetattr(theirs)
    plain[1] &= ~termios.OPOST  # a newline stays a newline
    termios.tcsetattr(theirs, termios.TCSANOW, plain)
    return ours, theirs


def _read(reading: int) -> bytes:
    try:
        return os.read(reading, _CHUNK)
    except OSError:  # how a terminal says that nobody holds its other end
        return b""


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[Process[bytes]], None]]:
    """Pass signals on to the process that is handed to what this gives; those that came before, then."""
    waiting: list[int] = []
    running: list[Process[bytes]] = []

    def note(number: int, _frame: object) -> None:
        if running:
            running[0].send_signal(number)
        else:
            waiting.append(number)

    def started(process: Process[bytes]) -> None:
        running.append(process)
        for number in waiting:
            process.send_signal(number)

    # What our caller ignores (nohup, a shell's background job) we and the command go on ignoring.
    caught = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_as(code: int) -> int:
    """Return the exit code to end with; where a signal ended the command, end by the same one."""
    if code >= 0:
        return code
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
