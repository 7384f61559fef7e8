"""What ranks write, on its way from a slot to srun, and by way of files where no srun takes it.

A rank's standard output is a pipe to slurmstepd, which sends on what comes to the srun of its step. When the host
of that has died slurmstepd keeps some of it, then takes no more, and a rank would stand still in a write. So a
slot gives its rank a pipe of its own, and passes on what comes by it, each stream in a thread: in order, and
bounded. The launcher copies the files of all nodes into the job's output, and removes them. Each file has one
writer, which never touches it again once it has its final name: on a network file system one of several that
append may undo what another did, and what is cut at one end may come back at the other.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

CHUNK = 1 << 16
STUCK_S = 10.0  # srun that takes nothing for so long counts as gone, until it takes something again
LOOK_S = 0.5
MOST_KEPT = 64 << 20  # bytes of a stream that nobody has copied; what comes then is lost
SEAL_S = 1.0  # what is kept gets its final name after so long, at the end of a line
LONG_LINE_S = 10.0  # and elsewhere after so long
MOST_IN_FILE = 4 << 20
CLOSE_S = 2.0  # at the end of a slot
COPY_S = 1.0  # how often the launcher copies
COPIED_S = 10.0  # how long it copies at the end of the run
_OPEN = ".part"  # of a file that is written to
_FULL = b"deeplink slot: %d MiB of output wait to be copied, and nobody does: what comes now is lost\n"


def kept_folder(folder: Path, run: str) -> Path:
    """Return where slots of a run keep what no srun takes; a job may have several runs at once."""
    return folder / f"output.{run}"


class KeptStream:
    """The files of one stream of one slot. Used by one thread, beside forks: it has no locks."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name` is of this stream alone; nothing is made before something is to be kept."""
        self._folder, self._name, self._number = folder, name, 0
        self._file: int | None = None
        self._size, self._began, self._is_line = 0, 0.0, True
        self._sealed: deque[tuple[Path, int]] = deque()
        self._look_at, self._is_full = 0.0, False

    @property
    def is_empty(self) -> bool:
        """Whether all that was kept has been copied, as far as is known."""
        return not (self._size or self._sealed)

    def look(self) -> None:
        """Give what is kept its final name where it is time, and see what has been copied."""
        age_s = time.monotonic() - self._began
        if self._size and age_s >= (SEAL_S if self._is_line else LONG_LINE_S):
            self.seal()
        if self._sealed and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + SEAL_S / 2
            while self._sealed and not self._sealed[0][0].exists():
                self._sealed.popleft()

    def add(self, data: bytes) -> None:
        """Keep this, or lose it where too much is kept. Raises OSError where it cannot be."""
        if self._size + sum(size for _, size in self._sealed) + len(data) > MOST_KEPT:
            if self._is_full:
                return
            data = _FULL % (MOST_KEPT >> 20)
            self._is_full = True
        else:
            self._is_full = False
        if self._file is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(self._path(_OPEN), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._began = time.monotonic()
        while data:
            written = os.write(self._file, data)
            self._size, self._is_line = self._size + written, data[written - 1 : written] == b"\n"
            data = data[written:]
        if self._size >= MOST_IN_FILE:
            self.seal()

    def seal(self) -> None:
        """Give what is kept its final name. Raises OSError."""
        if self._file is not None:
            file, size, part, whole = self._file, self._size, self._path(_OPEN), self._path()
            # Whatever comes of it: what follows is kept in another file.
            self._file, self._size, self._number = None, 0, self._number + 1
            try:
                os.close(file)
            finally:
                part.rename(whole)
            self._sealed.append((whole, size))

    def _path(self, ending: str = "") -> Path:
        return self._folder / f"{self._name}.{self._number:08d}{ending}"


class OutputRelay:
    """Passes on what this process and its children write, from now on, until `close`."""

    def __init__(self, folder: Path, node: str, descriptors: Iterable[int] = (1, 2)) -> None:
        """`folder` is for what srun does not take. Files and terminals are left as they are."""
        self._keeps, self._close_by = False, float("inf")
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
                kept = KeptStream(folder, f"{node}.{os.getpid()}.{time.time_ns()}.{descriptor}")
                relay = threading.Thread(
                    target=self._pass, args=(read, taker, kept), name="deeplink-output", daemon=True
                )
                relay.start()
                self._streams.append((descriptor, taker, relay))

    def keep(self) -> None:
        """Write into files from now on: the srun is gone."""
        self._keeps = True

    def close(self) -> None:
        """Pass on what has come, in bounded time; from then on this process writes to srun itself."""
        deadline = time.monotonic() + CLOSE_S
        self._close_by = deadline - CLOSE_S / 2  # what srun has not taken by then is kept
        for descriptor, taker, _ in self._streams:
            os.dup2(taker, descriptor)
        for _, _, relay in self._streams:
            relay.join(max(0.0, deadline - time.monotonic()))

    def _pass(self, read: int, taker: int, kept: KeptStream) -> None:
        stuck, poll = False, select.poll()
        poll.register(read, select.POLLIN)
        while True:
            if not kept.is_empty:
                with suppress(OSError):  # what cannot be done now is tried again
                    kept.look()
                if not poll.poll(SEAL_S * 1000):
                    continue
            if not (data := os.read(read, CHUNK)):
                break
            # What was kept is copied first: what follows would overtake it.
            if not self._keeps and kept.is_empty:
                data = _given(taker, data, 0.0 if stuck else STUCK_S, self._is_over)
                stuck = bool(data)
            if data:
                with suppress(OSError):  # no space, say: what cannot be kept is lost, and the rank goes on
                    kept.add(data)
        with suppress(OSError):
            kept.seal()

    def _is_over(self) -> bool:
        return self._keeps or time.monotonic() >= self._close_by


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


class OutputCollector:
    """Copies what slots of a run have kept to standard output and removes it, from now on, until `close`."""

    def __init__(self, folder: Path, descriptor: int = 1) -> None:
        """`folder` is the run's (`kept_folder`)."""
        self._folder, self._descriptor, self._over = folder, descriptor, threading.Event()
        self._thread = threading.Thread(target=self._run, name="deeplink-collector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what is there, in bounded time: no slot of the run writes any more."""
        self._over.set()
        self._thread.join(COPIED_S)

    def _run(self) -> None:
        while not self._over.wait(COPY_S):
            self._copy()
        if self._copy():
            time.sleep(COPY_S)  # slots that leave name theirs
        if not self._copy(all_there_is=True):  # what slots left that were killed, too
            with suppress(OSError):
                self._folder.rmdir()

    def _copy(self, *, all_there_is: bool = False) -> bool:
        """Return whether anything is left there."""
        is_left = False
        try:
            for path in sorted(self._folder.iterdir()):  # by name: each stream's in their order
                if all_there_is or path.suffix != _OPEN:
                    with suppress(FileNotFoundError):
                        self._move(path)
                else:
                    is_left = True
        except OSError:  # it is not there, most of the time
            pass
        return is_left

    def _move(self, path: Path) -> None:
        with path.open("rb") as file:
            while data := file.read(MOST_IN_FILE):
                while data:
                    data = data[os.write(self._descriptor, data) :]
        path.unlink()
