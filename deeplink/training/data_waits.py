"""How long the training loop waits for batches: the iterators of torch's DataLoader are timed.

Their classes are given another `__iter__` and `__next__`, once: iterators that were made before are timed, too,
and those of torchdata's StatefulDataLoader. Whatever iterates them (a loop, a framework's trainer) calls these.
torch is not loaded for it.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deeplink.training.step_split import StepSplit

_DEPTH = 4


def time_loaders(split: StepSplit) -> None:
    """Have the DataLoaders of this process tell `split` how long workers' start and each batch were waited for."""
    module = sys.modules.get("torch.utils.data.dataloader")
    for owner, name in (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__")):
        kind = getattr(module, owner, None)
        untimed = getattr(kind, name, None)
        if untimed is not None:
            setattr(kind, name, _timed(getattr(untimed, "__wrapped__", untimed), split))


def _timed(method: Any, split: StepSplit) -> Any:
    now, counts = split.now, method.__name__ == "__next__"

    @functools.wraps(method)
    def timed(self: Any) -> Any:
        began = now()
        found = method(self)
        split.data_waited(began, samples_in(found) if counts else 0)
        return found

    return timed


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by its first part that has a length; 0 where none has one.

    >>> samples_in(([b"a", b"b"], [0, 1])), samples_in({"key": "no batch"}), samples_in(3)
    (2, 0, 0)
    """
    for _ in range(_DEPTH):
        if isinstance(batch, dict):
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
