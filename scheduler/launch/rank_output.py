"""What ranks write, on its way from a slot to srun, and into a file once no srun takes it any more.

A rank's standard output is a pipe to slurmstepd, which sends on what comes to the srun of its step. When the host
of that has died slurmstepd keeps some of it, then takes no more, and a rank would stand still in a write. So a
slot gives its rank a pipe of its own, and passes on what comes by it, each stream in a thread: in order, and
bounded. The next launcher copies the files of all nodes into the job's output: of several that append to one file
on a network file system one may undo another's.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

CHUNK = 1 << 16
STUCK_S = 10.0  # srun that takes nothing for so long counts as gone, until it takes something again
LOOK_S = 0.5
MOST_KEPT = 64 << 20  # bytes of a file; what comes then is lost
CLOSE_S = 2.0  # at the end of a slot
COPY_S = 1.0  # how often the next launcher copies
MOST_COPIED = 4 << 20  # bytes of one node, each time


class OutputRelay:
    """Passes on what this process and its children write, from now on, until `close`."""

    def __init__(self, kept: Path, descriptors: Iterable[int] = (1, 2)) -> None:
        """`kept` is the file for what srun does not take. Files and terminals are left as they are."""
        self._kept, self._keeps = kept, False
        self._streams: list[tuple[int, int, threading.Thread]] = []
        # From Python 3.12 on it warns of threads beside a fork, into the rank's output: these hold no locks.
        warnings.filterwarnings("ignore", message=r".*multi-threaded, use of (fork|forkpty)", module="__main__")
        for descriptor in descriptors:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                taker = os.dup(descriptor)
                read, write = os.pipe()
                os.dup2(write, descriptor)
                os.close(write)
                os.set_blocking(taker, False)
                relay = threading.Thread(
                    target=self._pass, args=(read, taker), name="deeplink-output", daemon=True
                )
                relay.start()
                self._streams.append((descriptor, taker, relay))

    def keep(self) -> None:
        """Write into the file from now on: the srun is gone."""
        self._keeps = True

    def close(self) -> None:
        """Pass on what has come, in bounded time; from then on this process writes to srun itself."""
        for descriptor, taker, _ in self._streams:
            os.dup2(taker, descriptor)
        deadline = time.monotonic() + CLOSE_S
        for _, _, relay in self._streams:
            relay.join(max(0.0, deadline - time.monotonic()))

    def _pass(self, read: int, taker: int) -> None:
        stuck = False
        while data := os.read(read, CHUNK):
            wait_s = 0.0 if stuck else STUCK_S
            left = data if self._keeps else _given(taker, data, wait_s, lambda: self._keeps)
            stuck = bool(left)
            if left:
                with suppress(OSError):  # no space, say: what cannot be kept is lost, and the rank goes on
                    self._keep(left)

    def _keep(self, data: bytes) -> None:
        file = os.open(self._kept, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.fstat(file).st_size < MOST_KEPT:
                os.write(file, data)  # whole lines of several ranks stay whole
        finally:
            os.close(file)


def _given(taker: int, data: bytes, wait_s: float, is_over: Callable[[], bool]) -> bytes:
    """Write to srun's pipe; return what it did not take within so long."""
    deadline = time.monotonic() + wait_s
    while data and not is_over():
        wait_s = min(LOOK_S, max(0.0, deadline - time.monotonic()))
        poll = select.poll()
        poll.register(taker, select.POLLOUT)
        if not poll.poll(wait_s * 1000):
            if time.monotonic() >= deadline:
                return data
            continue
        try:
            data = data[os.write(taker, data) :]
        except BlockingIOError:  # there is room for less than a line
            time.sleep(0.01)
        except OSError:  # slurmstepd is gone, and soon this step
            return b""
        else:
            deadline = time.monotonic() + STUCK_S
    return data


def kept_by(folder: Path, node: str) -> Path:
    """Return the file of what ranks on a node have written and no srun took."""
    return folder / f"output.{node}"


class OutputCollector:
    """Copies what is kept of all nodes to standard output, from now on, until `close`."""

    def __init__(self, folder: Path, nodes: Iterable[str], descriptor: int = 1) -> None:
        self._descriptor, self._over = descriptor, threading.Event()
        self._read_to = {path: _size(path) for path in (kept_by(folder, node) for node in nodes)}
        self._thread = threading.Thread(target=self._run, name="deeplink-collector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what is there, in bounded time."""
        self._over.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(COPY_S)
            for path in self._read_to:
                with suppress(OSError):  # it is not there, most of the time
                    self._copy(path, to_the_end=is_over)

    def _copy(self, path: Path, *, to_the_end: bool) -> None:
        with path.open("rb") as file:
            file.seek(self._read_to[path])
            data = file.read(MOST_COPIED)
        whole = data if to_the_end or len(data) == MOST_COPIED else data[: data.rfind(b"\n") + 1]
        self._read_to[path] += len(whole)
        while whole:
            whole = whole[os.write(self._descriptor, whole) :]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
