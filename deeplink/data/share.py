"""How a step's samples are shared out to ranks: how many each gets, and, where asked for, those near to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from deeplink.cache import ownership
from deeplink.data.errors import TooFewSamplesError
from deeplink.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from deeplink.types import Member


@dataclass(frozen=True, slots=True)
class RankShare:
    """How many ranks take how many samples each; every step follows from what is left alone.

    So a run that is resumed with the same share goes through the very same batches as one never interrupted.
    """

    batch_size: int
    world_size: int

    def steps(self, left: int) -> int:
        """Return in how many steps `left` samples are used up."""
        return -(-left // (self.batch_size * self.world_size))

    def step_size(self, left: int) -> int:
        """Return how many samples the next step takes over all ranks; steps differ by one sample at most.

        >>> RankShare(batch_size=4, world_size=2).step_size(10)
        5

        Raises:
            TooFewSamplesError: a rank would get none.
        """
        steps = self.steps(left)
        size = -(-left // steps) if steps else 0
        if steps and left // steps < self.world_size:
            raise TooFewSamplesError(left, self.world_size, self.batch_size)
        return size

    def part(self, size: int, rank: int) -> tuple[int, int]:
        """Return the offsets in a step of `size` samples between which a rank's part lies.

        >>> [RankShare(batch_size=4, world_size=3).part(8, rank) for rank in range(3)]
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

    Args:
        nodes: node of each rank.
        holders: per shard number, the nodes that hold it, the one to be preferred first.
        shard: shard number of each sample of the dataset.

    Attributes:
        nodes: as above.
        digest: stands for all of it in states.
    """

    def __init__(self, nodes: Sequence[str], holders: Sequence[Sequence[str]], shard: NDArray[np.integer]) -> None:
        self.nodes = tuple(nodes)
        number = {name: place for place, name in enumerate(dict.fromkeys(self.nodes))}
        self._node_of_rank = np.array([number[name] for name in self.nodes], np.int64)
        # Ranks node by node: the order in which a node's samples are dealt out to its ranks.
        self._ranks = np.argsort(self._node_of_rank, kind="stable")
        self._shard, self._count = shard, len(number)
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
        """Return the residency that lists of held shards say.

        Args:
            shards: the shards' names by number (`Dataset.shards`).
            shard: shard number of each sample (`Dataset.shard`).
            nodes: node of each rank.
            held: node to the names of the shards that it holds.
        """
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
        """Return the residency of shards that lie where they belong: whoever has the list of members agrees on it.

        Args:
            shards: the shards' names by number (`Dataset.shards`).
            shard: shard number of each sample (`Dataset.shard`).
            nodes: node of each rank, by its member's name.
            members: all of them.
            replicas: copies of each shard.
        """
        known = ownership.standing(members)
        holders = [ownership.owners(ShardId(name), known.weight, replicas, known) for name in shards]
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

        Args:
            rows: the step's samples in its order.
            sizes: samples of each rank, int64; their sum is the number of rows.
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
