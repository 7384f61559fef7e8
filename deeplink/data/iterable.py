"""`deeplink.IterableDataset`: a rank's batches as a stream that DataLoader workers split among themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from deeplink.data.errors import asked_by_torchdata, foreign_state, misuse, unfinished
from deeplink.data.sampler import SampledBatch
from deeplink.data.subsets import resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deeplink.data.dataset import MapDatasetBase
    from deeplink.data.sampler import ResumableSampler


class IterableDataset(torch_data.IterableDataset[Any]):
    """Yields a rank's batches in the sampler's order; for `DataLoader(dataset, batch_size=None, num_workers=...)`.

    Of n workers each reads every n-th batch, and a DataLoader takes them in turn, so they come in the same order
    whatever the number of workers. No indices are sent to the workers: each knows its share.

    Call `finished()` once after each optimizer step, as with a `ResumableSampler` of one's own: `state_dict` tells
    what was finished, and goes on exactly there at any number of workers and ranks. torchdata's
    StatefulDataLoader works with it as well; what that keeps tells what was handed out, and wants the same number
    of workers again. Keep one of the two states, not both.

    Args:
        dataset: what is read, a `deeplink.Dataset` or `GroupedDataset`; `packed=True` spares the workers much.
        sampler: which samples, in which order and batches. It is this object's from now on.
        collate: gets what `dataset` gives for a batch, in the worker; packed batches stay as they are and lists of
            items go through torch's `default_collate` when it is not given.
    """

    def __init__(
        self, dataset: MapDatasetBase, sampler: ResumableSampler, collate: Callable[[Any], Any] | None = None
    ) -> None:
        self.dataset, self.sampler, self._collate = resolved(dataset), sampler, collate
        # Persistent workers keep the copy they started with: the place where a pass begins they see here, and how
        # often training has jumped. A step within a pass is not: a worker that is slow to begin would see it.
        place = torch.tensor([sampler.epoch, sampler.position, 0])
        self._place: torch.Tensor = place.share_memory_()  # type: ignore[no-untyped-call]
        handed = torch.tensor([-1, -1])  # epoch and jumps of the pass that gave the last batch
        self._handed: torch.Tensor = handed.share_memory_()  # type: ignore[no-untyped-call]
        self._jumps = 0
        self._is_begun = False
        self._is_unfinished = True
        sampler._announce()  # before there are workers, who never ask the sampler for a pass

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, over all workers."""
        return len(self.sampler)

    @override
    def __iter__(self) -> Iterator[Any]:
        """Return this worker's batches of what is left of the epoch.

        Raises:
            SamplerError: with the first batch, in a persistent worker: the pass before was left half done,
                or the state loaded leaves fewer batches than there are workers.
        """
        info = torch_data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        again, self._is_begun = self._is_begun, info is not None
        if not again:
            return _Stream(self, first, step)
        epoch, position, jumps = self._place.tolist()
        is_same = (epoch, jumps) == (self.sampler.epoch, self._jumps)
        self._jumps = jumps
        self.sampler.load_state_dict({**self.sampler._state(), "epoch": epoch, "position": position})
        if is_same:
            why = f"a pass over epoch {epoch} was left before finished() was called for all of it"
        elif position and self.sampler.steps_left < step:
            # A worker without a batch may come here only when the epoch is over, and would begin the next one.
            why = f"epoch {epoch} has {self.sampler.steps_left} batches left, and there are {step} workers"
        else:
            why = ""
        return _Stream(self, first, step, refused=why)

    def read(self, rows: list[int]) -> Any:
        """Return the batch of some samples, as it is handed to training."""
        items = self.dataset.__getitems__(rows)
        if self._collate is not None:
            return self._collate(items)
        return items if self.dataset.packed else torch_data.default_collate(items)

    def finished(self, steps: int = 1) -> None:
        """Say that the next `steps` batches have been trained on, on every rank. Call it in the trainer's process.

        Raises:
            SamplerError: the epoch has not so many steps left.
        """
        self.sampler._move(steps)
        self._is_unfinished = not self.sampler.position  # of the next epoch nothing is finished
        if not self.sampler.position:
            self._tell_workers()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; where it is the epoch that is under way, stay at the position reached."""
        self.sampler.set_epoch(epoch)
        self._jump()

    def _jump(self) -> None:
        self._jumps += 1
        self._is_unfinished = True
        self._tell_workers()

    def _tell_workers(self) -> None:
        self._place.copy_(torch.tensor([self.sampler.epoch, self.sampler.position, self._jumps]))
        self.sampler._announce()

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands after the last finished step; JSON, the same on every rank.

        Raises:
            SamplerError: as `ResumableSampler.state_dict`.
        """
        is_given = self._handed.tolist() == [self.sampler.epoch, self._jumps]
        if is_given and self._is_unfinished and not asked_by_torchdata():
            raise unfinished("some")
        return self.sampler._state()

    def handed_out(self, epoch: int) -> None:
        """Note that the pass under way gave a batch; in the worker that read it."""
        self._handed.copy_(torch.tensor([epoch, self._jumps]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands, with the next pass. Raises as `ResumableSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)
        if torch_data.get_worker_info() is None:
            self._jump()


class _Stream:
    """One worker's batches of one pass; Stateful as torchdata's StatefulDataLoader understands it."""

    def __init__(self, whole: IterableDataset, first: int, step: int, *, refused: str = "") -> None:
        self._whole, self._first, self._step, self._refused = whole, first, step, refused
        self._start = whole.sampler._state()
        self._taken = 0
        self._batches = self._found()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        rows = next(self._batches)
        if self._refused:  # said here: an error in `__iter__` would end the worker, and its text be lost
            raise misuse(self._refused, "With persistent workers use every pass up, or make a new DataLoader.")
        batch = self._whole.read(rows)
        self._whole.handed_out(self._start["epoch"])
        self._taken += 1
        return batch

    def _found(self) -> Iterator[list[int]]:
        sampler, position = self._whole.sampler, self._start["position"]
        coming = sampler._coming(self._start["epoch"])
        wanted = self._first + self._taken * self._step
        number = 0
        while position < sampler.length:
            rows, sizes = sampler._stretch(self._start["epoch"], position)
            begin = 0
            for mine, size in sizes:
                if number == wanted:
                    if coming is not None:  # of what disks are asked for ahead each worker asks for its part
                        asked = np.array_split(coming.at(position), self._step)[self._first]
                        self._whole.dataset.will_need(asked)
                    yield SampledBatch(rows[begin : begin + mine], sampler.seed, self._start["epoch"])
                    wanted += self._step
                begin, position, number = begin + mine, position + size, number + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the place where the pass began, and how many batches of it this worker has handed out."""
        return {**self._start, "taken": self._taken, "worker": [self._first, self._step]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands."""
        if list(state.get("worker", ())) != [self._first, self._step]:
            raise foreign_state("worker", state.get("worker"), [self._first, self._step])
        start = {key: value for key, value in state.items() if key not in {"taken", "worker"}}
        self._whole.sampler.load_state_dict(start)
        self._start, self._taken = start, int(state["taken"])
        self._batches = self._found()
