from __future__ import annotations

import contextlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.cache.format import block
from deeplink.cache.pack.plan import RUN, read_marks, write_marks
from tests.effort import examples

SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=examples(80)
)
NOW = 1_760_000_000_123_456_789
MARK = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, 1 << 63, (1 << 64) - 1])
UNIT = st.sampled_from([1, 1000, 1_000_000, 1_000_000_000])
MARKS = st.lists(MARK, max_size=50) | UNIT.flatmap(
    lambda unit: st.lists(st.integers(-3, (1 << 63) // unit - 1).map(lambda n: n * unit % (1 << 64)), max_size=50)
)


def times(count: int, step_ns: int, seed: int = 0) -> np.ndarray:
    """Return times of files that were written one after another, a step after each other in the mean."""
    steps = np.random.default_rng(seed).exponential(step_ns, count).astype(np.int64)
    return (NOW + np.cumsum(steps)).view(np.uint64)


def file_of(path: Path, runs: list[tuple[int, bytes]], count: int) -> None:
    """Write a file whose checksums are right, whatever it says."""
    data = struct.pack("<8sQ", b"DLMARKS1", count)
    for number, (unit, content) in enumerate(runs):
        place = struct.pack("<QQII", count, number, len(content), unit)
        data += struct.pack("<IIQ", len(content), unit, block.checksum(place + content)) + content
    path.write_bytes(data)


@SAME_FOLDER
@given(marks=MARKS)
def test_what_was_written_is_read(tmp_path: Path, marks: list[int]) -> None:
    write_marks(tmp_path / "marks", np.array(marks, np.uint64))
    found = read_marks(tmp_path / "marks", len(marks))
    assert found.dtype == np.uint64
    assert found.tolist() == marks


@pytest.mark.parametrize("count", [0, 1, RUN - 1, RUN, RUN + 1, 3 * RUN + 5])
@pytest.mark.parametrize("kind", ["times", "hashes", "seconds"])
def test_runs_of_any_kind_and_any_rows_of_them(tmp_path: Path, count: int, kind: str) -> None:
    rng = np.random.default_rng(count)
    marks = {
        "times": times(count, 70_000),
        "hashes": rng.integers(0, (1 << 64) - 1, count, np.uint64),
        "seconds": rng.integers(1_300_000_000, 1_400_000_000, count).astype(np.uint64) * np.uint64(1_000_000_000),
    }[kind]
    write_marks(tmp_path / "marks", marks)
    assert (read_marks(tmp_path / "marks", count) == marks).all()
    for rows in (np.arange(count // 2, count), rng.permutation(count)[:100], np.arange(0)):
        found = read_marks(tmp_path / "marks", count, rows)
        assert (found == marks[rows]).all()
        assert len(found) == len(rows)


@pytest.mark.parametrize(
    ("most", "marks"),
    [
        (0.1, np.full(RUN, NOW, np.uint64)),
        (0.3, times(RUN, 70_000) // np.uint64(4_000_000) * np.uint64(4_000_000)),  # a kernel that ticks each 4 ms
        (2.4, times(RUN, 70_000)),
        (4.5, np.random.default_rng(0).permutation(times(RUN, 70_000))),
        (8.01, np.random.default_rng(0).integers(0, (1 << 64) - 1, RUN, np.uint64)),
    ],
)
def test_times_take_little_room_and_nothing_takes_more_than_it_has(
    tmp_path: Path, most: float, marks: np.ndarray
) -> None:
    write_marks(tmp_path / "marks", marks)
    assert (tmp_path / "marks").stat().st_size < most * len(marks)


@SAME_FOLDER
@given(at=st.integers(0, 1 << 20), bits=st.integers(1, 255), marks=st.lists(MARK, min_size=1, max_size=50))
def test_one_changed_byte_is_noticed(tmp_path: Path, at: int, bits: int, marks: list[int]) -> None:
    path = tmp_path / "marks"
    write_marks(path, np.array(marks, np.uint64))
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= bits
    path.write_bytes(data)
    with pytest.raises(ValueError, match="change mark"):
        read_marks(path, len(marks))


@SAME_FOLDER
@given(garbage=st.binary(max_size=300), count=st.integers(0, 3 * RUN), keep=st.integers(0, 39))
def test_garbage_is_refused(tmp_path: Path, garbage: bytes, count: int, keep: int) -> None:
    path = tmp_path / "marks"
    write_marks(path, times(count, 1_000_000))
    path.write_bytes(path.read_bytes()[:keep] + garbage)
    if count or keep < 16 or garbage:
        with pytest.raises(ValueError, match="change mark"):
            read_marks(path, count)


def test_a_file_cut_short_or_longer_or_of_other_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    write_marks(path, times(RUN + 7, 100))
    whole = path.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:8], b"", whole + b"\0", bytes(len(whole))):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="change mark"):
            read_marks(path, RUN + 7)
    path.write_bytes(whole)
    for count in (0, RUN, RUN + 8):
        with pytest.raises(ValueError, match="does not begin"):
            read_marks(path, count)


@SAME_FOLDER
@given(unit=st.sampled_from([0, 1, 7, 1000, (1 << 32) - 1]), content=st.binary(max_size=60), packed=st.booleans())
def test_content_that_was_made_to_harm_is_refused_or_marks(
    tmp_path: Path, unit: int, content: bytes, packed: bool
) -> None:
    file_of(tmp_path / "marks", [(unit, zlib.compress(content) if packed else content)], 5)
    with contextlib.suppress(ValueError):
        assert len(read_marks(tmp_path / "marks", 5)) == 5


def test_content_that_unpacks_to_more_than_it_should_takes_no_room(tmp_path: Path) -> None:
    file_of(tmp_path / "marks", [(1, zlib.compress(bytes(10 * RUN * 8), 9))], RUN)
    assert not read_marks(tmp_path / "marks", RUN).any()
