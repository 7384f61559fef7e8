"""Where a rank's steps go: waiting for data, computing, waiting for other ranks, saving, the rest.

Nothing of it is the user's code. DataLoaders say how long the loop waited for a batch, the
model's hooks when the forward pass began and how long DistributedDataParallel waited (`timing.py`), and sections
what was no training. A step is from one `deeplink.report` to the next, in the thread that reports. What nothing
else claims is computing from the first forward pass on, and the rest before it; without hooks all is computing.
Where the loop reports only every few steps, all of these are split as one.

All times are of one monotonic clock. The parts of a step add up to the step, whatever was measured.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from deeplink.core import process_metrics as names

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKPOINT = "checkpoint"
"""The section whose time is saving; that of all other sections is the rest."""


class StepParts(NamedTuple):
    """Seconds of one step, or of many; they add up to it."""

    data_s: float = 0.0
    compute_s: float = 0.0
    others_s: float = 0.0
    checkpoint_s: float = 0.0
    rest_s: float = 0.0


def parts_of(
    step_s: float,
    *,
    data_s: float = 0.0,  # the loop waited so long for batches
    others_s: float = 0.0,  # the backward pass waited so long for other ranks
    checkpoint_s: float = 0.0,  # in the section "checkpoint"
    sections_s: float = 0.0,  # in other sections
    before_s: float | None = None,  # before the first forward pass, without these; None: no one saw one
    device_s: float = 0.0,  # the device was busy with its passes: a batch waited for meanwhile holds up nothing
) -> StepParts:
    """Return the parts of a step from what was measured of it, seconds."""
    left = max(0.0, step_s)
    checkpoint = min(max(0.0, checkpoint_s), left)
    left -= checkpoint
    sections = min(max(0.0, sections_s), left)
    left -= sections
    data = min(max(0.0, data_s), max(0.0, left - device_s))
    left -= data
    before = 0.0 if before_s is None else min(max(0.0, before_s), max(0.0, left - device_s))
    left -= before
    others = min(max(0.0, others_s), left)
    return StepParts(data, left - others, others, checkpoint, sections + before)


def _nothing() -> None:
    """No model's device is timed."""


