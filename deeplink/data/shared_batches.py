"""Batches of samples as one tensor: what a packed Dataset gives, and how workers hand it to the trainer."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from deeplink.data.digest import receipts_of
from deeplink.data.errors import BatchError
from deeplink.data.subsets import resolved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from deeplink.cache.read.batch import Batch

_MOST = 0.5
"""Share of the available memory that a ring may take."""

_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


def _overwritten(ring: str, slot: int) -> BatchError:
    return BatchError(
        f"the batch in slot {slot} of ring {ring} was overwritten after its worker had died",
        remedy="Start a new pass over the loader, as after any death of a worker.",
    )


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is sent in place of a batch: where it lies, and the number that shows that it still does."""

    ring: str
    slot: int
    number: int
    size: int

    def redeem(self) -> NDArray[np.uint8]:
        """Return the memory, in the process that made the ring; the slot is free once nothing refers to it."""
        ring = _rings.get(self.ring)
        if ring is None:
            raise _overwritten(self.ring, self.slot)
        return ring.redeem(self)


class Slot:
    """A worker's hold on a slot, given up when the memory is let go of without being sent."""

    def __init__(self, ring: Ring, slot: int, number: int, array: NDArray[np.uint8]) -> None:
        self._ring, self._slot, self._number, self._size = ring, slot, number, len(array)
        ring.watch(array, slot, number)

    def send(self) -> Ticket:
        """Return the ticket for the trainer, whose the memory is from now on."""
        self._ring.forget(self._number)
        return Ticket(self._ring.name, self._slot, self._number, self._size)


class Ring:
    """Slots of shared memory. Made by the trainer; goes to workers by fork, or by pickle when they are spawned.

    The memory belongs to no file system, so a small /dev/shm does not matter. A slot takes memory when it is first
    written. `stripes` workers may use it, `slots` of `slot_bytes` each; `made`: name and descriptor, where another
    process has made it.
    """

    def __init__(self, stripes: int, slots: int, slot_bytes: int, made: tuple[str, int] | None = None) -> None:
        self.stripes, self.slots = stripes, slots
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._head = -(-stripes * slots * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + stripes * slots * self.slot_bytes
        # In a spawned worker the memory is there, and the trainer's.
        self.name, self._owner = (secrets.token_hex(8), os.getpid()) if made is None else (made[0], 0)
        self._descriptor = _allocated(size) if made is None else made[1]
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._memory = mmap.mmap(self._descriptor, size)
        self._states = np.frombuffer(self._memory, np.int64, stripes * slots)
        self._stripe: tuple[int, int] | None = None
        self._made = 0
        # Looked at, not called back: Python drops an error that is raised in a weakref's callback, and torch tells
        # a worker's death by an error that a signal may raise between any two instructions.
        self._watched: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        if made is None:
            _rings[self.name] = self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            return _absent, ()  # a copy: it does without
        passed = reduction.DupFd(self._descriptor)
        return _attached, (type(self), (self.stripes, self.slots, self.slot_bytes), self.name, passed)

    def fits(self, stripes: int, slots: int, slot_bytes: int) -> bool:
        """Tell whether this ring has what is asked for."""
        return self.stripes >= stripes and self.slots >= slots and self.slot_bytes >= slot_bytes

    def claim(self, size: int) -> tuple[Slot, NDArray[np.uint8]] | None:
        """Return `size` bytes to write a batch into; None in the trainer, or where no slot is free or fits."""
        if size > self.slot_bytes or os.getpid() == self._owner:
            return None
        stripe = self._own_stripe()
        if stripe is None:
            return None
        self._free_gone()
        for slot in range(stripe * self.slots, (stripe + 1) * self.slots):
            if self._states[slot] == 0:
                # Not equal to a ticket of this slot's earlier holders, so that a late message differs from this.
                self._made += 1
                number = (os.getpid() << 32 | self._made & 0xFFFFFFFF) & 0x7FFFFFFFFFFFFFFF
                self._states[slot] = number
                array = self._array(slot, size)
                return Slot(self, slot, number, array), array
        return None

    def _own_stripe(self) -> int | None:
        if self._stripe is None or self._stripe[0] != os.getpid():
            self._stripe = (os.getpid(), self._locked_stripe())
        return self._stripe[1] if self._stripe[1] >= 0 else None

    def _locked_stripe(self) -> int:
        for stripe in range(self.stripes):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, stripe)
            except OSError as problem:
                if problem.errno not in {errno.EACCES, errno.EAGAIN}:
                    return -1
                continue
            mine = self._states[stripe * self.slots : (stripe + 1) * self.slots]
            mine[mine > 0] = 0  # on their way from a worker that has ended
            return stripe
        return -1

    def _array(self, slot: int, size: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory, np.uint8, size, self._head + slot * self.slot_bytes)

    def redeem(self, ticket: Ticket) -> NDArray[np.uint8]:
        """Return what a ticket stands for."""
        if self._states[ticket.slot] != ticket.number:
            raise _overwritten(self.name, ticket.slot)
        self._free_gone()
        array = self._array(ticket.slot, ticket.size)
        self.watch(array, ticket.slot, -ticket.number)  # first: whatever interrupts this, the slot is not lost
        self._states[ticket.slot] = -ticket.number
        return array

    def watch(self, array: NDArray[np.uint8], slot: int, number: int) -> None:
        """Have a slot set free, if it is in the state `number` then, once nothing refers to `array` any more.

        That is done when the ring is next used; a forked child's copy of the array does not count.
        """
        self._watched[number] = (weakref.ref(array), slot, os.getpid())

    def forget(self, number: int) -> None:
        """Leave the slot in the state `number` to its receiver."""
        self._watched.pop(number, None)

    def _free_gone(self) -> None:
        for number, (watched, slot, process) in list(self._watched.items()):
            if watched() is None:
                if self._states[slot] == number and os.getpid() == process:
                    self._states[slot] = 0
                self._watched.pop(number, None)

    def in_use(self) -> int:
        """Return how many slots are not free."""
        self._free_gone()
        return int(np.count_nonzero(self._states))


