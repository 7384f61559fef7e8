"""The order of an epoch, and how each step's samples are shared out to ranks.

An order is a keyed permutation of 0 to length-1, any stretch of which is computed without the rest.

Algorithm `feistel-1`. It is part of every sampler state, so it never changes; a better one gets another name.

    a = ceil(sqrt(length)), b = ceil(length / a); a place p below a*b is the pair (l, r) = (p // b, p mod b)
    8 rounds, i = 0 to 7, with 64-bit keys k_i:   i even: l = (l + mix(r, k_i)) mod a
                                                  i odd:  r = (r + mix(l, k_i)) mod b
    the result is l*b + r; while it is not below length, it is put through again ("cycle walking", a*b - length < a
    places of a*b, so rarely)
    mix(x, k): x = (x + k) * 0x9E3779B97F4A7C15; x ^= x >> 32; x *= 0xD6E8FEB86659FD93; x ^= x >> 29  (mod 2^64)
    k_0 ... k_7: little endian, the BLAKE2b-512 digest of "deeplink feistel-1 <version> <seed> <epoch>"

Each round is undone by subtraction, so the whole is a permutation whatever `mix` does.

`blocks-1` (`BlockOrder`) puts the same permutation to another use: each block is read in one stretch of time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from deeplink.cache import membership
from deeplink.cache.membership import RendezvousOrder
from deeplink.core.types import ShardId
from deeplink.data.errors import SamplerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from deeplink.core.types import Member

BLOCK_WINDOW: Final = 1024
"""Blocks mixed with one another unless another number is asked for: 1 GiB over all nodes.

A step of 256 samples then has a shuffle quality of 0.8 or more, whatever is in the blocks.
"""
_ROUNDS = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_STIR = np.uint64(0xD6E8FEB86659FD93)


class Order(Enum):
    """How an epoch's samples follow one another; the value is what sampler states say."""

    SHUFFLED = "feistel-1"
    BLOCKS = "blocks-1"
    SEQUENTIAL = "sequential"


def _keys(name: str) -> list[np.uint64]:
    digest = hashlib.blake2b(name.encode()).digest()
    return [np.uint64(key) for key in np.frombuffer(digest, "<u8")]


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = (values + key) * _SPREAD
    mixed ^= mixed >> np.uint64(32)
    mixed *= _STIR
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _once(places: NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(places, b)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _mix(right, key) % a) % a
        else:
            right = (right + _mix(left, key) % b) % b
    return left * b + right


