from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.errors import ShardCorruptError
from deeplink.cache.format import block
from deeplink.cache.format.names import Names

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    block.Header,
    kind=st.sampled_from(block.RecordKind),
    number=U32,
    samples=U32,
    first=U32,
    payload=U64,
    checksum=U64,
)
SIZES = st.one_of(st.integers(0, 5000), st.sampled_from([block.BLOCK_PAYLOAD, block.SPAN, block.SPAN * 2 + 7]))


@given(HEADERS)
def test_a_header_says_what_it_was_given(header: block.Header) -> None:
    data = block.encode_header(header)
    assert len(data) == block.HEADER
    assert block.decode_header(data) == header


@given(HEADERS, st.integers(0, block.HEADER * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(header: block.Header, bit: int) -> None:
    data = bytearray(block.encode_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ShardCorruptError):
        block.decode_header(bytes(data))


def test_a_newer_format_is_refused() -> None:
    data = bytearray(
        block.encode_header(
            block.Header(kind=block.RecordKind.DATA, number=0, samples=0, first=0, payload=0, checksum=0)
        )
    )
    data[8] = 99
    data[-8:] = block.checksum(bytes(data[:-8])).to_bytes(8, "little")
    with pytest.raises(ShardCorruptError, match="format 99"):
        block.decode_header(bytes(data))


@given(st.lists(SIZES, min_size=1, max_size=60))
def test_samples_fill_blocks_without_gap_or_overlap(sizes: list[int]) -> None:
    blocks, offsets, payloads = block.arrange(sizes)
    filled = [0] * len(payloads)
    for size, number, offset in zip(sizes, blocks.tolist(), offsets.tolist(), strict=True):
        for place, begin, length in block.pieces(number, offset, size):
            assert begin == filled[place]
            filled[place] += length
    assert filled == payloads
    assert all(payload <= block.SPAN for payload in payloads)
    for number, payload in enumerate(payloads):
        inside = [size for size, where in zip(sizes, blocks.tolist(), strict=True) if where == number and size]
        assert payload <= block.BLOCK_PAYLOAD or len(inside) <= 1


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), U64, U64, U32, U32), max_size=20
    )
)
def test_a_table_says_what_it_was_given(rows: list[tuple[str, int, int, int, int]]) -> None:
    names = Names.of(row[0] for row in rows)
    table: dict[str, np.ndarray] = {
        "lengths": np.array([row[1] for row in rows], np.uint64),
        "checksums": np.array([row[2] for row in rows], np.uint64),
        "blocks": np.array([row[3] for row in rows], np.uint32),
        "offsets": np.array([row[4] for row in rows], np.uint32),
    }
    payload = block.encode_table(names, table)
    keys, columns = block.decode_table(payload)
    assert [key.decode() for key in keys] == list(names)
    assert columns.keys() == table.keys()
    assert all(columns[name].tolist() == table[name].tolist() for name in table)
    assert len(payload) == block.table_payload(np.array([len(row[0].encode()) for row in rows], np.int64))


@given(st.binary(max_size=200))
def test_garbage_is_no_table_or_a_consistent_one(payload: bytes) -> None:
    try:
        keys, columns = block.decode_table(payload)
    except ShardCorruptError:
        return
    assert len(keys) == len(columns["lengths"])


def test_a_sample_of_five_gib_is_a_hundred_and_sixty_pieces() -> None:
    blocks, offsets, payloads = block.arrange([10, 5 << 30, 0, 10, (5 << 30) + 1])
    assert payloads == [10, *[block.SPAN] * 160, 10, *[block.SPAN] * 160, 1]
    # The empty one shares no block with a piece.
    assert blocks.tolist() == [0, 1, 161, 161, 162]
    assert offsets.tolist() == [0, 0, 0, 0, 0]
    assert sum(length for _, _, length in block.pieces(1, 0, 5 << 30)) == 5 << 30
