from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format.names import Names
from deeplink.cache.pack.plan import MOST_SAMPLES, SHARDS_PER_MEMBER, cut, make_plan, shard_size
from deeplink.cache.source.source import Listing

DIGEST = "a089947c4ce14f0331e349a45601087ecf49ca34"


def listing(sizes: list[int], mark: int = 1) -> Listing:
    keys = Names.of(f"{i:06d}" for i in range(len(sizes)))
    return Listing(keys, np.array(sizes, np.int64), np.full(len(sizes), mark, np.uint64), marked=True)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=80), st.integers(1, 1000))
def test_every_row_is_in_one_shard_and_no_shard_is_larger_than_asked(sizes: list[int], shard_bytes: int) -> None:
    shards = make_plan("/data", listing(sizes), shard_bytes).shards
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(len(sizes)))
    for shard in shards:
        assert shard.payload == sum(sizes[shard.rows])
        assert shard.payload <= shard_bytes or len([size for size in sizes[shard.rows] if size]) == 1


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30), st.integers(0, 500))
def test_members_get_four_to_eight_shards_each_where_there_is_enough(total: int, most: int, members: int) -> None:
    size = shard_size(total, most, members)
    assert size == most or (size < most and size.bit_count() == 1 and size >= 1 << 16 and members > 1)
    if 1 << 16 < size < most:
        assert SHARDS_PER_MEMBER * members * size <= total < 2 * SHARDS_PER_MEMBER * members * size + (1 << 20)
    assert shard_size(total, most, members + 1) <= size


def test_the_digest_follows_from_everything_that_shapes_shards() -> None:
    same = make_plan("/data", listing([1, 2]), 10).digest
    assert same == make_plan("/data", listing([1, 2]), 10).digest
    others = [
        make_plan("/other", listing([1, 2]), 10),
        make_plan("/data", listing([2, 1]), 10),
        make_plan("/data", listing([1, 2], mark=2), 10),
        make_plan("/data", listing([1, 2]), 11),
    ]
    assert same not in {other.digest for other in others}


def test_shards_of_very_many_empty_files_are_bounded_too() -> None:
    ends = np.zeros(3 * MOST_SAMPLES - 1, np.int64)
    shards = list(cut(ends, 0, len(ends), 100))
    assert [shard.stop - shard.start for shard in shards] == [MOST_SAMPLES, MOST_SAMPLES, MOST_SAMPLES - 1]


def test_files_of_many_gib_have_a_shard_each() -> None:
    shards = make_plan("/data", listing([5 << 30, 1, 6 << 30]), 256 << 20).shards
    assert [shard.payload for shard in shards] == [5 << 30, 1, 6 << 30]


def test_the_digest_is_that_of_earlier_releases() -> None:
    # Else every source would be packed again by a new release.
    assert make_plan("/data", listing([1, 2]), 10).digest == DIGEST
