from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format.names import Names
from deeplink.cache.pack.plan import Appended, Packed, append, make_plan
from deeplink.cache.source.source import Listing

FILES = st.dictionaries(st.text("abc/", min_size=1, max_size=4), st.integers(0, 50), min_size=1, max_size=30)


def listing(files: dict[str, int], *, marked: bool = True) -> Listing:
    keys = sorted(files, key=str.encode)
    sizes = np.array([files[key] for key in keys], np.int64)
    return Listing(Names.of(keys), sizes, sizes.astype(np.uint64) + np.uint64(1), marked=marked)


def packed(files: dict[str, int], shard_bytes: int) -> Packed:
    was = listing(files)
    shards = make_plan("/data", was, shard_bytes).shards
    return Packed(was.keys, was.sizes, was.marks, [shard.stop - shard.start for shard in shards])


def shards_of(names: Names, counts: list[int]) -> list[tuple[str, ...]]:
    ends = np.cumsum([0, *counts]).tolist()
    return [tuple(names[start:stop]) for start, stop in itertools.pairwise(ends)]


def appended(before: dict[str, int], after: dict[str, int], shard_bytes: int) -> Appended:
    return append("base", listing(after), packed(before, shard_bytes), shard_bytes)


@given(FILES, FILES, st.sets(st.text("abc/", min_size=1, max_size=4)), st.integers(1, 100))
def test_every_file_is_in_one_shard_and_what_stays_is_what_was(
    before: dict[str, int], new: dict[str, int], gone: set[str], shard_bytes: int
) -> None:
    after = {key: size for key, size in (before | new).items() if key not in gone} or new
    now, old = listing(after), packed(before, shard_bytes)
    found = append("base", now, old, shard_bytes)
    shards = found.plan.shards
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(len(after)))
    assert all(shard.payload == int(now.sizes[shard.rows].sum()) for shard in shards)
    were = shards_of(old.keys, list(old.counts))
    for number, was in found.kept.items():
        assert tuple(now.keys[shards[number].rows]) == were[was]
        assert [after[key] for key in were[was]] == [before[key] for key in were[was]]
    for number, shard in enumerate(shards):
        assert number in found.kept or shard.payload <= shard_bytes or len(now.sizes[shard.rows].nonzero()[0]) == 1


@given(FILES, st.integers(1, 100))
def test_nothing_changed_means_nothing_to_pack(files: dict[str, int], shard_bytes: int) -> None:
    found = appended(files, files, shard_bytes)
    assert list(found.kept) == list(range(len(found.plan.shards)))
    assert found.plan.digest == appended(files, files, shard_bytes).plan.digest


def test_only_shards_that_are_touched_are_packed_anew() -> None:
    before = {f"{name}{i}": 10 for name in "bdf" for i in range(4)}  # three shards
    assert appended(before, before | {"g": 1}, 40).kept == {0: 0, 1: 1, 2: 2}  # behind the last
    assert appended(before, before | {"a": 1}, 40).kept == {1: 0, 2: 1, 3: 2}  # before the first
    assert appended(before, before | {"c": 1}, 40).kept == {0: 0, 2: 1, 3: 2}  # between two
    assert appended(before, before | {"d2": 11}, 40).kept == {0: 0, 3: 2}  # one is larger: two shards for one
    assert appended(before, {key: size for key, size in before.items() if key != "d2"}, 40).kept == {0: 0, 2: 2}
    assert appended(before, {key: 10 for key in before if key[0] != "d"}, 40).kept == {0: 0, 1: 2}
    joined = appended(before, before | {"b2": 9, "c": 1}, 40)  # a new file joins a neighbour that is packed anyway
    assert (joined.kept, len(joined.plan.shards)) == ({1: 1, 2: 2}, 3)


def test_without_marks_every_file_counts_as_changed() -> None:
    files = {"a": 1, "b": 2}
    old = packed(files, 10)
    assert not append("base", listing(files, marked=False), old, 10).kept
    assert not append("base", listing(files), Packed(old.keys, old.sizes, None, old.counts), 10).kept
