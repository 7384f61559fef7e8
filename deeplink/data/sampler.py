"""A batch sampler that knows, to the sample, how far training is, at any number of ranks; seeds for transforms."""

from __future__ import annotations

import logging
import operator
import os
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import xxhash
from typing_extensions import override

from deeplink.data.errors import asked_by_torchdata, foreign_state, misuse, unfinished
from deeplink.data.order import BLOCK_WINDOW, BlockOrder, Coming, Order, RankShare, shuffled
from deeplink.data.prefetch import announcer_of
from deeplink.data.subsets import resolved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sized

    from deeplink.data.order import Residency

_MASK = (1 << 32) - 1
"""What `numpy.random.seed` takes, too."""


class SampledBatch(list[int]):
    """Numbers of a batch's items, with the seed and the epoch that a sampler drew them for."""

    __slots__ = ("epoch", "seed")

    def __init__(self, items: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(items)
        self.seed, self.epoch = seed, epoch

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self), self.seed, self.epoch)


def sample_seed(seed: int, epoch: int, key: str) -> int:
    """Return the seed of a sample in an epoch, 0 to 2^32 - 1. It is part of what a run is, so it never changes.

    >>> sample_seed(0, 1, "train/7.jpg") == sample_seed(0, 1, "train/7.jpg") != sample_seed(0, 2, "train/7.jpg")
    True
    """
    return xxhash.xxh3_64_intdigest(f"deeplink sample-seed-1 {seed} {epoch} {key}".encode()) & _MASK


log = logging.getLogger(__name__)

STATE_FORMAT: Final = "deeplink-sampler-1"
_STRETCH = 8192
"""Places put through the permutation at once: one call costs as much for 10 as for 1,000."""


