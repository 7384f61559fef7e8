"""The first members in a shard's order, of thousands: the hash of all names at once, the order of few of them.

`membership.ranked` says what the order is, and orders what is left here: both give the same to the last member.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplink.cache.membership import MemberAttributes, ranked, scored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deeplink.core.types import NodeName, ShardId

    Words = NDArray[np.uint64]

CANDIDATES = 64
"""So many members of a shard's order are to take it, at most: those that come after them are not looked at."""

_FEW = 48  # for so many members the order of all is found sooner
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
_SURE = 1e-9  # beyond what rounding does to a score
_DIGEST = 40  # characters of a shard's id
_LONGEST = 128 - _DIGEST - 1  # bytes of a name; of longer inputs XXH3 is another function

# Of XXH3's default secret the first 128 bytes, and its constants (Collet, xxHash specification 0.2.0, XXH3).
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
_PRIME, _AVALANCHE = 0x9E3779B185EBCA87, 0x165667919E3779F9


def _secret(at: int) -> int:
    return int.from_bytes(_SECRET[at : at + 8], "little")


def _folded(one: Any, other: Any) -> Any:
    """Return a product of 128 bits, its halves XORed. An int is a word that all names have; else one for each."""
    if isinstance(one, int) and isinstance(other, int):
        product = one * other
        return (product & _WORD) ^ (product >> 64)
    low, high = one & _HALF, one >> 32
    other_low, other_high = other & _HALF, other >> 32
    first, second = high * other_low, low * other_high
    carried = ((low * other_low) >> 32) + (first & _HALF) + second
    return (high * other_high + (first >> 32) + (carried >> 32)) ^ (one * other)


class _SameLength:
    """Names of one length, at most `_LONGEST`: XXH3 of a shard's id, a zero byte and each of them."""

    def __init__(self, names: list[bytes]) -> None:
        self._size = _DIGEST + 1 + len(names[0])
        text = np.zeros((len(names), self._size), np.uint8)
        text[:, _DIGEST + 1 :] = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)
        rounds = (self._size - 1) // 32 + 1
        # Where 16 bytes are taken from, each with its 16 of the secret.
        starts = [(16 * turn, 32 * turn) for turn in range(rounds)]
        starts += [(self._size - 16 * (turn + 1), 32 * turn + 16) for turn in range(rounds)]
        self._pairs = [(self._word(text, start, at), self._word(text, start + 8, at + 8)) for start, at in starts]

    def _word(self, text: NDArray[np.uint8], start: int, at: int) -> tuple[int, Words | None, int]:
        """Return where a word lies, the part of it that names make, and its word of the secret."""
        own = text[:, start : start + 8]
        part = np.ascontiguousarray(own).view("<u8")[:, 0].astype(np.uint64) if own.any() else None
        return start, part, _secret(at)

    def of(self, shard: bytes) -> Words:
        """Return the hash of each name."""
        text = shard + bytes(self._size - _DIGEST)
        total: Any = self._size * _PRIME & _WORD
        for pair in self._pairs:
            one, other = (self._mixed(text, *word) for word in pair)
            folded = _folded(one, other)
            both_plain = isinstance(total, int) and isinstance(folded, int)
            total = (total + folded) & _WORD if both_plain else total + folded
        total = (total ^ (total >> 37)) * np.uint64(_AVALANCHE)
        found: Words = total ^ (total >> 32)
        return found

    @staticmethod
    def _mixed(text: bytes, start: int, part: Words | None, secret: int) -> Any:
        word = int.from_bytes(text[start : start + 8], "little") ^ secret
        return word if part is None else part ^ word


class RendezvousOrder:
    """The order of `members` for each shard, as `membership.ranked` has it. Safe to use from several threads.

    Made once for a list of members; then a shard's first few cost about as much for thousands of members as for
    some dozens.

    >>> names = [f"n{number}" for number in range(1000)]
    >>> RendezvousOrder(names).first("00" * 20, 3) == ranked("00" * 20, names)[:3]
    True
    """

    def __init__(self, members: Iterable[NodeName], known: MemberAttributes | None = None) -> None:
        known = known or MemberAttributes()
        by_length: defaultdict[int, list[NodeName]] = defaultdict(list)
        for name in dict.fromkeys(members):
            by_length[len(name.encode())].append(name)
        self._names = [name for names in by_length.values() for name in names]
        is_parted = len({known.domain.get(name, "") for name in self._names}) > 1
        self._known = MemberAttributes(known.weight, known.domain if is_parted else {})
        self._is_few = len(self._names) <= _FEW or max(by_length) > _LONGEST
        if not self._is_few:
            self._groups = [_SameLength([name.encode() for name in names]) for names in by_length.values()]
            self._weights = np.array([known.weight.get(name, 1) for name in self._names], np.float64)
            self._bounds: dict[float, Words] = {}

    def owners(self, shard: ShardId, replicas: int) -> tuple[NodeName, ...]:
        """Return the `replicas` members a shard belongs on, the first one first; all where there are fewer."""
        return self.first(shard, replicas)

    def first(self, shard: ShardId, count: int) -> tuple[NodeName, ...]:
        """Return the first `count` members in the order in which they are to hold `shard`; all where fewer."""
        if self._is_few or len(shard) != _DIGEST:
            return ranked(shard, self._names, self._known)[:count]
        hashes = np.concatenate([group.of(shard.encode()) for group in self._groups])
        expected = count + 4 * count**0.5 + 4
        while expected < len(self._names) / 4:
            least = float(self._weights.sum()) / expected
            # All that have such a score, or more, are among them.
            among = [self._names[number] for number in (hashes >= self._bound(least)).nonzero()[0].tolist()]
            order = ranked(shard, among, self._known)
            if len(order) >= max(count, 2) and self._is_sure(shard, order, count, least):
                return order[:count]
            expected *= 4
        return ranked(shard, self._names, self._known)[:count]

    def _is_sure(self, shard: ShardId, order: tuple[NodeName, ...], count: int, least: float) -> bool:
        """Tell whether none that is not in `order`, and whose score is below `least`, could be of the first."""
        domain = self._known.domain
        if count > 1 and domain and domain.get(order[0], "") == domain.get(order[1], ""):
            return False
        # The second may be there for its domain; of the others the last one has the lowest score.
        told = {order[count - 1], order[1]} if count > 1 else {order[0]}
        return all(scored(shard, name, self._known)[0] <= -least * (1 + _SURE) for name in told)

    def _bound(self, least: float) -> Words:
        """Return for each member the hash from which on its score is `least`."""
        bound = self._bounds.get(least)
        if bound is None:
            uniform = np.exp(-self._weights / least) * (1 - _SURE)
            bound = self._bounds[least] = (uniform * 2.0**64).astype(np.uint64)
        return bound
