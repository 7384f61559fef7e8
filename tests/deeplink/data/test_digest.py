"""The delivery digest: order does not matter, anything else does."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.errors import DeepLinkError
from deeplink.data import DeliveryDigest, receipt
from deeplink.data.digest import receipts_of

SAMPLES = [f"sample {number}".encode() * (number % 7) for number in range(100)]


@dataclass(frozen=True)
class Listing:
    rows: np.ndarray
    checksums: np.ndarray


def listing(rows: range = range(100)) -> Listing:
    sums = [xxhash.xxh3_64_intdigest(SAMPLES[row]) for row in rows]
    return Listing(np.arange(rows.start, rows.stop), np.array(sums, dtype=np.uint64))


def receipts(rows: range = range(100)) -> list[int]:
    return [receipt(row, SAMPLES[row]) for row in rows]


@given(order=st.permutations(range(100)), cut=st.integers(0, 100))
def test_deliveries_in_any_order_over_any_ranks_equal_what_the_index_expects(order: list[int], cut: int) -> None:
    given_out = receipts()
    one, other = DeliveryDigest(), DeliveryDigest()
    one.add(0, [given_out[row] for row in order[:cut]])
    other.add(0, np.array([given_out[row] for row in order[cut:]], dtype=np.int64))
    one.merge(other)
    assert one == DeliveryDigest.expected(listing(), 1)


def test_a_part_of_the_index_keeps_its_row_numbers() -> None:
    digest = DeliveryDigest()
    digest.add(2, receipts(range(40, 60)))
    assert digest.equal(DeliveryDigest.expected(listing(range(40, 60)), [2]))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r[:-1], "99 samples here, 100 there"),
        (lambda r: [*r, r[0]], "101 samples"),
        (lambda r: [*r[:-1], r[0]], "not the same ones"),
        (lambda r: [*r[:-1], receipt(99, b"other bytes")], "not the same bytes"),
        (lambda r: [*r[:-2], receipt(98, SAMPLES[99]), receipt(99, SAMPLES[98])], "not the same"),
    ],
    ids=["lost", "twice", "one in place of another", "altered", "swapped labels"],
)
def test_what_is_not_exactly_once_shows(spoil: object, says: str) -> None:
    digest = DeliveryDigest()
    digest.add(0, spoil(receipts()))  # type: ignore[operator]
    expected = DeliveryDigest.expected(listing(), 1)
    assert not digest.equal(expected)
    assert says in digest.differences(expected)[0]


def test_tables_of_ranks_add_up_as_int64_tensors_do() -> None:
    given_out = receipts()
    random.Random(0).shuffle(given_out)  # noqa: S311 - a test's order
    tables = []
    for rank in range(4):
        digest = DeliveryDigest()
        digest.add(0, torch.tensor(given_out[rank::4]))
        digest.add(1, torch.tensor(given_out[rank::4]))
        tables.append(torch.tensor(digest.table(3), dtype=torch.int64))
    total = DeliveryDigest.from_table(torch.stack(tables).sum(0).tolist())
    assert total == DeliveryDigest.expected(listing(), 2)
    assert total.count(1) == 100
    assert total.count(2) == 0


def test_the_state_survives_json() -> None:
    digest = DeliveryDigest()
    digest.add(3, receipts())
    loaded = DeliveryDigest()
    loaded.add(0, [1, 2])
    loaded.load_state_dict(json.loads(json.dumps(digest.state_dict())))
    assert loaded == digest


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": "deeplink-digest-2", "epochs": []},
        {"format": "deeplink-digest-1"},
        {"format": "deeplink-digest-1", "epochs": [[0, 1]]},
        {"format": "deeplink-digest-1", "epochs": [[0, 1, "xyz"]]},
        {"format": "deeplink-digest-1", "epochs": [[0, -1, "00"]]},
        {"format": "deeplink-digest-1", "epochs": [[0, 1, "10000000000000000"]]},
    ],
)
def test_a_damaged_state_is_refused(state: dict[str, object]) -> None:
    digest = DeliveryDigest()
    with pytest.raises(DeepLinkError, match="not a delivery digest"):
        digest.load_state_dict(state)
    assert digest == DeliveryDigest()


def test_a_table_too_short_for_the_epochs_held_is_refused() -> None:
    digest = DeliveryDigest()
    digest.add(2, [1])
    with pytest.raises(ValueError, match="epoch 2"):
        digest.table(2)


def test_a_receipt_is_a_signed_number_that_an_int64_tensor_holds() -> None:
    assert torch.tensor(receipts(), dtype=torch.int64).tolist() == receipts()
    assert min(receipts()) < 0 < max(receipts())


@given(pairs=st.lists(st.tuples(st.integers(0, 2**63 - 1), st.binary(max_size=300)), max_size=20))
def test_receipts_in_bulk_are_those_made_one_by_one(pairs: list[tuple[int, bytes]]) -> None:
    rows = np.array([row for row, _ in pairs], np.int64)
    bulk = receipts_of(rows, [memoryview(data) for _, data in pairs])
    assert bulk.dtype == np.int64
    assert bulk.tolist() == [receipt(row, data) for row, data in pairs]


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_receipts_may_come_as_numbers_or_as_an_array(numbers: list[int]) -> None:
    one, other, third = DeliveryDigest(), DeliveryDigest(), DeliveryDigest()
    one.add(0, numbers)
    other.add(0, np.array(numbers, np.int64))
    third.add(0, iter(numbers))
    assert one == other == third
    assert int(one.state_dict()["epochs"][0][2], 16) == sum(numbers) % 2**64
