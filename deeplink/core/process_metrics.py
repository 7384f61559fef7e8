"""Counters of this process and its DataLoader workers that go with each progress report: samples read, saves.

Code that has such numbers offers them here, and pays nothing until `numbers` asks. Names begin with `deeplink_`,
so that no curve takes them for a metric of the user's.

Workers are processes of their own and report nothing: they count in a file of some KiB beside the job's token,
which they and their trainer map. A worker adds to a row of it that it has locked; the kernel ends the lock with
the worker, and the next one goes on with what the row has.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deeplink.core.process_identity import started_ticks

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "deeplink_"
LOCAL_SAMPLES = "deeplink_local_samples"
PEER_SAMPLES = "deeplink_peer_samples"
HOME_SAMPLES = "deeplink_home_samples"
SOURCE_SAMPLES = "deeplink_source_samples"
"""Samples read since the process began: from this node's store, other nodes, the packed home, the source."""
LOCAL_BYTES = "deeplink_local_bytes"
PEER_BYTES = "deeplink_peer_bytes"
HOME_BYTES = "deeplink_home_bytes"
SOURCE_BYTES = "deeplink_source_bytes"
"""Bytes of these."""
COMPARED_SAMPLES = "deeplink_compared_samples"
"""Read from the source besides, to compare how fast that is."""
WAITED_S = "deeplink_waited_s"
"""Seconds that reads took for samples that were not on this node, of all workers together."""
_SHARED = (
    *(LOCAL_SAMPLES, PEER_SAMPLES, HOME_SAMPLES, SOURCE_SAMPLES),
    *(LOCAL_BYTES, PEER_BYTES, HOME_BYTES, SOURCE_BYTES),
    *(COMPARED_SAMPLES, WAITED_S),
)
_ROWS = 256
"""Workers of one trainer that are counted at once."""
_SIZE = _ROWS * len(_SHARED) * 8
DATA_S = "deeplink_data_s"
COMPUTE_S = "deeplink_compute_s"
OTHERS_S = "deeplink_others_s"
CHECKPOINT_S = "deeplink_checkpoint_s"
REST_S = "deeplink_rest_s"
"""Seconds of its steps so far: waiting for data, computing, waiting for other ranks, saving, the rest."""
STEPS = "deeplink_steps"
"""How many steps these seconds are of."""
LOADED_SAMPLES = "deeplink_loaded_samples"
"""Samples that DataLoaders handed to the loop in these steps."""
PARTS_S = (DATA_S, COMPUTE_S, OTHERS_S, CHECKPOINT_S, REST_S)
CHECKPOINT_STEP = "deeplink_checkpoint_step"
CHECKPOINT_UNIX = "deeplink_checkpoint_unix"
"""Step and time of the last checkpoint that is whole."""
CHECKPOINT_EVERY = "deeplink_checkpoint_every"
"""Steps between the last two."""
MEASURED = (*PARTS_S, STEPS, LOADED_SAMPLES, *_SHARED)
"""Counters that an agent keeps over time."""
OF_EVERY_RANK = frozenset({DATA_S, COMPUTE_S, REST_S, STEPS, CHECKPOINT_STEP, CHECKPOINT_UNIX})
"""What a launcher uses of ranks other than the first: an agent passes on no more."""


class Countable(Protocol):
    """Something that counts."""

    def vitals(self) -> Mapping[str, float]:
        """Return its numbers now; quick, from any thread."""
        ...


class Vitals:
    """The numbers of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: weakref.WeakSet[Countable] = weakref.WeakSet()
        self._noted: dict[str, float] = {}

    def count_in(self, source: Countable) -> None:
        """Ask this one, too, for as long as it lives; what several count under one name is added up."""
        with self._lock:
            self._sources.add(source)

    def note(self, **numbers: float) -> None:
        """Keep the newest value of these numbers."""
        with self._lock:
            self._noted.update(numbers)

    def numbers(self) -> dict[str, float]:
        """Return all there are now."""
        with self._lock:
            sources, found = list(self._sources), dict(self._noted)
        for source in [*(one.vitals() for one in sources), _workers_numbers()]:
            for name, number in source.items():
                found[name] = found.get(name, 0) + number
        return found


def _counts_file(trainer: int) -> Path | None:
    """Return where the workers of a process count; None outside of a job."""
    token = os.environ.get("DEEPLINK_TOKEN_FILE")
    # Since when it runs, too: process ids are used again.
    started = started_ticks(trainer)
    return Path(token).parent / f"reads-{trainer}-{started}" if token and started else None


class WorkerRow:
    """A DataLoader worker's row of its trainer's file. Thread-safe."""

    def __init__(self, descriptor: int, row: int) -> None:
        self._descriptor = descriptor  # kept open: the lock ends with it
        self._lock = threading.Lock()
        numbers = memoryview(mmap.mmap(descriptor, _SIZE)).cast("d")
        self._numbers = numbers[row * len(_SHARED) : (row + 1) * len(_SHARED)]

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add to the counters that have these names; others are left out."""
        with self._lock:
            for place, name in enumerate(_SHARED):
                if number := numbers.get(name):
                    self._numbers[place] += number


_own: dict[int, WorkerRow | None] = {}  # by process id: a forked child takes a row of its own
_opening = threading.Lock()
_maps: dict[Path, memoryview[float]] = {}


def row_of_worker() -> WorkerRow | None:
    """Return this process's row, where it is a worker that multiprocessing started, in a job; else None."""
    parent, pid = multiprocessing.parent_process(), os.getpid()
    if parent is None:
        return None
    with _opening:
        if pid not in _own:
            _own[pid] = _taken_row(parent.pid)
        return _own[pid]


def _taken_row(trainer: int | None) -> WorkerRow | None:
    path = _counts_file(trainer) if trainer else None
    if path is None:
        return None
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        os.ftruncate(descriptor, _SIZE)  # to the size that it has, but for the first worker
    except OSError:
        return None
    for row in range(_ROWS):
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            return WorkerRow(descriptor, row)
    os.close(descriptor)
    return None


def _workers_numbers() -> dict[str, float]:
    """Return what this process's workers have counted; nothing before the first."""
    path = _counts_file(os.getpid())
    if path is None:
        return {}
    if path not in _maps:
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:  # the latter: not of its size yet
            _maps[path] = memoryview(mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)).cast("d")
    if path not in _maps:
        return {}
    found = {name: float(sum(_maps[path][place :: len(_SHARED)])) for place, name in enumerate(_SHARED)}
    return found if any(found.values()) else {}


def _renew_lock() -> None:
    global _opening  # noqa: PLW0603 - another thread may hold it at the moment of the fork
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


of_process = Vitals()
