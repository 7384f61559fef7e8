"""How long a rank's own work in a step takes, waiting for other ranks left out.

In data-parallel training all ranks take equally long for a step, for they wait for the slowest one in backward's
all-reduce. So what is timed ends where the first wait may begin: from the end of `deeplink.report` to the end of
the forward pass. It holds the loading of data, the copy to the device and the forward pass; the backward pass of a
slow device is slow in the same proportion. What the wrapper does before (it sends buffers) is left out.

The model of a DistributedDataParallel is timed by itself; `deeplink.timed(model)` says which one it is elsewhere.

How long the backward pass waited for other ranks is DistributedDataParallel's own word: from its last gradient to
the end of its last all-reduce. Collectives that the loop or another wrapper calls are not told from computing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deeplink.training import step_split
from deeplink.training.progress import measure_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.training.step_split import StepSplit

log = logging.getLogger(__name__)

KEPT = 16
"""Steps whose median is reported: one slow step changes nothing."""
_LOOK_EVERY_S = 0.2
"""How often DistributedDataParallel is asked how long it waited: 20 us each."""
_MOST_PASSES = 64
"""Passes that the device has not ended yet: more are not timed."""
M = TypeVar("M", bound="Hookable")


class Hookable(Protocol):
    """A torch.nn.Module, as far as it is needed here."""

    def register_forward_pre_hook(self, hook: Callable[..., None], /) -> object:
        """Call `hook` before each forward pass."""
        ...

    def register_forward_hook(self, hook: Callable[..., None], /) -> object:
        """Call `hook` after each forward pass."""
        ...


def timed(model: M) -> M:
    """Measure the rank's own work with this model, for every `deeplink.report` from now on, and return the model.

    A straggler is told from ranks that wait for it by this alone. Of a wrapped model (`.module`, as
    DistributedDataParallel has it) the inner one is timed: the wrapper's forward pass may wait for other ranks.
    Forward passes that wait for others themselves (tensor or pipeline parallelism, synchronised batch norm, FSDP)
    hide the slow rank: measure yourself, and hand `work_s` to `report`.
    """
    inner = getattr(model, "module", model)
    meter = StepMeter(split=step_split.of_process, waits=CollectiveWaits(model))
    if inner is not model:
        model.register_forward_pre_hook(meter.wrapper_begins)
    inner.register_forward_pre_hook(meter.forward_begins)
    inner.register_forward_hook(meter.forward_ended)
    measure_with(meter.step_ended)
    return model


def time_ddp() -> None:
    """Time the model that this process trains by DistributedDataParallel; nothing where it is not just one.

    Tens of milliseconds, once: all objects of this process are looked at. A hook that all modules share would do
    without, but what torch.compile has seen is compiled again for it.
    """
    torch = sys.modules.get("torch")
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if torch is None or parallel is None:
        return
    try:
        wrapper = parallel.DistributedDataParallel
        if torch.distributed.is_initialized():
            wrapped = [one for one in gc.get_referrers(wrapper) if type(one) is wrapper]
            if len(wrapped) == 1:
                timed(wrapped[0])
    except Exception as problem:  # noqa: BLE001 - a training that runs is not to end for this
        log.warning("the ranks' own work is not timed: %s", problem)


class StepMeter:
    """Times the steps of one model."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        *,
        split: StepSplit | None = None,
        waits: CollectiveWaits | None = None,
    ) -> None:
        self._now, self._split, self._waits = now, split, waits
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._began: float | None = None
        self._before: float | None = None
        self._entered: float | None = None
        self._waited_s = 0.0  # in the wrapper, since the step began
        self._ended: float | None = None
        self._open: Any = None  # of the forward pass under way: where the device began it
        self._on_device: list[tuple[Any, Any, float]] = []
        self._pass: Any = None  # on the device: where the pass began that is under way
        self._passes: deque[tuple[Any, Any]] = deque()  # that the device has not ended
        self._passes_s = 0.0  # of those that it ended since the last report
        if split is not None:
            split.paused = self.pass_ended

    def wrapper_begins(self, *_: object) -> None:
        """Take note that the wrapper's forward pass begins, in which ranks may wait for each other."""
        self._entered = self._now()

    def forward_begins(self, *_: object) -> None:
        """Take note that a forward pass begins."""
        self._before = self._now()
        if self._entered is not None:
            self._waited_s += self._before - self._entered
            self._entered = None
        self._open = _device_event()
        if self._split is not None:
            self._split.forward_began(self._before)
            self._count_passes()
            if self._pass is None and not self._split.is_in_section and len(self._passes) < _MOST_PASSES:
                self._pass = self._open

    def forward_ended(self, *_: object) -> None:
        """Take note that a forward pass has ended, as far as this process sees."""
        self._ended = self._now()
        if self._open is not None and self._before is not None:
            end = _device_event()
            self._on_device = [(self._open, end, self._ended - self._before)]

    def step_ended(self) -> float:
        """Take note that the step ended; return the median seconds of own work in the latest steps, 0 before."""
        if self._began is not None and self._ended is not None and self._ended > self._began:
            self._steps.append(self._ended - self._began - self._waited_s + self._device_s())
        if self._split is not None:
            self._tell(self._split)
        self._began, self._ended, self._waited_s = self._now(), None, 0.0
        steps = sorted(self._steps)  # the median; what `statistics` adds costs more than all else here
        return (steps[(len(steps) - 1) // 2] + steps[len(steps) // 2]) / 2 if steps else 0.0

    def _tell(self, split: StepSplit) -> None:
        """Say how long the passes took that the device ended since, and how long others were waited for."""
        if self._waits is not None:
            split.others_s = self._waits.seconds(self._now())
        self.pass_ended()
        self._count_passes()
        split.device_s, self._passes_s = self._passes_s, 0.0

    def pass_ended(self) -> None:
        """Take note that the device is given no more for now: what it does next is another pass."""
        begin, self._pass = self._pass, None
        if begin is not None:
            with contextlib.suppress(RuntimeError):  # this is in the loop's wait for a batch
                end = _device_event()
                if end is not None:
                    self._passes.append((begin, end))

    def _count_passes(self) -> None:
        while self._passes and self._passes[0][1].query():
            begin, end = self._passes.popleft()
            with contextlib.suppress(RuntimeError):  # they are of two devices
                self._passes_s += float(begin.elapsed_time(end)) / 1e3

    def _device_s(self) -> float:
        """How much longer than this process the device took for the last forward pass; nothing waits for it."""
        waiting, self._on_device = self._on_device, []
        for begin, end, host_s in waiting:
            if end.query():  # a loss that was fetched has waited for it already
                return max(0.0, float(begin.elapsed_time(end)) / 1e3 - host_s)
        return 0.0


class CollectiveWaits:
    """How long the backward pass of a DistributedDataParallel waits for other ranks, by what it logs itself.

    On a CPU every step is logged. On a device torch's own choice stays (the first ten steps, then one in a
    hundred): it waits for the device at each.
    """

    def __init__(self, model: Any) -> None:
        logs = hasattr(model, "_set_ddp_runtime_logging_sample_rate")
        self._logger = getattr(model, "logger", None) if logs else None
        self._looked, self._seconds = float("-inf"), 0.0
        if self._logger is not None and getattr(model, "device_type", "") == "cpu":
            model._set_ddp_runtime_logging_sample_rate(1)  # noqa: SLF001 - there is no other way

    def seconds(self, now: float) -> float:
        """Return how long it was in a step of late, seconds; 0 where that is not known. Cheap."""
        if self._logger is None or now - self._looked < _LOOK_EVERY_S:
            return self._seconds
        self._looked = now
        try:
            found = self._logger._get_ddp_logging_data().ints_map  # noqa: SLF001 - as above
            waited = found["backward_comm_time"] - found["backward_compute_comm_overlap_time"]
        except (AttributeError, KeyError, TypeError, RuntimeError):  # another torch, or no backward pass yet
            return self._seconds
        self._seconds = max(0.0, waited / 1e9)
        return self._seconds


def _device_event() -> Any:
    """Return a mark in the GPU's queue of work; None without a GPU. Never loads torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if torch.cuda.is_current_stream_capturing():  # asked about later, a mark in a CUDA graph is an error
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