def _absent() -> None:
    return None


def _attached(kind: type[Ring], shape: tuple[int, int, int], name: str, passed: Any) -> Ring:
    return kind(*shape, (name, passed.detach()))


def _allocated(size: int) -> int:
    # Pages are given when they are first touched, and nothing refuses them then: the kernel would kill somebody.
    available = _available()
    if size > available * _MOST:
        raise BatchError(
            f"the workers' batches would take {size / (1 << 20):,.0f} MiB of shared memory, "
            f"and {available / (1 << 20):,.0f} MiB are available",
            remedy="Use fewer workers, smaller batches or a smaller prefetch_factor.",
        )
    descriptor = os.memfd_create("deeplink-ring", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def _available() -> int:
    """Return how many bytes of memory this machine has to spare, as the kernel estimates."""
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - a file of the kernel's
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) << 10


_ALIGNED = 64
"""The samples begin at a multiple of it: a cache line, and what vector instructions like."""
_NUMBER = 8
_LOOKED_AT = 1 << 16
"""Samples whose lengths tell how long batches are."""


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
            BatchError: they are of different lengths.
        """
        if not self._count:
            return self.arena.reshape(0, 0)
        lengths = self.offsets.diff()
        shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest != longest:
            raise BatchError(
                f"the batch's samples have {shortest:,} to {longest:,} bytes, so they are no rectangle",
                remedy="Take them one by one (batch[i]), or by arena and offsets.",
            )
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
    """Puts one read of the cache into a PackedBatch, in a ring's slot where there is one to be had."""

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
        BatchError: the workers' batches would take more than half of the memory available.
    """
    dataset = resolved(dataset)
    if num_workers:
        most = getattr(getattr(batch_sampler, "share", None), "batch_size", 0)
        size = most or max(map(len, batch_sampler), default=1)
        dataset.share(workers=num_workers, batch_size=size, slots=(options.get("prefetch_factor") or 2) + 2)
    options.setdefault("collate_fn", collate)
    source: Any = dataset
    return kind(source, batch_sampler=batch_sampler, num_workers=num_workers, **options)
