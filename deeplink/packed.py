"""Batches of samples as one tensor: what a packed Dataset gives, and how workers hand it to the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from deeplink.data.digest import receipts_of
from deeplink.data.ring import Ring
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deeplink.cache.batch import Batch
    from deeplink.data.ring import Slot, Ticket

_ALIGNED = 64
"""The samples begin at a multiple of it: a cache line, and what vector instructions like."""
_NUMBER = 8
_LOOKED_AT = 1 << 16
"""Samples whose lengths tell how long batches are."""


class RaggedBatchError(DeepLinkError):
    """Samples of different lengths were to be one rectangular tensor."""

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__(
            f"the batch's samples have {shortest:,} to {longest:,} bytes, so they are no rectangle",
            remedy="Take them one by one (batch[i]), or by arena and offsets.",
        )
        self.shortest, self.longest = shortest, longest


class PackedBatch:
    """Samples of one batch back to back, with labels and receipts, all in one uint8 tensor.

    It pickles, can be pinned, and goes through DataLoader workers as one piece. `batch[i]` is a sample's bytes, a
    uint8 tensor that shares the batch's memory; it may be written to.

    Attributes:
        whole: the one tensor: offsets, labels, receipts and samples.
    """

    __slots__ = ("_count", "_has_labels", "_has_receipts", "_slot", "whole")

    def __init__(
        self, whole: torch.Tensor, count: int, *, labels: bool, receipts: bool, slot: Slot | None = None
    ) -> None:
        self.whole, self._count = whole, count
        self._has_labels, self._has_receipts = labels, receipts
        self._slot = slot

    def _numbers(self, place: int, count: int) -> torch.Tensor:
        return self.whole[place * _NUMBER : (place + count) * _NUMBER].view(torch.int64)

    @property
    def offsets(self) -> torch.Tensor:
        """Where samples begin in `arena`: int64, shape (samples + 1,)."""
        return self._numbers(0, self._count + 1)

    @property
    def labels(self) -> torch.Tensor | None:
        """Label of each sample, int64, shape (samples,); None with `labels=False`."""
        return self._numbers(self._count + 1, self._count) if self._has_labels else None

    @property
    def receipts(self) -> torch.Tensor | None:
        """Receipt of each sample, int64, shape (samples,), for a DeliveryDigest; None without `receipts=True`."""
        if not self._has_receipts:
            return None
        return self._numbers(self._count * (1 + self._has_labels) + 1, self._count)

    @property
    def arena(self) -> torch.Tensor:
        """The samples back to back: uint8, shape (bytes of all,)."""
        return self.whole[head_bytes(self._count, self._has_labels + self._has_receipts) :]

    def stacked(self) -> torch.Tensor:
        """Return the samples as rows of one tensor: uint8, shape (samples, bytes of each), without a copy.

        Raises:
            RaggedBatchError: they are of different lengths.
        """
        if not self._count:
            return self.arena.reshape(0, 0)
        lengths = self.offsets.diff()
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest != longest:
            raise RaggedBatchError(shortest, longest)
        return self.arena.view(self._count, longest)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> torch.Tensor:
        if not -self._count <= position < self._count:
            raise IndexError(position)
        start, stop = self.offsets[position % self._count :][:2].tolist()
        return self.arena[start:stop]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.arena.split_with_sizes(self.offsets.diff().tolist()))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory, as DataLoader(pin_memory=True) wants it."""
        return self._with(self.whole.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the batch on a device: one copy."""
        return self._with(self.whole.to(device, non_blocking=non_blocking))

    def _with(self, whole: torch.Tensor) -> Self:
        return type(self)(whole, self._count, labels=self._has_labels, receipts=self._has_receipts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(self.whole.clone())

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self._count, self._has_labels, self._has_receipts)
        if self._slot is not None:
            slot, self._slot = self._slot, None
            return _redeemed, (slot.send(), *facts)
        return _rebuilt, (self.whole, *facts)


def _rebuilt(whole: torch.Tensor, count: int, labels: bool, receipts: bool) -> PackedBatch:  # noqa: FBT001 - pickled
    return PackedBatch(whole, count, labels=labels, receipts=receipts)


def _redeemed(ticket: Ticket, count: int, labels: bool, receipts: bool) -> PackedBatch:  # noqa: FBT001 - pickled
    return PackedBatch(torch.from_numpy(ticket.redeem()), count, labels=labels, receipts=receipts)


def head_bytes(count: int, columns: int) -> int:
    """Return how many bytes come before the samples: offsets, and one number per sample and column."""
    return -(-_NUMBER * (count + 1 + columns * count) // _ALIGNED) * _ALIGNED


class Packing:
    """Puts one read of the cache into a PackedBatch, in a ring's slot where there is one to be had.

    Args:
        rows: row of each sample in the index, int64.
        labels: label of each, or None.
        ring: shared memory to write into, if any.
        receipts: whether to make receipts.
    """

    def __init__(self, rows: np.ndarray, labels: np.ndarray | None, ring: Ring | None, *, receipts: bool) -> None:
        self.rows, self._labels, self._ring, self._receipts = rows, labels, ring, receipts
        self._whole = np.empty(0, np.uint8)
        self._slot: Slot | None = None

    def room(self, size: int) -> np.ndarray:
        """Return the arena for samples of `size` bytes together."""
        head = head_bytes(len(self.rows), (self._labels is not None) + self._receipts)
        found = self._ring.claim(head + size) if self._ring is not None else None
        if found is None:
            self._whole = np.empty(head + size, np.uint8)
        else:
            self._slot, self._whole = found
        return self._whole[head:]

    def batch(self, read: Batch) -> PackedBatch:
        """Return the batch once the samples are in the arena that `room` gave."""
        count = len(self.rows)
        numbers = [read.offsets] if self._labels is None else [read.offsets, self._labels]
        if self._receipts:
            numbers.append(receipts_of(self.rows, read.views()))
        used = sum(map(len, numbers)) * _NUMBER
        np.concatenate(numbers, out=self._whole[:used].view(np.int64))
        whole, labels = torch.from_numpy(self._whole), self._labels is not None
        return PackedBatch(whole, count, labels=labels, receipts=self._receipts, slot=self._slot)


def ring_for(have: Ring | None, lengths: np.ndarray, wanted: tuple[int, int, int]) -> Ring:
    """Return a ring for (workers, slots, samples of a batch), `have` where it will do.

    A slot takes all batches but those that lie six standard errors above the mean: these go torch's way.
    """
    workers, slots, batch_size = wanted
    some = lengths[:: len(lengths) // _LOOKED_AT + 1].astype(np.float64)
    likely = batch_size * some.mean() + 6 * some.std() * batch_size**0.5
    size = int(min(likely, batch_size * float(some.max()))) + head_bytes(batch_size, 2)
    return have if have is not None and have.fits(workers, slots, size) else Ring(workers, slots, size)


class PackedBatches(Protocol):
    """What `loader` needs of a dataset; a `deeplink.Dataset` with `packed=True` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...

    def share(self, *, workers: int, batch_size: int, slots: int) -> None:
        """Have workers write batches into memory that this process reads."""
        ...


def collate(batch: Any) -> Any:
    """Return the batch: it is one already. For `DataLoader(..., collate_fn=collate)`."""
    return batch


def loader(
    dataset: PackedBatches,
    batch_sampler: Iterable[list[int]],
    *,
    num_workers: int = 0,
    kind: type[torch_data.DataLoader[Any]] = torch_data.DataLoader,
    **options: Any,
) -> torch_data.DataLoader[Any]:
    """Return a DataLoader of a packed dataset, whose workers, if any, hand batches over in shared memory.

    Args:
        dataset: with `packed=True`.
        batch_sampler: such as a ResumableSampler.
        num_workers: as DataLoader has it.
        kind: DataLoader, or a subclass such as torchdata's StatefulDataLoader.
        options: whatever else it takes; a `collate_fn` gets each PackedBatch, in the worker.

    Raises:
        RingMemoryError: the workers' batches would take more than half of the memory available.
    """
    if num_workers:
        most = getattr(getattr(batch_sampler, "share", None), "batch_size", 0)
        size = most or max(map(len, batch_sampler), default=1)
        dataset.share(workers=num_workers, batch_size=size, slots=(options.get("prefetch_factor") or 2) + 2)
    options.setdefault("collate_fn", collate)
    source: Any = dataset
    return kind(source, batch_sampler=batch_sampler, num_workers=num_workers, **options)
