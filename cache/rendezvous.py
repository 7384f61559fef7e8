"""The first members in a shard's order, of thousands: the hash of all names at once, the order of few of them.

`membership.ranked` says what the order is, and orders what is left here: both give the same to the last member.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from deeplink.cache.membership import MemberAttributes, ranked, scored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deeplink.cache.name_hashes import NameHashes
    from deeplink.core.types import NodeName, ShardId

CANDIDATES = 64
"""So many members of a shard's order are to take it, at most: those that come after them are not looked at."""

_FEW = 48  # for so many members the order of all is found sooner
_SURE = 1e-9  # beyond what rounding does to a score


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
        self._hashes: NameHashes | None = None
        if len(self._names) > _FEW:
            from deeplink.cache.name_hashes import LONGEST, NameHashes  # noqa: PLC0415 - numpy: for many alone

            if max(by_length) <= LONGEST:
                weights = [known.weight.get(name, 1) for name in self._names]
                self._hashes = NameHashes(by_length.values(), weights, _SURE)

    def owners(self, shard: ShardId, replicas: int) -> tuple[NodeName, ...]:
        """Return the `replicas` members a shard belongs on, the first one first; all where there are fewer."""
        return self.first(shard, replicas)

    def first(self, shard: ShardId, count: int) -> tuple[NodeName, ...]:
        """Return the first `count` members in the order in which they are to hold `shard`; all where fewer."""
        if self._hashes is None or not self._hashes.takes(shard):
            return ranked(shard, self._names, self._known)[:count]
        hashes = self._hashes.of(shard)
        expected = count + 4 * count**0.5 + 4
        while expected < len(self._names) / 4:
            least = self._hashes.weight / expected
            # All that have such a score, or more, are among them.
            among = [self._names[number] for number in self._hashes.above(hashes, least)]
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
