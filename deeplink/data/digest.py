"""The audit of deliveries: which samples training was fed, as two numbers per epoch whatever their order.

A receipt is computed from the very bytes that were handed over. An epoch's digest is how many receipts there were
and their sum modulo 2^64. Sums do not depend on order, add up over ranks, and are known beforehand from the index
alone: equal to that, every sample was delivered exactly once, unaltered (up to chance in 2^64).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import xxhash
from typing_extensions import override

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STATE_FORMAT: Final = "deeplink-digest-1"
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_PAIR = struct.Struct("<QQ")
_NUMBER = 8
_AT_ONCE = 1 << 16
# Of xxh3's default secret, the 64-bit numbers at 24 and 32, at 40 and 48, each pair xored.
_FLIP_LOW, _FLIP_HIGH = np.uint64(0x6782737BEA4239B9), np.uint64(0xAF56BC3B0996523A)


def _no_digest(problem: str) -> DeepLinkError:
    return DeepLinkError(f"not a delivery digest: {problem}")


class AuditedDataset(Protocol):
    """What `DeliveryDigest.expected` needs of a dataset."""

    @property
    def rows(self) -> np.ndarray:
        """Row numbers in the index, one per sample, int64."""
        ...

    @property
    def checksums(self) -> np.ndarray:
        """xxh3-64 of each sample's bytes, uint64, in the order of `rows`."""
        ...


def signed(number: int) -> int:
    """Return the signed 64-bit number with the same bits, as int64 tensors hold it."""
    return number - (1 << 64) if number & _SIGN else number


def receipt(row: int, data: bytes | memoryview) -> int:
    """Return what proves that row `row` of the index was delivered as `data`: a signed 64-bit number.

    It is xxh3-64 of the row number (8 bytes, little endian) and the xxh3-64 of the data (the same).
    """
    return signed(xxhash.xxh3_64_intdigest(_PAIR.pack(row, xxhash.xxh3_64_intdigest(data))))


