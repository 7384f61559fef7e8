"""XXH3 of a shard's id with the name of each of many members, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deeplink.cache.format.block import DIGEST_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from deeplink.core.types import NodeName, ShardId

    Words = NDArray[np.uint64]

LONGEST = 128 - DIGEST_DIGITS - 1
"""Bytes of a name; of longer inputs XXH3 is another function."""
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1

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
    """Names of one length, at most `LONGEST`: XXH3 of a shard's id, a zero byte and each of them."""

    def __init__(self, names: list[bytes]) -> None:
        self._size = DIGEST_DIGITS + 1 + len(names[0])
        text = np.zeros((len(names), self._size), np.uint8)
        text[:, DIGEST_DIGITS + 1 :] = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)
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
        text = shard + bytes(self._size - DIGEST_DIGITS)
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


class NameHashes:
    """The hashes of `groups` of names, each of one length, and from which hash on a member's score is enough."""

    def __init__(self, groups: Iterable[Sequence[NodeName]], weights: Sequence[float], slack: float) -> None:
        """`weights` are the members', in the order of the groups; `slack` is what rounding may do to a score."""
        self._groups = [_SameLength([name.encode() for name in names]) for names in groups]
        self._weights, self._slack = np.array(weights, np.float64), slack
        self._bounds: dict[float, Words] = {}
        self.weight = float(self._weights.sum())

    @staticmethod
    def takes(shard: ShardId) -> bool:
        """Tell whether a text is as long as the shards' names that are hashed here."""
        return len(shard) == DIGEST_DIGITS

    def of(self, shard: ShardId) -> Words:
        """Return the hash of each member with a shard."""
        return np.concatenate([group.of(shard.encode()) for group in self._groups])

    def above(self, hashes: Words, least: float) -> list[int]:
        """Return the numbers of members whose score may be `least` or more."""
        bound = self._bounds.get(least)
        if bound is None:
            uniform = np.exp(-self._weights / least) * (1 - self._slack)
            bound = self._bounds[least] = (uniform * 2.0**64).astype(np.uint64)
        found: list[int] = (hashes >= bound).nonzero()[0].tolist()
        return found
