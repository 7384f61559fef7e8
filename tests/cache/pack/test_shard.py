from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.errors import ShardCorruptError, ShardIdError
from deeplink.cache.format import block
from deeplink.cache.pack import building
from deeplink.core.errors import DeepLinkError
from tests.cache.records import records

if TYPE_CHECKING:
    from deeplink.cache.pack.building import SealedShard


def write(path: Path, payloads: list[bytes]) -> SealedShard:
    values = []
    for number, payload in enumerate(payloads):
        header = block.Header(
            kind=block.RecordKind.DATA,
            number=number,
            samples=1,
            first=number,
            payload=len(payload),
            checksum=block.checksum(payload),
        )
        values.append(block.encode_header(header) + payload)
    return building.write_shard(path, [len(payload) for payload in payloads], values)


def verify(path: Path, sealed: SealedShard) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        block.verify_shard(descriptor, sealed.id)
    finally:
        os.close(descriptor)


PAYLOADS = [os.urandom(size) for size in (0, 1, 4095, 4096, 4097, 100_000)]


def test_the_same_content_gives_the_same_file(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", PAYLOADS), write(tmp_path / "two", PAYLOADS)
    assert one.id == two.id
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_name_follows_from_every_byte_of_the_content(tmp_path: Path) -> None:
    names = {write(tmp_path / "a", PAYLOADS).id, write(tmp_path / "b", PAYLOADS[::-1]).id}
    names.add(write(tmp_path / "c", [*PAYLOADS[:-1], PAYLOADS[-1][:-1] + bytes([PAYLOADS[-1][-1] ^ 1])]).id)
    assert len(names) == 3


def test_payloads_lie_where_the_layout_says_from_a_page_boundary(tmp_path: Path) -> None:
    sealed = write(tmp_path / "s", PAYLOADS)
    content = (tmp_path / "s").read_bytes()
    for start, payload in zip(sealed.layout.offsets.tolist(), PAYLOADS, strict=True):
        assert start % block.PAGE == 0
        assert content[start : start + len(payload)] == payload


def test_lmdb_itself_reads_the_same(tmp_path: Path) -> None:
    sealed = write(tmp_path / "s", PAYLOADS)
    read = list(records(tmp_path / "s"))
    assert [number for number, _ in read] == list(range(len(PAYLOADS)))
    assert [value[block.HEADER :] for _, value in read] == PAYLOADS
    assert block.name_of(hashlib.sha256(value).digest() for _, value in read) == sealed.id


@pytest.mark.parametrize("sizes", [[1 << 20] * 130, [0] * 3000, [200] * 700 + [block.SPAN]])
def test_the_map_has_room_for_many_blocks_and_commits(tmp_path: Path, sizes: list[int]) -> None:
    sealed = write(tmp_path / "s", [bytes(size) for size in sizes])
    assert sealed.layout.payloads.tolist() == sizes
    verify(tmp_path / "s", sealed)


def test_blocks_cost_little_more_than_their_samples(tmp_path: Path) -> None:
    sealed = write(tmp_path / "s", [bytes(block.BLOCK_PAYLOAD)] * 16)
    assert sealed.bytes < 1.03 * 16 * block.BLOCK_PAYLOAD


@pytest.mark.parametrize("keep", [0, 100, 4096, 8192, 50_000, -4096])
def test_a_file_cut_short_is_noticed(tmp_path: Path, keep: int) -> None:
    sealed = write(tmp_path / "s", PAYLOADS)
    os.truncate(tmp_path / "s", keep if keep >= 0 else sealed.bytes + keep)
    with pytest.raises(ShardCorruptError):
        verify(tmp_path / "s", sealed)


def test_any_flipped_byte_of_a_block_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sealed = write(path, PAYLOADS)
    content = path.read_bytes()
    for start, payload in zip(sealed.layout.offsets.tolist(), PAYLOADS, strict=True):
        for at in {start - block.HEADER, start - block.HEADER + 20, start - 1, start, start + len(payload) - 1}:
            if at >= start + len(payload):
                continue
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ShardCorruptError):
                verify(path, sealed)
    path.write_bytes(content)
    verify(path, sealed)


def test_a_block_that_claims_to_reach_beyond_the_file_is_refused(tmp_path: Path) -> None:
    for claimed in (5000, 2**63, 2**64 - 1):
        header = block.Header(
            kind=block.RecordKind.DATA, number=0, samples=1, first=0, payload=claimed, checksum=0
        )
        path = tmp_path / "hostile"
        path.write_bytes(bytes(16) + block.encode_header(header) + b"short")
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(ShardCorruptError):
                block.scan_shard(descriptor)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "A" * 40, "0" * 39, "0" * 41, "0" * 39 + "\n", "\uff10" * 40]
)
def test_only_forty_digits_name_a_shard(name: str) -> None:
    with pytest.raises(ShardIdError):
        block.checked_shard_id(name)


def test_another_lmdb_format_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "LMDB_FORMAT", (1, 0))
    with pytest.raises(DeepLinkError, match="cannot be written here"):
        write(tmp_path / "s", PAYLOADS)
    assert not (tmp_path / "s").exists()