def _pair_digests(rows: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Return the receipts, uint64, of rows (int64) delivered with these checksums (uint64): `receipt` for arrays.

    xxh3-64 of 16 bytes with seed 0, as the reference has it (xxHash 0.8, `XXH3_len_9to16_64b`): a hash by hash in
    Python takes 70 times as long.
    """
    low, high = rows.astype(np.uint64) ^ _FLIP_LOW, checksums.astype(np.uint64) ^ _FLIP_HIGH
    half, below = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b, c, d = low & below, low >> half, high & below, high >> half
    # The 128 bits of low * high, by schoolbook multiplication; the upper half of it folded onto the lower.
    cross = (a * c >> half) + (b * c & below) + a * d
    upper = (b * c >> half) + (cross >> half) + b * d
    found = np.uint64(2 * _NUMBER) + low.byteswap() + high + (upper ^ low * high)
    found ^= found >> np.uint64(37)
    found *= np.uint64(0x165667919E3779F9)
    found ^= found >> half
    return found


def receipts_of(rows: np.ndarray, samples: Sequence[bytes | memoryview]) -> np.ndarray:
    """Return the receipt of each sample as int64; rows are int64, in the order of the samples."""
    digest = xxhash.xxh3_64_intdigest
    checksums = np.fromiter(map(digest, samples), np.uint64, len(samples))
    return _pair_digests(rows, checksums).view(np.int64)


class DeliveryDigest:
    """Counts and sums of receipts per epoch. Not thread-safe."""

    def __init__(self) -> None:
        self._epochs: dict[int, tuple[int, int]] = {}

    def add(self, epoch: int, receipts: Iterable[int]) -> None:
        """Take in the receipts of a finished step: whole numbers, a numpy array, an int64 tensor."""
        if not hasattr(receipts, "__array__"):
            receipts = [number & _MASK for number in receipts]
            numbers = np.array(receipts, np.uint64)
        else:
            numbers = np.asarray(receipts).astype(np.uint64)
        self._put(epoch, len(numbers), int(numbers.sum(dtype=np.uint64)))

    def _put(self, epoch: int, count: int, total: int) -> None:
        if epoch < 0:
            raise ValueError(f"epoch {epoch}")
        had, held = self._epochs.get(epoch, (0, 0))
        self._epochs[epoch] = (had + count, (held + total) & _MASK)

    def merge(self, other: DeliveryDigest) -> None:
        """Take in all that `other` holds."""
        for epoch, (count, total) in other._epochs.items():
            self._put(epoch, count, total)

    @classmethod
    def expected(cls, dataset: AuditedDataset, epochs: int | Iterable[int]) -> Self:
        """Return the digest that delivering each sample exactly once per epoch gives, from the index alone.

        Args:
            dataset: a `deeplink.Dataset`, or whatever else has rows and checksums.
            epochs: which, or how many from 0.
        """
        total = 0
        for start in range(0, len(dataset.rows), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            total += int(_pair_digests(dataset.rows[part], dataset.checksums[part]).sum(dtype=np.uint64))
        made = cls()
        for epoch in range(epochs) if isinstance(epochs, int) else epochs:
            made._put(epoch, len(dataset.rows), total)
        return made

    def table(self, epochs: int) -> list[list[int]]:
        """Return [count, sum] of epochs 0 to epochs-1 as signed 64-bit numbers, for an int64 tensor to all-reduce.

        int64 addition wraps around as the sums here do, so the ranks' tables may simply be added up.

        Raises:
            ValueError: there are receipts of an epoch beyond.
        """
        if any(epoch >= epochs for epoch in self._epochs):
            raise ValueError(f"the digest holds epoch {max(self._epochs)}, the table {epochs} epochs")
        found = (self._epochs.get(epoch, (0, 0)) for epoch in range(epochs))
        return [[count, signed(total)] for count, total in found]

    @classmethod
    def from_table(cls, table: Sequence[Sequence[int]]) -> Self:
        """Return the digest that `table` was made of, or the sum of those whose tables were added up.

        Raises:
            DeepLinkError: a row is not a count and a sum.
        """
        made = cls()
        for epoch, row in enumerate(table):
            if len(row) != 2 or row[0] < 0:  # noqa: PLR2004
                raise _no_digest(f"row {epoch} is {row!r}")
            if any(row):
                made._put(epoch, int(row[0]), int(row[1]))
        return made

    def count(self, epoch: int) -> int:
        """Return how many samples of an epoch were delivered."""
        return self._epochs.get(epoch, (0, 0))[0]

    def differences(self, other: DeliveryDigest) -> list[str]:
        """Say for people where `self` and `other` differ; empty when they are equal."""
        found = []
        for epoch in sorted(self._epochs.keys() | other._epochs.keys()):
            mine, theirs = self._epochs.get(epoch, (0, 0)), other._epochs.get(epoch, (0, 0))
            if mine[0] != theirs[0]:
                found.append(f"epoch {epoch}: {mine[0]} samples here, {theirs[0]} there")
            elif mine[1] != theirs[1]:
                found.append(
                    f"epoch {epoch}: {mine[0]} samples in both, but not the same ones or not the same bytes"
                )
        return found

    def equal(self, other: DeliveryDigest) -> bool:
        """Tell whether both hold the same deliveries in every epoch."""
        return not self.differences(other)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeliveryDigest) and self.equal(other)

    __hash__ = None  # type: ignore[assignment] # it changes

    @override
    def __repr__(self) -> str:
        return f"DeliveryDigest({self.state_dict()['epochs']})"

    def state_dict(self) -> dict[str, Any]:
        """Return the digest as JSON: per epoch its number, the count, and the sum as 16 hexadecimal digits."""
        epochs = [[epoch, count, f"{total:016x}"] for epoch, (count, total) in sorted(self._epochs.items())]
        return {"format": STATE_FORMAT, "epochs": epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what `state` holds, and nothing else.

        Raises:
            DeepLinkError: it was not made by `state_dict`.
        """
        if state.get("format") != STATE_FORMAT:
            raise _no_digest(f"format {state.get('format')!r}, known is {STATE_FORMAT!r}")
        try:
            loaded = {int(epoch): (int(count), int(total, 16)) for epoch, count, total in state["epochs"]}
        except (KeyError, TypeError, ValueError) as problem:
            raise _no_digest(str(problem)) from problem
        if any(epoch < 0 or count < 0 or total > _MASK for epoch, (count, total) in loaded.items()):
            raise _no_digest("a number is out of range")
        self._epochs = loaded
