"""A batch sampler that knows, to the sample, how far training is, whatever the number of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deeplink.data.order import Order, shuffled
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

STATE_FORMAT: Final = "deeplink-sampler-1"
_STRETCH = 8192
"""Places put through the permutation at once: one call costs as much for 10 as for 1,000."""


class SamplerMisuseError(DeepLinkError):
    """The sampler was called in an order that would lose or repeat samples unseen."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"ResumableSampler: {problem}", remedy=remedy)
        self.problem = problem


class SamplerStateError(DeepLinkError):
    """A state does not belong to this sampler.

    Attributes:
        key: which part of the state differs.
        found: what the state says; `expected` is what this sampler has.
    """

    def __init__(self, key: str, found: object, expected: object) -> None:
        super().__init__(
            f"the sampler's state is of another run: {key} is {found!r}, here it is {expected!r}",
            remedy="Resume with the dataset version, seed and order the state was saved with, or start from anew.",
        )
        self.key, self.found, self.expected = key, found, expected


class TooFewSamplesError(DeepLinkError):
    """The samples left in the epoch cannot be shared out so that every rank gets some, and none twice."""

    def __init__(self, left: int, world_size: int, batch_size: int) -> None:
        super().__init__(
            f"{left} samples left in the epoch cannot be shared by {world_size} ranks in batches of {batch_size}",
            remedy="Use a batch size over 1 and no more ranks than samples, or go on with set_epoch(epoch + 1).",
        )
        self.left, self.world_size, self.batch_size = left, world_size, batch_size


