"""The order of an epoch block by block: each block is read in one stretch of time, and its samples well mixed.

A cold disk gives its blocks of about 1 MiB several times faster whole than sample by sample, and what is in use at
a time stays small enough for memory. Algorithm `blocks-1`; it is part of every sampler state, so it never changes:

    the blocks are put in the order of the permutation "deeplink blocks-1 <version> <seed> <epoch>" (it is that of
    `deeplink.data.order`), and cut into k = ceil(blocks / window) windows: the i-th from 0 begins with the block
    number (i * blocks) // k of that order. A window's samples, its blocks one after another, are put in the order
    of the permutation "deeplink blocks-1 <version> <seed> <epoch> <i>".

So it is a function of (version, seed, epoch, window) alone. Any place is found at once by the epoch's table, which
takes 16 bytes and a tenth of a microsecond per block to make.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from deeplink.data.order import permuted

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_WINDOW: Final = 1024
"""Blocks mixed with one another unless another number is asked for: 1 GiB over all nodes.

A step of 256 samples then has a shuffle quality of 0.8 or more, whatever is in the blocks.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Which samples lie together.

    Attributes:
        bounds: int64, shape (blocks + 1,): where in `placed` each block's samples begin, and where the last end.
        placed: int64: the samples in the order in which they lie; None where that is their own order.
    """

    bounds: NDArray[np.int64]
    placed: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, shard: NDArray[np.uint32], block: NDArray[np.uint32]) -> Self:
        """Return the blocks of samples of which each lies in `block[i]` of `shard[i]`.

        >>> Blocks.of(np.array([0, 0, 0], np.uint32), np.array([0, 1, 1], np.uint32)).bounds.tolist()
        [0, 1, 3]
        """
        home = shard.astype(np.uint64) << np.uint64(32) | block
        edges = np.flatnonzero(home[1:] != home[:-1]) + 1
        firsts = np.sort(home[np.append(0, edges)]) if len(home) else home
        placed = None
        if (firsts[1:] == firsts[:-1]).any():  # an appended version: a block's samples are not neighbours in it
            placed = np.argsort(home, kind="stable").astype(np.int64)
            home = home[placed]
            edges = np.flatnonzero(home[1:] != home[:-1]) + 1
        return cls(np.concatenate([[0], edges, [len(home)]]).astype(np.int64), placed)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return int(self.bounds[-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """One epoch's blocks in their order.

    Attributes:
        epoch: which.
        first: where in `placed` each block begins, in the epoch's order.
        starts: at which place of the epoch it would begin without the mixing; one more at the end.
        windows: at which place each window begins; one more at the end.
    """

    epoch: int
    first: NDArray[np.int64]
    starts: NDArray[np.int64]
    windows: NDArray[np.int64]


class BlockOrder:
    """The order `blocks-1` of all epochs of one dataset version. Not thread-safe: it keeps the last epoch's table.

    Args:
        blocks: which samples lie together.
        window: how many blocks are mixed with one another.
        version: the dataset's.
        seed: another seed is another order.

    Raises:
        ValueError: the window is not positive.
    """

    def __init__(self, blocks: Blocks, window: int, *, version: str, seed: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} blocks")
        self.blocks, self.window = blocks, window
        self._name = f"deeplink blocks-1 {version} {seed}"
        self._last: _Table | None = None

    def _table(self, epoch: int) -> _Table:
        if self._last is None or self._last.epoch != epoch:
            self._last = self._made(epoch)
        return self._last

    def _made(self, epoch: int) -> _Table:
        count = len(self.blocks)
        order = permuted(np.arange(count), count, f"{self._name} {epoch}")
        sizes = np.diff(self.blocks.bounds)[order]
        starts = np.append(0, np.cumsum(sizes)).astype(np.int64)
        windows = -(-count // self.window)
        edges = np.arange(windows + 1) * count // windows
        return _Table(epoch, self.blocks.bounds[order], starts, starts[edges])

    def rows(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return which sample comes at each of `places` of an epoch; shape (places,).

        Raises:
            IndexError: a place is not in the epoch.
        """
        if not len(places):
            return places
        if int(places.min()) < 0 or int(places.max()) >= self.blocks.samples:
            raise IndexError(f"places must lie in 0 to {self.blocks.samples - 1}")
        table = self._table(epoch)
        mixed = np.empty(len(places), np.int64)
        window = np.searchsorted(table.windows, places, side="right") - 1
        order = np.argsort(window, kind="stable")
        edges = np.flatnonzero(np.diff(window[order])) + 1
        for begin, end in itertools.pairwise([0, *edges.tolist(), len(order)]):
            chosen = order[begin:end]
            number = int(window[chosen[0]])
            start, stop = int(table.windows[number]), int(table.windows[number + 1])
            name = f"{self._name} {epoch} {number}"
            mixed[chosen] = start + permuted(places[chosen] - start, stop - start, name)
        block = np.searchsorted(table.starts, mixed, side="right") - 1
        found = table.first[block] + mixed - table.starts[block]
        return found if self.blocks.placed is None else self.blocks.placed[found]

    def window_at(self, place: int, epoch: int) -> tuple[int, float]:
        """Return the number of the window that `place` lies in, and how much of it comes before, 0 to 1."""
        windows = self._table(epoch).windows
        number = int(np.searchsorted(windows, place, side="right")) - 1
        start, stop = windows[number : number + 2].tolist()
        return number, (place - start) / (stop - start)

    def lying(self, number: int, epoch: int) -> NDArray[np.int64]:
        """Return the samples of a window as they lie, block by block; none where there is no such window."""
        table = self._table(epoch)
        if number + 1 >= len(table.windows):
            return np.empty(0, np.int64)
        lo, hi = np.searchsorted(table.starts, table.windows[number : number + 2]).tolist()
        places = np.arange(table.starts[lo], table.starts[hi])
        sizes = np.diff(table.starts[lo : hi + 1])
        found = np.repeat(table.first[lo:hi] - table.starts[lo:hi], sizes) + places
        return found if self.blocks.placed is None else self.blocks.placed[found]

    def uses(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return when an epoch uses each block, in the epoch's order: a sample of it, and its window's bounds.

        The bounds are the window's first place, and the place behind its last one.
        """
        table = self._last if self._last is not None and self._last.epoch == epoch else self._made(epoch)
        window = np.searchsorted(table.windows, table.starts[:-1], side="right") - 1
        samples = table.first if self.blocks.placed is None else self.blocks.placed[table.first]
        return samples, table.windows[window], table.windows[window + 1]

    def quality(self, step: int, epoch: int = 0) -> float:
        """Return how good a shuffle this is for steps of `step` samples, over all ranks: 1.0 is an exact one.

        It is the effective size of a step over that of an exact shuffle's, when all samples of a block are alike
        and blocks are not: the worst case, near to what a dataset packed class by class is. By Kish's design
        effect for samples drawn in clusters (L. Kish, Survey Sampling, 1965), a mean over `step` samples, of which
        each has m others of its own block beside it on average, varies as one over step / (1 + m) independent
        samples does: the gradient's noise grows by that much. A sample of a block of s samples, in a window of n,
        has m = (s - 1) * min(1, (step - 1) / (n - 1)).

        Raises:
            ValueError: the step has no samples.
        """
        if step < 1:
            raise ValueError(f"a step of {step} samples")
        table = self._table(epoch)
        sizes = np.diff(table.starts)
        window = np.searchsorted(table.windows, table.starts[:-1], side="right") - 1
        around = np.diff(table.windows)[window]
        return _design_effect(sizes, np.full(len(sizes), self.blocks.samples), step) / _design_effect(
            sizes, around, step
        )


class Coming:
    """Tells, while a pass goes through its windows, which of the next window's samples to ask for now.

    In step with the use of the window under way: so that no more than two windows are wanted in memory, and a disk
    has all the time there is.
    """

    def __init__(self, order: BlockOrder, epoch: int) -> None:
        self._order, self._epoch = order, epoch
        self._window, self._asked = -1, 0
        self._rows = np.empty(0, np.int64)

    def at(self, place: int) -> NDArray[np.int64]:
        """Return what to ask for, of all ranks' samples, now that the pass has come to `place`."""
        if place >= self._order.blocks.samples:
            return self._rows[:0]
        window, used = self._order.window_at(place, self._epoch)
        if window != self._window:
            self._window, self._asked = window, 0
            self._rows = self._order.lying(window + 1, self._epoch)
        begin, self._asked = self._asked, max(self._asked, round(used * len(self._rows)))
        return self._rows[begin : self._asked]


def _design_effect(sizes: NDArray[np.int64], around: NDArray[np.int64], step: int) -> float:
    """Return 1 + the blockmates a sample has in its step, where blocks of `sizes` are mixed among `around`."""
    share = np.minimum(1.0, (step - 1) / np.maximum(around - 1, 1))
    return 1.0 + float((sizes * (sizes - 1) * share).sum() / sizes.sum())
