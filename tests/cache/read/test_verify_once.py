from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format import block
from deeplink.cache.read.local import Touched

SAMPLES = [memoryview(bytes([number]) * number) for number in range(20)]
CHECKSUMS = np.array([block.checksum(sample) for sample in SAMPLES], np.uint64)
ROWS = st.lists(st.integers(0, 19), max_size=30)


@given(st.lists(st.tuples(st.booleans(), ROWS), max_size=10))
def test_a_row_is_due_until_it_was_right(steps: list[tuple[bool, list[int]]]) -> None:
    touched, seen = Touched(CHECKSUMS), set[int]()
    for is_read, numbers in steps:
        rows = np.array(numbers, np.int64)
        assert [numbers[position] for position in touched.unseen(rows)] == [n for n in numbers if n not in seen]
        if is_read:
            assert not len(touched.wrong(rows, [SAMPLES[number] for number in numbers]))
            seen.update(numbers)
        elif numbers:
            touched.forget(rows)
            seen.difference_update(numbers)


def test_wrong_bytes_are_said_and_stay_due() -> None:
    touched, rows = Touched(CHECKSUMS), np.array([4, 5, 6])
    assert touched.wrong(rows, [SAMPLES[4], SAMPLES[9], SAMPLES[6]]).tolist() == [1]
    assert touched.unseen(rows).tolist() == [1]


def test_always_means_every_time() -> None:
    touched, rows = Touched(CHECKSUMS, always=True), np.arange(20)
    assert not len(touched.wrong(rows, SAMPLES))
    assert touched.unseen(rows).tolist() == list(range(20))
