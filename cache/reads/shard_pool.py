"""The open shards of one index on this node: opened at first use, set aside when damaged."""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from deeplink.cache import block
from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.keeping.pins import Pin
from deeplink.cache.reads.mapped import ShardFile
from deeplink.cache.store import is_doubtful

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.cache.index import Index
    from deeplink.cache.store import Store
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

_LEAST_OPEN, _MOST_OPEN = 200, 16_384
_LOOK_AGAIN_S = 5.0
"""How long a shard that is not here is taken to be absent."""
_VOUCHED_S = 600.0
"""How long a shard that was read whole and found right is not doubted again: the index is at fault, or memory."""
_USED_EVERY_S = 60.0


def most_open() -> int:
    """Return how many shards may be open at once: each holds two descriptors, and half of them are others'."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN
    return min(max(soft // 4, _LEAST_OPEN), _MOST_OPEN)


class OpenShards:
    """Shard numbers of an index -> open files. Safe to use from several threads.

    Args:
        index: the dataset's version.
        store: this node's store.
        clock: where time comes from.
    """

    def __init__(self, index: Index, store: Store, clock: Clock) -> None:
        self._index, self._store, self._clock = index, store, clock
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._most = most_open()
        self._absent_until: dict[int, float] = {}
        self._damaged: set[int] = set()
        self._vouched_until: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self._pin: Pin | None = None
        self._leader = ""

    def get(self, number: int) -> ShardFile | None:
        """Return the open file of a shard; None where it is not here.

        Raises:
            ShardCorruptError: it is here and damaged.
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._open.get(number)
            if file is not None:
                self._open.move_to_end(number)
                self._note_use(number)
                return file
            if self._absent_until.get(number, 0.0) > self._clock.monotonic():
                return None
            file = self._opened(number)
            if file is None:
                self._absent_until[number] = self._clock.monotonic() + _LOOK_AGAIN_S
                return None
            self._open[number] = file
            self._note_use(number)
            if len(self._open) > self._most:
                self._open.popitem(last=False)
            return file

    def announce(self, numbers: Sequence[int], needed: int) -> str:
        """Say in which order shards are needed from now on, and how many of them the running epoch still needs.

        Until then all shards of the version are needed, so that none of them leaves this node while it is read.
        Return the name under which this was said, for processes to `follow` that read on this one's behalf.
        """
        with self._lock:
            self._pinned().announce([self._index.shards[number].id for number in numbers], needed)
            return self._pinned().holder

    def follow(self, leader: str) -> None:
        """Let what another process announced under this name hold for what is read here; before the first read."""
        self._leader = leader

    def _pinned(self) -> Pin:
        if self._pin is None:
            self._pin = Pin(self._store.root, self._index, self._clock, leader=self._leader)
        return self._pin

    def _note_use(self, number: int) -> None:
        now = self._clock.monotonic()
        self._pinned().renew()
        if now - self._used.get(number, float("-inf")) > _USED_EVERY_S:
            self._used[number] = now
            self._store.touch(self._index.shards[number].id)

    def _opened(self, number: int) -> ShardFile | None:
        entry = self._index.shards[number]
        verified = self._store.is_verified(entry.id)
        try:
            file = ShardFile(self._store.path(entry.id), entry.id, mapped=verified, expected=entry.bytes)
        except FileNotFoundError:
            return None
        starts = self._index.block_offsets(number)
        # The offsets are the packer's; a file of the same content could in principle be laid out otherwise.
        head = bytearray(block.HEADER)
        file.read_into([memoryview(head)], [int(starts[-1]) - block.HEADER])
        if block.decode_header(bytes(head), entry.id).number != len(starts) - 1:
            raise ShardCorruptError(entry.id, "its blocks are not where the index says")
        return file

    def set_aside(self, number: int, problem: Exception) -> None:
        """Stop reading a shard: something is wrong with it, or with what the index says of it.

        It is not put into quarantine here. Whoever heals (`take_damaged` tells of it) reads it whole first.
        """
        shard = self._index.shards[number].id
        log.error("%s; reading its samples from elsewhere", problem)
        with self._lock:
            now = self._clock.monotonic()
            self._open.pop(number, None)
            is_vouched = self._vouched_until.get(number, 0.0) > now
            self._absent_until[number] = now + (_VOUCHED_S if is_vouched else _LOOK_AGAIN_S)
            if is_vouched:
                return
            self._damaged.add(number)
        if is_doubtful(problem):
            with contextlib.suppress(OSError):
                self._store.doubt(shard)

    def is_vouched(self, number: int) -> bool:
        """Tell whether a shard was read whole not long ago and found right, so that it is not what is at fault."""
        return self._vouched_until.get(number, 0.0) > self._clock.monotonic()

    def take_damaged(self) -> set[int]:
        """Return the numbers of the shards put aside since the last call."""
        if not self._damaged:
            return set()
        with self._lock:
            taken, self._damaged = self._damaged, set()
        return taken

    def look_anew(self, numbers: Iterable[int]) -> None:
        """Take none of these shards for absent any more: they may have come."""
        with self._lock:
            for number in numbers:
                self._absent_until.pop(number, None)

    def look_again(self, number: int) -> None:
        """Take notice that a shard is here and is what its name promises."""
        with self._lock:
            self._absent_until.pop(number, None)
            self._vouched_until[number] = self._clock.monotonic() + _VOUCHED_S

    def close(self) -> None:
        """Let go of all files; views that were handed out stay valid."""
        with self._lock:
            self._open.clear()
            if self._pin is not None:
                self._pin.release()
                self._pin = None