def permuted(places: NDArray[np.int64], length: int, name: str) -> NDArray[np.int64]:
    """Return what the permutation called `name` of 0 to length-1 has at each of `places`; shape kept."""
    if places.size and not (int(places.min()) >= 0 and int(places.max()) < length):
        raise IndexError(f"places must lie in 0 to {length - 1}")
    keys = _keys(name)[:_ROUNDS]
    side = max(1, math.isqrt(max(length - 1, 0)) + 1)
    a, b = np.uint64(side), np.uint64(max(1, -(-length // side)))
    found = _once(places.astype(np.uint64), a, b, keys)
    while (outside := found >= np.uint64(length)).any():
        found[outside] = _once(found[outside], a, b, keys)
    return found.astype(np.int64)


def shuffled(places: NDArray[np.int64], length: int, *, version: str, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return which sample comes at each of `places` of a shuffled epoch; both are 0 to length-1, shape kept.

    >>> whole = shuffled(np.arange(1000), 1000, version="v", seed=0, epoch=0)
    >>> sorted(whole.tolist()) == list(range(1000))
    True

    Raises:
        IndexError: a place is not in 0 to length-1.
    """
    return permuted(places, length, f"deeplink feistel-1 {version} {seed} {epoch}")


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
    """One epoch's blocks in their order."""

    epoch: int  # which
    first: NDArray[np.int64]  # where in `placed` each block begins, in the epoch's order
    starts: NDArray[np.int64]  # at which place of the epoch it would begin without the mixing; one more at the end
    windows: NDArray[np.int64]  # at which place each window begins; one more at the end


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


@dataclass(frozen=True, slots=True)
class RankShare:
    """How many ranks take how many samples each; every step follows from what is left alone.

    So a run that is resumed with the same share goes through the very same batches as one never interrupted.
    """

    global_batch_size: int  # most samples of a step, over all ranks
    world_size: int

    @property
    def batch_size(self) -> int:
        """Most samples that a rank takes per step."""
        return -(-self.global_batch_size // self.world_size)

    def steps(self, left: int) -> int:
        """Return in how many steps `left` samples are used up."""
        return -(-left // self.global_batch_size)

    def step_size(self, left: int) -> int:
        """Return how many samples the next step takes over all ranks; steps differ by one sample at most.

        >>> RankShare(global_batch_size=8, world_size=2).step_size(10)
        5
        """
        steps = self.steps(left)
        size = -(-left // steps) if steps else 0
        if steps and left // steps < self.world_size:
            raise SamplerError(
                f"{left} samples left in the epoch cannot be shared by {self.world_size} ranks "
                f"in batches of {self.batch_size}",
                remedy="Use a batch size over 1 and no more ranks than samples, or set_epoch(epoch + 1).",
            )
        return size

    def part(self, size: int, rank: int) -> tuple[int, int]:
        """Return the offsets in a step of `size` samples between which a rank's part lies.

        >>> [RankShare(global_batch_size=12, world_size=3).part(8, rank) for rank in range(3)]
        [(0, 3), (3, 6), (6, 8)]
        """
        each, more = divmod(size, self.world_size)
        start = rank * each + min(rank, more)
        return start, start + each + (rank < more)


class Residency:
    """Which samples lie near to which rank, as said once; what a step's samples are shared out by.

    It decides who gets a sample of a step, never which samples the step has: training sees the same steps with it
    or without. Every rank must be given the same one, so take it from what all agree on (the list of members), or
    let one rank find it out and broadcast it.

    Attributes:
        nodes: as above.
        digest: stands for all of it in states.
        length: how many samples it knows.
    """

    def __init__(self, nodes: Sequence[str], holders: Sequence[Sequence[str]], shard: NDArray[np.integer]) -> None:
        self.nodes = tuple(nodes)
        number = {name: place for place, name in enumerate(dict.fromkeys(self.nodes))}
        self._node_of_rank = np.array([number[name] for name in self.nodes], np.int64)
        # Ranks node by node: the order in which a node's samples are dealt out to its ranks.
        self._ranks = np.argsort(self._node_of_rank, kind="stable")
        self._shard, self._count, self.length = shard, len(number), len(shard)
        copies = max((len(names) for names in holders), default=0)
        self._homes = np.full((len(holders), max(copies, 1)), -1, np.int64)
        for place, names in enumerate(holders):
            self._homes[place, : len(names)] = [number.get(name, -1) for name in names]
        said = repr(self.nodes).encode() + self._homes.astype("<i8").tobytes()
        self.digest = hashlib.blake2b(said, digest_size=8).hexdigest()

    @classmethod
    def of(
        cls,
        shards: Sequence[str],
        shard: NDArray[np.integer],
        *,
        nodes: Sequence[str],
        held: Mapping[str, Sequence[str]],
    ) -> Self:
        """Return the residency that lists of held shards say."""
        holders: dict[str, list[str]] = {name: [] for name in shards}
        for node in sorted(held):
            for name in held[node]:
                if name in holders:
                    holders[name].append(node)
        # Nodes that hold all of the same shards take turns at being the first.
        turned = [
            names[turn % len(names) :] + names[: turn % len(names)] if names else []
            for turn, names in enumerate(holders.values())
        ]
        return cls(nodes, turned, shard)

    @classmethod
    def owned(
        cls,
        shards: Sequence[str],
        shard: NDArray[np.integer],
        *,
        nodes: Sequence[str],
        members: Iterable[Member],
        replicas: int,
    ) -> Self:
        """Return the residency of shards that lie where they belong by the list of members."""
        known = membership.standing(members)
        order = RendezvousOrder(known.weight, known)
        holders = [order.owners(ShardId(name), replicas) for name in shards]
        return cls(nodes, holders, shard)

    def near(self, rows: NDArray[np.int64]) -> float:
        """Return the share of samples that some rank's node holds."""
        return float((self._homes[self._shard[rows]] >= 0).any(axis=1).mean()) if len(rows) else 1.0

    def is_local(self, rows: NDArray[np.int64], rank: int) -> NDArray[np.bool_]:
        """Return which of `rows` lie on a rank's own node."""
        found: NDArray[np.bool_] = (self._homes[self._shard[rows]] == self._node_of_rank[rank]).any(axis=1)
        return found

    def is_home(self, rank: int) -> NDArray[np.bool_]:
        """Return, per shard number, whether a rank's node is to take its samples: where no rank's is, all are."""
        found: NDArray[np.bool_] = (self._homes == self._node_of_rank[rank]).any(axis=1) | (self._homes < 0).all(
            axis=1
        )
        return found

    def ranks(self, rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rank of each of a step's `rows`: a pure function of them, of `sizes` and of this residency.

        Each row in its turn goes to the first of its holders that has room left, then the rest wherever there is
        room. That is not the most that could be local where shards have several copies, and within a few per cent.
        """
        room = np.bincount(self._node_of_rank, weights=sizes, minlength=self._count).astype(np.int64)
        node = np.full(len(rows), -1, np.int64)
        homes = self._homes[self._shard[rows]]
        for copy in range(homes.shape[1]):
            wants = np.flatnonzero((node < 0) & (homes[:, copy] >= 0))
            grouped = wants[np.argsort(homes[wants, copy], kind="stable")]
            wanted = homes[grouped, copy]
            turn = np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
            is_taken = turn < room[wanted]
            node[grouped[is_taken]] = wanted[is_taken]
            room -= np.bincount(wanted[is_taken], minlength=self._count)
        node[node < 0] = np.repeat(np.arange(self._count), room)
        rank = np.empty(len(rows), np.int64)
        rank[np.argsort(node, kind="stable")] = np.repeat(self._ranks, sizes[self._ranks])
        return rank