class StepSplit:
    """Adds up the parts of a process's steps. One thread's: what others do is not the loop's time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.totals = StepParts()
        self.others_s = 0.0  # of each step, as far as is known
        self.device_s = 0.0
        self.paused: Callable[[], None] = _nothing
        """Called where the device gets no more work for now: the loop waits for a batch, or enters a section."""
        self._counts = (0, 0)  # steps, samples
        self._vitals: tuple[StepParts, tuple[int, int]] = (self.totals, self._counts)
        self._thread = threading.main_thread().ident
        self._began: float | None = None
        self._step = 0
        self._forward: float | None = None  # when the first forward pass of this step began
        self._section, self._section_since = "", 0.0
        self._data_s = self._checkpoint_s = self._sections_s = 0.0
        self._claimed_s = 0.0  # before the forward pass, by data and sections
        self._samples = 0

    @property
    def is_in_section(self) -> bool:
        """Whether what happens now is no training."""
        return bool(self._section)

    def wait_begins(self) -> float:
        """The loop begins to wait for a batch; return the time."""
        if threading.get_ident() == self._thread:
            self.paused()
        return self.now()

    def data_waited(self, began: float, samples: int) -> None:
        """The loop has waited for a batch since `began`."""
        if threading.get_ident() == self._thread and not self._section:
            self._data_s += self.now() - began
            self._samples += samples

    def section(self, name: str) -> None:
        """The section `name` is entered, or gone on with; empty: none is left."""
        if threading.get_ident() != self._thread:
            return
        if name and not self._section:
            self.paused()
        now = self.now()
        if self._section == CHECKPOINT:
            self._checkpoint_s += now - self._section_since
        elif self._section:
            self._sections_s += now - self._section_since
        self._section, self._section_since = name, now

    def forward_began(self, now: float) -> None:
        """A forward pass begins: the first one of a step ends what comes before it."""
        if self._forward is None and not self._section:
            self._forward = now
            self._claimed_s = self._data_s + self._checkpoint_s + self._sections_s

    def step_ended(self, step: int) -> None:
        """The loop reports that `step` steps are done: since its last report it did those between."""
        if self._section:
            self.section(self._section)  # what it took so far is of this step
        now, began = self.now(), self._began
        if began is not None:
            before = None if self._forward is None else self._forward - began - self._claimed_s
            parts = parts_of(
                now - began,
                data_s=self._data_s,
                others_s=self.others_s * max(1, int(step) - self._step),
                checkpoint_s=self._checkpoint_s,
                sections_s=self._sections_s,
                before_s=before,
                device_s=self.device_s,
            )
            had = self.totals
            self.totals = StepParts(
                had[0] + parts[0], had[1] + parts[1], had[2] + parts[2], had[3] + parts[3], had[4] + parts[4]
            )
            steps, samples = self._counts
            self._counts = (steps + max(1, int(step) - self._step), samples + self._samples)
            self._vitals = (self.totals, self._counts)  # at once: another thread reads it
        else:
            self._thread = threading.get_ident()
        self._began, self._forward, self._step = now, None, int(step)
        self._data_s = self._checkpoint_s = self._sections_s = 0.0
        self._samples = 0

    def vitals(self) -> dict[str, float]:
        """Return what there is so far, by the names of reports; nothing before the end of the second step."""
        totals, (steps, samples) = self._vitals
        if not steps:
            return {}
        return {
            names.DATA_S: totals.data_s,
            names.COMPUTE_S: totals.compute_s,
            names.OTHERS_S: totals.others_s,
            names.CHECKPOINT_S: totals.checkpoint_s,
            names.REST_S: totals.rest_s,
            names.STEPS: float(steps),
            names.LOADED_SAMPLES: float(samples),
        }


of_process = StepSplit()
"""Of the steps that this process reports."""


# -- how long the training loop waits for batches: the iterators of torch's DataLoader are timed
#
# Their classes are given another `__iter__` and `__next__`, once: iterators that were made before are timed, too,
# and those of torchdata's StatefulDataLoader. Whatever iterates them (a loop, a framework's trainer) calls these.
# Of loaders within loaders the outermost counts. torch is not loaded for it.

_DEPTH = 4
_MARK = "deeplink_timed"


class _Thread(threading.local):
    is_within = False  # a loader's method that is timed


_thread = _Thread()


def time_loaders(split: StepSplit) -> None:
    """Have the DataLoaders of this process tell `split` how long workers' start and each batch were waited for."""
    module = sys.modules.get("torch.utils.data.dataloader")
    for owner, name in (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__")):
        kind = getattr(module, owner, None)
        method = getattr(kind, name, None)
        # Other tools wrap these, too: what they put on top of ours stays (functools.wraps copies the mark).
        if method is not None and not getattr(method, _MARK, False):
            setattr(kind, name, _timed(method, split, counts=name == "__next__"))


def _timed(method: Any, split: StepSplit, *, counts: bool) -> Any:
    @functools.wraps(method)
    def timed(self: Any) -> Any:
        if _thread.is_within:
            return method(self)
        _thread.is_within = True
        try:
            began = split.wait_begins()
            found = method(self)
        finally:
            _thread.is_within = False
        split.data_waited(began, samples_in(found) if counts else 0)
        return found

    setattr(timed, _MARK, True)
    return timed


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by its first part that has a length; 0 where none has one.

    It never raises, whatever objects a batch has: the batch would be lost to the loop.

    >>> samples_in(([b"a", b"b"], [0, 1])), samples_in({"key": "no batch"}), samples_in(3)
    (2, 0, 0)
    """
    try:
        return max(0, _samples_in(batch))
    except Exception:  # noqa: BLE001 - of the user's objects
        return 0


def _samples_in(batch: Any) -> int:
    for _ in range(_DEPTH):
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch and hasattr(batch[0], "__len__"):
            if isinstance(batch[0], bytes | str):
                return len(batch)
            batch = batch[0]
        else:
            break
    if isinstance(batch, bytes | str) or not hasattr(batch, "__len__"):
        return 0
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(batch)
