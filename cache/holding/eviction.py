"""Which shards leave an SSD that is too full: a pure function of what it holds and of what is known of each.

Never a shard that a running job still needs, and never one of which it is not known that it can be had again.
Among the others: first those that nobody has announced to read, the longest unused first; then, as Belady's rule
has it, the one whose next use is farthest off ("A study of replacement algorithms for a virtual-storage computer",
IBM Systems Journal, 1966). A job that reads a permutation of more than the SSD holds keeps what it has: what is
still needed never leaves, so nothing is brought twice in an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.types import ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """What is known of a shard on this node.

    Attributes:
        id: its name.
        bytes: size of its file.
        used_unix: when it was last read, seconds since 1970.
        needed: whether a running job still needs it.
        next_use: how far off the next use is that a job has announced, in shards; None where nobody has.
        replaceable: whether it was proved, not long ago, that it can be had again.
    """

    id: ShardId
    bytes: int
    used_unix: float
    needed: bool = False
    next_use: int | None = None
    replaceable: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """How full a store may become.

    Attributes:
        bytes: what the shards may take in all.
        low: down to where it is emptied once it is too full, so that not every shard that comes costs a round.
        reserve: bytes of the file system that are left free, whoever fills it.
    """

    bytes: int
    low: int
    reserve: int

    def excess(self, held: int, free: int, coming: int) -> int:
        """Return how many bytes must go before `coming` more may come; 0 where there is room.

        >>> Budget(bytes=100, low=80, reserve=10).excess(held=95, free=500, coming=5)
        0
        >>> Budget(bytes=100, low=80, reserve=10).excess(held=95, free=500, coming=6)
        21

        Args:
            held: bytes that the shards take.
            free: bytes that the file system has left.
            coming: bytes of what is to come; 0 to ask about the store as it is.
        """
        over = held + coming - self.low if held + coming > self.bytes else 0
        lacking = self.reserve + coming - free
        return max(over, lacking, 0)


_SHARE, _LOW = 0.9, 0.9
_RESERVE, _MOST_RESERVE = 0.02, 4 << 30


def budget_of(setting: int, capacity: int) -> Budget:
    """Return the budget of a store.

    Args:
        setting: `store_bytes` of the configuration; 0: nine tenths of the file system.
        capacity: bytes of the file system in all.
    """
    most = int(setting or capacity * _SHARE)
    return Budget(bytes=most, low=int(most * _LOW), reserve=min(int(capacity * _RESERVE), _MOST_RESERVE))


def in_order(held: Iterable[HeldShard]) -> list[HeldShard]:
    """Return the shards that may leave, those that leave first first."""
    may = (shard for shard in held if shard.replaceable and not shard.needed)
    return sorted(
        may,
        key=lambda shard: (
            (0, shard.used_unix, shard.id) if shard.next_use is None else (1, -shard.next_use, shard.id)
        ),
    )


def to_evict(held: Sequence[HeldShard], excess: int) -> tuple[ShardId, ...]:
    """Return the shards that leave for `excess` bytes to become free; all that may, where that is not enough."""
    gone: list[ShardId] = []
    for shard in in_order(held):
        if excess <= 0:
            break
        gone.append(shard.id)
        excess -= shard.bytes
    return tuple(gone)


def unused(held: Iterable[HeldShard], before_unix: float) -> tuple[ShardId, ...]:
    """Return the shards that nobody has read since, or announced to, and that may leave."""
    return tuple(shard.id for shard in in_order(held) if shard.next_use is None and shard.used_unix < before_unix)
