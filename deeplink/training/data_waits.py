"""How long the training loop waits for batches: the iterators of torch's DataLoader are timed.

Their classes are given another `__iter__` and `__next__`, once: iterators that were made before are timed, too,
and those of torchdata's StatefulDataLoader. Whatever iterates them (a loop, a framework's trainer) calls these.
Of loaders within loaders the outermost counts. torch is not loaded for it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeplink.training.step_split import StepSplit

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
