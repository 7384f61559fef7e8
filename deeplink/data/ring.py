"""Memory that DataLoader workers write batches into and the trainer reads them from: only a ticket is sent.

torch hands tensors from workers over by making a shared file for each and passing its descriptor: for a batch of
256 samples of 4 KiB that takes longer than reading it. This memory is made once, before the workers start; they
inherit it by fork, or are given it when they are spawned. It is cut into stripes, one per worker, of some slots.

A worker takes a stripe by a record lock, which the kernel takes back when the worker ends, however it ends: so no
slot is written by two processes, and none is lost. A slot is free (0), on its way (a ticket, a number over 0) or
with the trainer (the ticket below 0). The worker makes tickets, the trainer sets the slot free when it takes the
next batch and nothing refers to the memory any more. Nobody waits for anybody. Where no slot is free or big
enough, the batch goes torch's way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST = 0.5
"""Share of the available memory that a ring may take."""

_rings: weakref.WeakValueDictionary[str, Ring] = weakref.WeakValueDictionary()


class StaleTicketError(DeepLinkError):
    """A batch is no more where its worker left it: the worker died, and another has taken its slots over."""

    def __init__(self, ring: str, slot: int) -> None:
        super().__init__(
            f"the batch in slot {slot} of ring {ring} was overwritten after its worker had died",
            remedy="Start a new pass over the loader, as after any death of a worker.",
        )
        self.ring, self.slot = ring, slot


class RingMemoryError(DeepLinkError):
    """A ring would take too much of the memory that there is."""

    def __init__(self, size: int, available: int) -> None:
        super().__init__(
            f"the workers' batches would take {size / (1 << 20):,.0f} MiB of shared memory, "
            f"and {available / (1 << 20):,.0f} MiB are available",
            remedy="Use fewer workers, smaller batches or a smaller prefetch_factor.",
        )
        self.size, self.available = size, available


@dataclass(frozen=True, slots=True)
class Ticket:
    """What is sent in place of a batch: where it lies, and the number that shows that it still does."""

    ring: str
    slot: int
    number: int
    size: int

    def redeem(self) -> NDArray[np.uint8]:
        """Return the memory, in the process that made the ring; the slot is free once nobody refers to it.

        Raises:
            StaleTicketError: it holds something else by now, or the ring is gone.
        """
        ring = _rings.get(self.ring)
        if ring is None:
            raise StaleTicketError(self.ring, self.slot)
        return ring.redeem(self)


@dataclass(frozen=True, slots=True)
class AttachedRing:
    """A ring's memory that another process made."""

    name: str
    descriptor: int


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
    written.

    Args:
        stripes: how many workers may use it.
        slots: slots of each.
        slot_bytes: room in each, in bytes.
        made: the memory, where another process has made it.

    Raises:
        RingMemoryError: that is more than half of the memory available.
    """

    def __init__(self, stripes: int, slots: int, slot_bytes: int, made: AttachedRing | None = None) -> None:
        self.stripes, self.slots = stripes, slots
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._head = -(-stripes * slots * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + stripes * slots * self.slot_bytes
        # In a spawned worker the memory is there, and the trainer's.
        self.name, self._owner = (secrets.token_hex(8), os.getpid()) if made is None else (made.name, 0)
        self._descriptor = _allocated(size) if made is None else made.descriptor
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
            return _absent, ()  # a copy for whoever: it does without
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
                # Not equal to a ticket of this slot's earlier holders, so that a late message is told from this.
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
        """Return what a ticket stands for. Raises as `Ticket.redeem`."""
        if self._states[ticket.slot] != ticket.number:
            raise StaleTicketError(self.name, ticket.slot)
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
        """Leave the slot in the state `number` to whoever it was sent to."""
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
    return kind(*shape, AttachedRing(name, passed.detach()))


def _allocated(size: int) -> int:
    # Pages are given when they are first touched, and nothing refuses them then: the kernel would kill somebody.
    available = _available()
    if size > available * _MOST:
        raise RingMemoryError(size, available)
    descriptor = os.memfd_create("deeplink-ring", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def _available() -> int:
    """Return how many bytes of memory this machine has to spare, as the kernel estimates."""
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - a file of the kernel's
        found = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) << 10
