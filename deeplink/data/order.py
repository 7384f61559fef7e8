"""The order of an epoch: a keyed permutation of 0 to length-1, any stretch of which is computed without the rest.

Algorithm `feistel-1`. It is part of every sampler state, so it never changes; a better one gets another name.

    a = ceil(sqrt(length)), b = ceil(length / a); a place p below a*b is the pair (l, r) = (p // b, p mod b)
    8 rounds, i = 0 to 7, with 64-bit keys k_i:   i even: l = (l + mix(r, k_i)) mod a
                                                  i odd:  r = (r + mix(l, k_i)) mod b
    the result is l*b + r; while it is not below length, it is put through again ("cycle walking", a*b - length < a
    places of a*b, so rarely)
    mix(x, k): x = (x + k) * 0x9E3779B97F4A7C15; x ^= x >> 32; x *= 0xD6E8FEB86659FD93; x ^= x >> 29  (mod 2^64)
    k_0 ... k_7: little endian, the BLAKE2b-512 digest of "deeplink feistel-1 <version> <seed> <epoch>"

Each round is undone by subtraction, so the whole is a permutation whatever `mix` does.

`blocks-1`, in `deeplink.data.blocks`, puts the same permutation to another use.
"""

from __future__ import annotations

import hashlib
import math
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_STIR = np.uint64(0xD6E8FEB86659FD93)


class Order(Enum):
    """How an epoch's samples follow one another; the value is what sampler states say."""

    SHUFFLED = "feistel-1"
    BLOCKS = "blocks-1"
    SEQUENTIAL = "sequential"


def _keys(name: str) -> list[np.uint64]:
    digest = hashlib.blake2b(name.encode()).digest()
    return [np.uint64(key) for key in np.frombuffer(digest, "<u8")]


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = (values + key) * _SPREAD
    mixed ^= mixed >> np.uint64(32)
    mixed *= _STIR
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _once(places: NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(places, b)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _mix(right, key) % a) % a
        else:
            right = (right + _mix(left, key) % b) % b
    return left * b + right


def permuted(places: NDArray[np.int64], length: int, name: str) -> NDArray[np.int64]:
    """Return what the permutation called `name` of 0 to length-1 has at each of `places`; shape kept.

    Raises:
        IndexError: a place is not in 0 to length-1.
    """
    if places.size and not (int(places.min()) >= 0 and int(places.max()) < length):
        raise IndexError(f"places must lie in 0 to {length - 1}")
    keys = _keys(name)[:_ROUNDS]
    side = max(1, math.isqrt(max(length - 1, 0)) + 1)
    a, b = np.uint64(side), np.uint64(max(1, -(-length // side)))
    found = _once(places.astype(np.uint64), a, b, keys)
    while (outside := found >= np.uint64(length)).any():
        found[outside] = _once(found[outside], a, b, keys)
    return found.astype(np.int64)


def shuffled(places: NDArray[np.int64], length: int, *, version: str, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return which sample comes at each of `places` of a shuffled epoch; both are 0 to length-1, shape kept.

    >>> whole = shuffled(np.arange(1000), 1000, version="v", seed=0, epoch=0)
    >>> sorted(whole.tolist()) == list(range(1000))
    True

    Raises:
        IndexError: a place is not in 0 to length-1.
    """
    return permuted(places, length, f"deeplink feistel-1 {version} {seed} {epoch}")