class Pass:
    """One pass over what is left of an epoch. Stateful as torchdata's StatefulDataLoader understands it.

    Its own state says what was handed out, where the sampler's says what was finished: that is what a
    StatefulDataLoader keeps, which knows what its workers fetched ahead.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        self.epoch, self.position = sampler.epoch, sampler.position
        self._batches = self._found()
        self._coming = sampler._coming(self.epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        batch, self.position = next(self._batches)
        return batch

    def _found(self) -> Iterator[tuple[SampledBatch, int]]:
        position = self.position
        while position < self._sampler.length:
            rows, sizes = self._sampler._stretch(self.epoch, position)
            taken = 0
            for mine, size in sizes:
                self._sampler._give(self)
                position += size
                yield SampledBatch(rows[taken : taken + mine], self._sampler.seed, self.epoch), position
                taken += mine
        self._sampler._used_up(self)

    def coming(self) -> np.ndarray:
        """Return the samples that disks are to be asked for now, int64: some of the next window of blocks."""
        return np.empty(0, np.int64) if self._coming is None else self._coming.at(self.position)

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch begins, in the form of the sampler's own state."""
        return {**self._sampler._state(), "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands, and take the sampler there. Raises as `ResumableSampler.load_state_dict`."""
        self._sampler._take_over(self, state)
        self.epoch, self.position = state["epoch"], state["position"]
        self._batches = self._found()
        self._coming = self._sampler._coming(self.epoch)


class ResumableSampler:
    """Yields this rank's batches of row positions; hand it to `DataLoader(batch_sampler=...)`.

    An epoch's order is a function of (version, seed, epoch) alone, by blocks of the window too. What is left of it
    is cut into steps of equal size (one sample more or less), each step into one part per rank: every sample comes
    exactly once, none is padded or dropped, at any world size and after any number of resumptions at others.

    Call `finished()` once after each optimizer step: it is what moves the position that `state_dict` tells, not
    what DataLoader workers have fetched ahead. After the last step of an epoch it moves on to the next epoch:

        while sampler.epoch < epochs:
            for samples, labels in loader:
                ...
                optimizer.step()
                sampler.finished()

    The node's store is told which shards the order uses next (`Dataset.announce`), so that those leave it first
    that the epoch needs no more.

    Args:
        dataset: what is sampled, or its length. Its `version`, where it has one, goes into order and state; of a
            subset of a deeplink dataset a digest of its indices, too, also where torch's Subset is around it.
        batch_size: most samples a rank gets per step; give this or the next one.
        global_batch_size: most samples of a step over all ranks: then the steps of an epoch are the same at any
            world size. Where the ranks do not divide a step the first ones get one sample more than the others.
        rank: this process's; RANK of the environment when None, else 0.
        world_size: the number of ranks; WORLD_SIZE of the environment when None, else 1.
        seed: another seed is another order.
        shuffle: False keeps the dataset's own order in every epoch; an `Order`, or its value, is that one:
            `Order.BLOCKS` needs a dataset that knows its `blocks`.
        window: blocks mixed with one another in `Order.BLOCKS`.
        residency: where samples lie: each step's samples go to ranks that are near to them where that can be.
        version: in place of the dataset's own.

    Raises:
        ValueError: a number is out of range, not just one of the batch sizes is given, or there is no such order.
        TypeError: a batch size or the seed is no whole number.
        SamplerError: the dataset does not know its blocks.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool | Order | str = True,
        window: int = BLOCK_WINDOW,
        residency: Residency | None = None,
        version: str | None = None,
    ) -> None:
        dataset = resolved(dataset)
        self.length = int(dataset) if isinstance(dataset, int | np.integer) else len(dataset)
        self.subset = str(getattr(dataset, "subset_digest", ""))
        self.version = str(getattr(dataset, "version", "")) if version is None else version
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if self.length <= 0:
            raise ValueError(f"nothing to sample: the length is {self.length}")
        step = operator.index((batch_size or 0) * world if global_batch_size is None else global_batch_size)
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("give batch_size (of each rank) or global_batch_size (of all ranks together)")
        if not 0 <= self.rank < world or step < world:
            raise ValueError(f"a global_batch_size of {step}, rank {self.rank} of {world}")
        if residency is not None and len(residency.nodes) != world:
            raise ValueError(f"the residency knows {len(residency.nodes)} ranks of {world}")
        if residency is not None and residency.length != self.length:
            raise ValueError(f"the residency is of {residency.length} samples, the dataset has {self.length}")
        self.share, self.residency = RankShare(step, world), residency
        self.seed, self.order = operator.index(seed), _order(shuffle)
        self._by_blocks = self._block_order(dataset, window) if self.order is Order.BLOCKS else None
        self._announcer = announcer_of(dataset, self.order, self._by_blocks, residency, self.rank)
        self.epoch = self.position = 0
        self._begin_pass()

    def _announce(self, *, again: bool = False) -> None:
        """Tell the node's store what is used next, unless it knows; passes and `finished` do it by themselves."""
        if self._announcer is not None:
            self._announcer.tell(self.epoch, self.position, again=again)

    def _block_order(self, dataset: object, window: int) -> BlockOrder:
        blocks = getattr(dataset, "blocks", None)
        if blocks is None or blocks.samples != self.length:
            raise misuse("Order.BLOCKS without blocks", "Give it the deeplink.Dataset itself.")
        return BlockOrder(blocks, window, version=self.version, seed=self.seed)

    def _begin_pass(self) -> None:
        self._pass: object = None  # tells a pass from those before it
        self._given = self._done = 0
        self._exhausted = False

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, wherever in it training stands."""
        return self.share.steps(self.length)

    @property
    def steps_left(self) -> int:
        """The number of steps left in the epoch, counted from the last finished one."""
        return self.share.steps(self.length - self.position)

    def __iter__(self) -> Pass:
        """Return the batches left in the epoch, from the first sample after the last finished step.

        Raises:
            SamplerError: the last pass was used up and `finished` not called for all of it.
            SamplerError: what is left cannot be shared out (when the first batch is taken).
        """
        if self._exhausted and self._done < self._given:
            raise misuse(
                f"the last pass gave {self._given} batches, and finished() was called for {self._done}",
                "Call finished() after each optimizer step (finished(n) after n batches), or set_epoch(epoch) "
                "to say that the pass was left on purpose.",
            )
        self._begin_pass()
        self._pass = begun = Pass(self)
        self._announce(again=True)
        return begun

    def _give(self, by: object) -> None:
        """Count a batch that a pass hands out; refuse it where another pass has begun since."""
        if self._pass is not by:
            raise misuse("an earlier pass goes on after another began", "Keep one loader at a time.")
        self._given += 1

    def _used_up(self, by: object) -> None:
        """Take notice that a pass has no batch left."""
        self._exhausted = self._exhausted or self._pass is by

    def _stretch(self, epoch: int, position: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return this rank's rows of the steps from `position` on, some thousand samples of them.

        With, for each step, how many of the rows are its, and how many samples it takes over all ranks.
        """
        spans, sizes, taken = [], [], 0
        while position < self.length and taken < _STRETCH:
            size = self.share.step_size(self.length - position)
            start, stop = self.share.part(size, self.rank)
            whole = self.residency is not None
            spans.append(
                np.arange(position, position + size) if whole else np.arange(position + start, position + stop)
            )
            sizes.append((stop - start, size))
            taken += len(spans[-1])
            position += size
        rows = self._rows(np.concatenate(spans), epoch)
        if self.residency is not None:
            edges = np.cumsum([size for _, size in sizes])[:-1]
            rows = np.concatenate([self._near(step, self.residency) for step in np.split(rows, edges)])
        return rows.tolist(), sizes

    def _near(self, step: np.ndarray, residency: Residency) -> np.ndarray:
        parts = [self.share.part(len(step), rank) for rank in range(self.share.world_size)]
        mine: np.ndarray = step[
            residency.ranks(step, np.array([stop - start for start, stop in parts])) == self.rank
        ]
        return mine

    def _rows(self, places: np.ndarray, epoch: int) -> np.ndarray:
        if self._by_blocks is not None:
            return self._by_blocks.rows(places, epoch)
        if self.order is Order.SEQUENTIAL:
            return places
        return shuffled(places, self.length, version=self.version, seed=self.seed, epoch=epoch)

    def _coming(self, epoch: int) -> Coming | None:
        """Return what tells what to ask disks for ahead in an epoch; None but in `Order.BLOCKS`."""
        return None if self._by_blocks is None else Coming(self._by_blocks, epoch)

    @property
    def shuffle_quality(self) -> float:
        """How good a shuffle this order is for this step size: see `BlockOrder.quality`; 1.0 is an exact one."""
        if self._by_blocks is None:
            return float(self.order is Order.SHUFFLED)
        return self._by_blocks.quality(self.share.global_batch_size, self.epoch)

    def finished(self, steps: int = 1) -> None:
        """Say that the next batch handed out (or the next `steps`) has been trained on, on every rank.

        Raises:
            SamplerError: more steps are said to be finished than batches were handed out.
        """
        if steps < 1 or self._done + steps > self._given:
            raise misuse(
                f"finished() for {self._done + steps} steps, and this pass gave {self._given} batches",
                "Call it once per batch, in the process that iterates the loader, after the optimizer's step.",
            )
        self._move(steps)
        self._done += steps
        if not self.position:
            # The loader may ask for the end of this pass only after the last step: that is no misuse.
            self._given = self._done = 0

    def _move(self, steps: int) -> None:
        """Go on by so many steps; after the last step of an epoch to the start of the next. See `finished`."""
        if not 1 <= steps <= self.steps_left:
            raise misuse(
                f"{steps} steps, and the epoch has {self.steps_left} left", "Call finished() once per step."
            )
        for _ in range(steps):
            self.position += self.share.step_size(self.length - self.position)
        if self.position == self.length:
            self.epoch, self.position = self.epoch + 1, 0
        self._announce()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; where it is the epoch that is under way, stay at the position reached.

        Raises:
            SamplerError: a whole pass was handed out and `finished` never called.
            ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        if epoch != self.epoch:
            if self._exhausted and self._given and not self._done:
                raise misuse(
                    f"epoch {self.epoch} was handed out whole, and finished() never called",
                    "Call finished() after each optimizer step.",
                )
            self.epoch, self.position = epoch, 0
        self._begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands after the last finished step; JSON, the same on every rank.

        Raises:
            SamplerError: this pass handed out batches and `finished` was never called: they would come again. Not
                where torchdata's StatefulDataLoader asks, which keeps the state of the pass.
        """
        if self._given and not self._done and not asked_by_torchdata():
            raise unfinished(self._given)
        return self._state()

    def _state(self) -> dict[str, Any]:
        state = {
            "format": STATE_FORMAT,
            "version": self.version,
            "length": self.length,
            "order": self.order.value,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }
        if self.subset:
            state["subset"] = self.subset
        if self._by_blocks is not None:
            state["window"] = self._by_blocks.window
        if self.residency is not None:
            state["residency"] = self.residency.digest
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands; world size and batch size may differ from those it was saved with.

        Raises:
            SamplerError: the state is of another version, subset, length, seed, order or format, or damaged.
        """
        self._check(state, self.length - 1)
        self.epoch, self.position = state["epoch"], state["position"]
        self._begin_pass()

    def _check(self, state: Mapping[str, Any], last: int) -> None:
        mine = self._state()
        if state.get("residency") != mine.get("residency") and state.get("position"):
            log.info("the epoch goes on with samples shared out to ranks by another residency")
        for key in (mine.keys() | state.keys()) - {"residency"}:
            moving = key in {"epoch", "position"}
            if key not in mine or key not in state or (not moving and state[key] != mine[key]):
                raise foreign_state(key, state.get(key), mine.get(key))
        epoch, position = state["epoch"], state["position"]
        if not isinstance(epoch, int) or epoch < 0:
            raise foreign_state("epoch", epoch, "a whole number, 0 or more")
        if not isinstance(position, int) or not 0 <= position <= last:
            raise foreign_state("position", position, f"0 to {last}")

    def _take_over(self, by: object, state: Mapping[str, Any]) -> None:
        """Take what a pass's state says was handed out for finished, and let that pass go on."""
        self._check(state, self.length)
        is_over = state["position"] == self.length
        self.epoch, self.position = state["epoch"] + is_over, 0 if is_over else state["position"]
        self._begin_pass()
        self._pass = by
        self._announce()


def _order(shuffle: bool | Order | str) -> Order:  # noqa: FBT001 - as the sampler takes it
    if isinstance(shuffle, Order | str):
        try:
            return Order(shuffle)
        except ValueError as problem:
            known = ", ".join(repr(order.value) for order in Order)
            raise ValueError(f"{problem}: give True, False, an Order, or one of {known}") from None
    return Order.SHUFFLED if shuffle else Order.SEQUENTIAL