@dataclass(frozen=True, slots=True)
class Share:
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

        >>> Share(batch_size=4, world_size=2).step_size(10)
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

        >>> [Share(batch_size=4, world_size=3).part(8, rank) for rank in range(3)]
        [(0, 3), (3, 6), (6, 8)]
        """
        each, more = divmod(size, self.world_size)
        start = rank * each + min(rank, more)
        return start, start + each + (rank < more)


class ResumableSampler:
    """Yields this rank's batches of row positions; hand it to `DataLoader(batch_sampler=...)`.

    An epoch's order is a function of (version, seed, epoch) alone. What is left of it is cut into steps of equal
    size (one sample more or less), each step into one part per rank: every sample comes exactly once, none is
    padded or dropped, at any world size and after any number of resumptions at others.

    Call `finished()` once after each optimizer step: it is what moves the position that `state_dict` tells, not
    what DataLoader workers have fetched ahead. After the last step of an epoch it moves on to the next epoch:

        while sampler.epoch < epochs:
            for samples, labels in loader:
                ...
                optimizer.step()
                sampler.finished()

    Args:
        dataset: what is sampled, or its length. Its `version`, where it has one, goes into order and state.
        batch_size: most samples a rank gets per step.
        rank: this process's; RANK of the environment when None, else 0.
        world_size: the number of ranks; WORLD_SIZE of the environment when None, else 1.
        seed: another seed is another order.
        shuffle: False keeps the dataset's own order in every epoch.
        version: in place of the dataset's own.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        version: str | None = None,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.version = str(getattr(dataset, "version", "")) if version is None else version
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if self.length <= 0:
            raise ValueError(f"nothing to sample: the length is {self.length}")
        if batch_size <= 0 or not 0 <= self.rank < world:
            raise ValueError(f"batch_size {batch_size}, rank {self.rank} of {world}")
        self.share = Share(batch_size, world)
        self.seed, self.order = seed, Order.SHUFFLED if shuffle else Order.SEQUENTIAL
        self.epoch = self.position = 0
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._pass: object = object()  # tells a pass from those before it
        self._given = self._done = 0
        self._exhausted = False

    def __len__(self) -> int:
        """Return the number of steps left in the epoch, counted from the last finished one."""
        return self.share.steps(self.length - self.position)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches left in the epoch, from the first sample after the last finished step.

        Raises:
            SamplerMisuseError: the last pass was used up and `finished` not called for all of it.
            TooFewSamplesError: what is left cannot be shared out.
        """
        if self._exhausted and self._done < self._given:
            raise SamplerMisuseError(
                f"the last pass gave {self._given} batches, and finished() was called for {self._done}",
                "Call finished() after each optimizer step (finished(n) after n batches), or set_epoch(epoch) "
                "to say that the pass was left on purpose.",
            )
        self._begin_pass()
        return self._batches(self._pass, self.epoch, self.position)

    def _batches(self, this_pass: object, epoch: int, position: int) -> Iterator[list[int]]:
        while position < self.length:
            spans, position = self._stretch(position)
            places = np.concatenate([np.arange(start, stop) for start, stop in spans])
            rows = self._rows(places, epoch).tolist()
            taken = 0
            for start, stop in spans:
                if self._pass is not this_pass:
                    raise SamplerMisuseError(
                        "an earlier pass goes on after another began", "Keep one loader at a time."
                    )
                self._given += 1
                yield rows[taken : taken + stop - start]
                taken += stop - start
        self._exhausted = True

    def _stretch(self, position: int) -> tuple[list[tuple[int, int]], int]:
        """Return where this rank's parts of the next steps lie, some thousand samples, and where the steps end."""
        spans, taken = [], 0
        while position < self.length and taken < _STRETCH:
            size = self.share.step_size(self.length - position)
            start, stop = self.share.part(size, self.rank)
            spans.append((position + start, position + stop))
            taken += stop - start
            position += size
        return spans, position

    def _rows(self, places: np.ndarray, epoch: int) -> np.ndarray:
        if self.order is Order.SEQUENTIAL:
            return places
        return shuffled(places, self.length, version=self.version, seed=self.seed, epoch=epoch)

    def finished(self, steps: int = 1) -> None:
        """Say that the next batch handed out (or the next `steps`) has been trained on, on every rank.

        Raises:
            SamplerMisuseError: more steps are said to be finished than batches were handed out.
        """
        if steps < 1 or self._done + steps > self._given:
            raise SamplerMisuseError(
                f"finished() for {self._done + steps} steps, and this pass gave {self._given} batches",
                "Call it once per batch, in the process that iterates the loader, after the optimizer's step.",
            )
        for _ in range(steps):
            self.position += self.share.step_size(self.length - self.position)
        self._done += steps
        if self.position == self.length:
            self.epoch, self.position = self.epoch + 1, 0
            # The loader may ask for the end of this pass only after the last step: that is no misuse.
            self._given = self._done = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; where it is the epoch that is under way, stay at the position reached.

        Raises:
            SamplerMisuseError: a whole pass was handed out and `finished` never called.
            ValueError: the epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        if epoch != self.epoch:
            if self._exhausted and self._given and not self._done:
                raise SamplerMisuseError(
                    f"epoch {self.epoch} was handed out whole, and finished() never called",
                    "Call finished() after each optimizer step.",
                )
            self.epoch, self.position = epoch, 0
        self._begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands after the last finished step; JSON, the same on every rank."""
        return {
            "format": STATE_FORMAT,
            "version": self.version,
            "length": self.length,
            "order": self.order.value,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands; world size and batch size may differ from those it was saved with.

        Raises:
            SamplerStateError: the state is of another dataset version, length, seed, order or format, or damaged.
        """
        mine = self.state_dict()
        for key in mine.keys() | state.keys():
            moving = key in {"epoch", "position"}
            if key not in mine or key not in state or (not moving and state[key] != mine[key]):
                raise SamplerStateError(key, state.get(key), mine.get(key))
        epoch, position = state["epoch"], state["position"]
        if not isinstance(epoch, int) or epoch < 0:
            raise SamplerStateError("epoch", epoch, "a whole number, 0 or more")
        if not isinstance(position, int) or not 0 <= position < self.length:
            raise SamplerStateError("position", position, f"0 to {self.length - 1}")
        self.epoch, self.position = epoch, position
        self._begin_pass()
