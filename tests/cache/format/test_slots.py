from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format import block
from deeplink.cache.format.index import KeyColumn
from deeplink.cache.format.index_format import PROBES, SlotTable, make_slots, place_slots
from deeplink.cache.format.names import Names

HASHES = st.lists(st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 64) - 1]), max_size=300)
KEYS = st.sets(st.text("ab/é", max_size=5), max_size=60).map(sorted)
EMPTY = 0xFFFFFFFF


def column(keys: list[str]) -> KeyColumn:
    raw = [key.encode() for key in keys]
    return KeyColumn(Path("index"), np.cumsum([0, *map(len, raw)], dtype=np.int64), memoryview(b"".join(raw)))


def one_by_one(hashes: list[int]) -> list[int]:
    """Return the table as docs/format.md tells it."""
    homes = len(hashes) + len(hashes) // 8
    slots, free = [EMPTY] * (homes + 128), 0
    bits = len(hashes).bit_length()
    for row in sorted(range(len(hashes)), key=lambda row: (hashes[row], row)):
        place = max((hashes[row] >> 32) * homes >> 32, free)
        if place < len(slots):
            slots[place] = (hashes[row] % (1 << (32 - bits)) << bits) + row
        free = place + 1
    return slots


@given(HASHES)
def test_a_table_is_what_the_format_says(hashes: list[int]) -> None:
    assert place_slots(np.array(hashes, np.uint64)).tolist() == one_by_one(hashes)


@given(KEYS, KEYS)
def test_each_key_is_found_and_no_other(keys: list[str], others: list[str]) -> None:
    table = SlotTable(make_slots(Names.of(keys).arrow), len(keys))
    where = {key: row for row, key in enumerate(keys)}
    for key in [*keys, *others]:
        assert table.row(key.encode(), column(keys).raw) == where.get(key)


def test_of_many_keys_all_are_found_by_the_table_alone() -> None:
    keys = [f"train/{number:07d}.jpg" for number in range(100_000)]
    slots, names = make_slots(Names.of(keys).arrow), column(keys)
    assert slots.nbytes < 4.51 * len(keys)
    table = SlotTable(slots, len(keys))
    assert [table.row(key.encode(), names.raw) for key in keys] == list(range(len(keys)))


@given(st.data(), st.lists(st.integers(0, EMPTY), min_size=PROBES, max_size=300))
def test_any_other_table_finds_the_right_row_or_none(data: st.DataObject, slots: list[int]) -> None:
    keys = data.draw(KEYS)
    table, names = SlotTable(np.array(slots, np.uint32), len(keys)), column(keys)
    for row, key in enumerate(keys):
        assert table.row(key.encode(), names.raw) in {None, row}
    assert table.row(b"none", names.raw) is None


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_slots_that_name_other_rows_are_passed_over(wrong: int) -> None:
    keys = ["a", "b", "c"]
    mark = block.checksum(b"b") << 2 & EMPTY
    table = SlotTable(np.array([mark | wrong] * 20 + [mark | 1] + [mark | 3] * PROBES, np.uint32), len(keys))
    assert table.row(b"b", column(keys).raw) == 1
    assert table.row(b"d", column(keys).raw) is None


def test_a_table_too_short_to_be_one_is_refused() -> None:
    with pytest.raises(ValueError, match="127 slots"):
        SlotTable(np.zeros(PROBES - 1, np.uint32), 0)
