"""How long the training loop waits for batches: the iterators of torch's DataLoader are timed.

Their class is given another `__next__`, once: iterators that were made before are timed, too, and those of
torchdata's StatefulDataLoader. Whatever iterates them (a plain loop, a trainer of a framework) calls it.
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
    """Have the DataLoaders of this process tell `split` how long each batch was waited for."""
    base = getattr(sys.modules.get("torch.utils.data.dataloader"), "_BaseDataLoaderIter", None)
    untimed = getattr(base, "__next__", None)
    if base is not None and untimed is not None:
        base.__next__ = _timed(getattr(untimed, "__wrapped__", untimed), split)


def _timed(following: Any, split: StepSplit) -> Any:
    now = split.now

    @functools.wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807 - it takes its place
        began = now()
        batch = following(self)
        split.data_waited(began, samples_in(batch))
        return batch

    return __next__


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
