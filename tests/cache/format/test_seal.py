from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeplink.cache.format.block import checksum
from deeplink.cache.format.index_format import Seal, append_seal, chunk_size, parities_of
from tests.effort import examples

SIZES = [1 << power for power in range(12, 19)]
SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=examples(40)
)


def sealed(path: Path, rows: int, behind: bytes = b"") -> tuple[bytearray, Seal]:
    """Return a file with a seal, and the seal."""
    table = pa.table({"x": np.random.default_rng(rows).integers(0, 1 << 60, rows)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    append_seal(path, 100, behind)
    data = bytearray(path.read_bytes())
    found = Seal.find(memoryview(data))
    assert found is not None
    return data, found


@given(st.integers(1, 1 << 45))
def test_a_seal_is_small_beside_what_it_covers(covered: int) -> None:
    size = chunk_size(covered)
    count = -(-covered // size)
    parities = parities_of(count)
    assert 1 <= parities <= count
    assert parities * min(size, covered) + 16 * count <= max(0.016 * covered, 3 * SIZES[0])
    # Lists are looked for near the file's end, and a chunk is what is compared for one row.
    assert size <= SIZES[-1]
    assert covered > 1 << 31 or 8 * count < 1 << 18


@SAME_FOLDER
@given(rows=st.sampled_from([0, 10, 3000, 400_000]), behind=st.binary(max_size=300), data=st.data())
def test_damage_as_long_as_a_chunk_is_restored(
    tmp_path: Path, rows: int, behind: bytes, data: st.DataObject
) -> None:
    good, seal = sealed(tmp_path / "file", rows, behind)
    assert seal.chunk == chunk_size(seal.covered)
    assert good[seal.covered - len(behind) : seal.covered] == behind
    at = data.draw(st.integers(0, seal.covered - 1))
    bad = good.copy()
    stop = min(at + data.draw(st.integers(1, seal.chunk)), seal.covered)
    for place in range(at, stop):
        bad[place] ^= 0x55
    found = Seal.find(memoryview(bad))
    assert found is not None

    def write(start: int, content: bytes) -> None:
        bad[start : start + len(content)] = content

    damaged = [number for number in found.chunks([(0, found.covered)]) if not found.is_whole(number)]
    assert damaged == list(range(at // seal.chunk, (stop - 1) // seal.chunk + 1))
    assert all(found.restore(number, write) for number in damaged)
    assert bad == good


def test_of_two_damaged_chunks_of_one_parity_none_is_restored(tmp_path: Path) -> None:
    data, seal = sealed(tmp_path / "file", 400_000)
    assert len(seal.checksums) > 2 * seal.parities
    data[0] ^= 1
    data[seal.parities * seal.chunk] ^= 1
    found = Seal.find(memoryview(bytes(data)))
    assert found is not None
    for number in (0, seal.parities):
        assert not found.is_whole(number)
        assert not found.restore(number, lambda _at, _content: pytest.fail("it is not what was written"))


def test_arrow_reads_on(tmp_path: Path) -> None:
    sealed(tmp_path / "file", 1000, b"x" * 1001)
    with pa.memory_map(str(tmp_path / "file")) as file:
        assert pa.ipc.open_file(file).read_all().num_rows == 1000


@pytest.mark.parametrize("older", [False, True])
def test_an_end_that_speaks_of_seals_has_one_even_so(tmp_path: Path, older: bool) -> None:
    """Arrow's footer holds where the files came from, and what a folder is called is not ours to say."""
    table = pa.table({"x": np.arange(1000)}).replace_schema_metadata({"source": "/DLSEAL/DLSEAL1/DLSEAL2/DLSEAL2"})
    with pa.OSFile(str(tmp_path / "file"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    append_seal(tmp_path / "file", 100)
    made = Seal.find(memoryview((tmp_path / "file").read_bytes()))
    assert made is not None
    if older:
        append_older_seal(tmp_path / "file", made.covered)
    data = bytearray((tmp_path / "file").read_bytes())
    data[data.rindex(b"DLSEAL1\n" if older else b"DLSEAL2\n")] ^= 1  # the other list is enough
    found = Seal.find(memoryview(data))
    assert found is not None
    assert found.covered == made.covered


def older(path: Path, rows: int) -> bytes:
    """Write a file with a seal of 256 KiB chunks and one parity, as format 2 has it."""
    append_older_seal(path, sealed(path, rows)[1].covered)
    return path.read_bytes()


def append_older_seal(path: Path, covered: int) -> None:
    """Put such a seal in place of the one that a file has."""
    data = path.read_bytes()
    length = int.from_bytes(data[-10:-6], "little")
    body, footer = data[:covered], data[-10 - length :]
    chunks = [body[at : at + (1 << 18)] for at in range(0, covered, 1 << 18)]
    parity = np.zeros(len(chunks[0]), np.uint8)
    for chunk in chunks:
        parity[: len(chunk)] ^= np.frombuffer(chunk, np.uint8)
    listed = struct.pack(f"<{len(chunks)}Q", *map(checksum, chunks))
    listed += struct.pack("<QQQQQ", checksum(footer), covered, 100, len(footer), len(chunks))
    listed += struct.pack("<Q", checksum(listed)) + b"DLSEAL1\n"
    path.write_bytes(body + parity.tobytes() + footer + listed + listed + footer)


@pytest.mark.parametrize("rows", [0, 10, 40_000, 400_000])
def test_a_seal_of_format_2_is_read_as_ever(tmp_path: Path, rows: int) -> None:
    good = older(tmp_path / "file", rows)
    data = bytearray(good)
    data[len(data) // 3] ^= 1
    data[-1] ^= 1
    seal = Seal.find(memoryview(data))
    assert seal is not None
    assert (seal.chunk, seal.parities, seal.file_bytes) == (1 << 18, 1, len(good))
    damaged = [number for number in range(len(seal.checksums)) if not seal.is_whole(number)]
    assert len(damaged) <= 1

    def write(start: int, content: bytes) -> None:
        data[start : start + len(content)] = content

    assert all(seal.restore(number, write) for number in damaged)
    assert not seal.is_footer_whole()
    assert seal.restore_footer(write)
    assert data[: seal.covered] == good[: seal.covered]
    assert seal.is_footer_whole()


@pytest.mark.parametrize("covered", [0, 1, 1 << 12, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize(
    "rest", [(0, 0), (0, 1), (1, 0), (1, 1), (1 << 12, (1 << 64) - 1), ((1 << 64) - 1, 1 << 63)]
)
def test_numbers_that_do_not_fit_the_file_are_no_seal(tmp_path: Path, covered: int, rest: tuple[int, int]) -> None:
    data, _ = sealed(tmp_path / "file", 100)
    listed = struct.pack("<QQQQQQ", 0, covered, 0, 0, *rest)
    listed += struct.pack("<Q", checksum(listed)) + b"DLSEAL2\n"
    assert Seal.find(memoryview(bytes(data[:500]) + listed)) is None
