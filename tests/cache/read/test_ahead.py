"""What a disk is asked for ahead covers what was wanted, in few requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.errors import KeyMissingError
from deeplink.cache.packer import pack
from deeplink.cache.read.local import joined
from deeplink.cache.reader import Reader
from deeplink.core.config import Config

GAP, MOST = 64 << 10, 256 << 10
places = st.lists(st.tuples(st.integers(0, 4 << 20), st.integers(0, 600 << 10)), max_size=30)


@given(wanted=places)
def test_every_place_is_asked_for_and_little_besides(wanted: list[tuple[int, int]]) -> None:
    offsets = np.array([offset for offset, _ in wanted], np.int64)
    starts, sizes = joined(offsets, np.array([length for _, length in wanted], np.int64))
    asked = np.zeros((4 << 20) + (600 << 10) + 1, bool)
    for start, size in zip(starts, sizes, strict=True):
        assert size <= MOST
        assert not asked[start : start + size].any()
        asked[start : start + size] = True
    assert starts == sorted(starts)
    needed = np.zeros_like(asked)
    for offset, length in wanted:
        needed[offset : offset + length] = True
    assert not (needed & ~asked).any()
    assert asked.sum() <= needed.sum() + GAP * len(wanted)


def test_the_samples_of_a_block_are_few_requests() -> None:
    starts, sizes = joined(np.random.default_rng(0).permutation(256) * 4096, np.full(256, 4096))
    assert len(starts) == 4
    assert sum(sizes) == 1 << 20


def test_a_reader_asks_for_what_is_here_and_lets_be_what_is_not(
    config: Config, source: Path, files: dict[str, bytes]
) -> None:
    pack(str(source), "data", config=config)
    with Reader.open("data", config=config) as reader:
        reader.will_need(np.arange(len(files)))
        reader.will_need([])
        with pytest.raises(KeyMissingError, match="row"):
            reader.will_need([len(files)])
        shards = list(config.store.rglob("*.mdb"))
        assert shards
        for shard in shards:
            shard.unlink()
    with Reader.open("data", config=config) as reader:
        reader.will_need(np.arange(len(files)))
        assert reader.stats().failures == 0


def test_a_batch_is_read_into_the_room_that_is_given(config: Config, source: Path) -> None:
    pack(str(source), "data", config=config)
    memory = np.zeros(1 << 24, np.uint8)
    with Reader.open("data", config=config) as reader:
        batch = reader.batch([3, 1], lambda size: memory[8 : 8 + size])
        expected = reader.batch([3, 1])
        assert batch.arena.base is memory
        assert bytes(batch.data) == bytes(expected.data) == memory[8 : 8 + batch.arena.nbytes].tobytes()
        assert not memory[:8].any()
