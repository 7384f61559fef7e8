"""A file of ranges answers as Python's own files do, however few bytes a fetch brings."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from deeplink.core.ranged_file import RangedFile


class Ranges(RangedFile):
    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.size, self.most = data, len(data), most

    @override
    def fetch(self, start: int, length: int) -> bytes:
        assert 0 <= start < start + length <= self.size
        return self.data[start : start + min(length, self.most)]


Steps = list[tuple[str, int, int]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 40), st.just(0)),
        st.tuples(st.just("seek"), st.integers(-40, 40), st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])),
    )
)


@given(data=st.binary(max_size=32), most=st.integers(1, 40), steps=STEPS)
def test_it_reads_and_seeks_as_bytes_in_memory_do(
    data: bytes, most: int, steps: list[tuple[str, int, int]]
) -> None:
    ours, theirs = io.BufferedReader(Ranges(data, most)), io.BytesIO(data)
    for what, number, whence in steps:
        if what == "read":
            assert ours.read(number) == theirs.read(number)
        elif {os.SEEK_SET: 0, os.SEEK_CUR: theirs.tell(), os.SEEK_END: len(data)}[whence] + number >= 0:
            assert ours.seek(number, whence) == theirs.seek(number, whence)


def test_what_makes_no_sense_is_refused_as_by_pythons_own_files() -> None:
    file = Ranges(b"abc", 3)
    with pytest.raises(ValueError, match="whence"):
        file.seek(0, 7)
    with pytest.raises(OSError, match="Invalid argument"):
        file.seek(-1)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
