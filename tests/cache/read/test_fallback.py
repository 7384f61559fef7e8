from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import SampleUnavailableError
from deeplink.cache.packer import pack
from deeplink.cache.read.batch import Batch
from deeplink.cache.read.fallback import Fallback
from deeplink.cache.reader import Reader
from deeplink.cache.source.opening import SourceCap, TokenBucket
from deeplink.cache.store.store import Store
from deeplink.core.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def index(source: Path, config: Config, home: Path) -> Index:
    """The index of a dataset that lies in a packed home, and in the store of no node."""
    pack(str(source), "digits", config=config, home=str(home))
    store = Store(config.store)
    for shard in store.ids():
        store.remove(shard)
    return Catalog(config.catalog).open("digits")


def fallback(index: Index) -> Fallback:
    return Fallback(index, SourceCap(TokenBucket(0, 0), SystemClock()))


def filled(index: Index, rows: list[int]) -> tuple[Batch, dict[int, list[str]]]:
    wanted = np.array(rows)
    batch = Batch.empty(index.lengths[wanted])
    done = fallback(index).fill(wanted, np.arange(len(rows)), batch)
    assert done.counts.get("home_samples", 0) + done.counts.get("source_samples", 0) + len(done.problems) == len(
        rows
    )
    return batch, done.problems


@pytest.mark.parametrize("gone", ["source", "home"])
def test_one_of_source_and_home_is_enough(
    index: Index, source: Path, home: Path, files: dict[str, bytes], gone: str
) -> None:
    (source if gone == "source" else home).rename(source.with_name("moved"))
    batch, problems = filled(index, [5, 3, 5, *range(60)])
    assert not problems
    assert [bytes(sample) for sample in batch] == [files[index.key(row)] for row in [5, 3, 5, *range(60)]]


def test_a_damaged_home_is_passed_over(index: Index, home: Path, files: dict[str, bytes]) -> None:
    for path in home.glob("*.mdb"):
        path.write_bytes(path.read_bytes().replace(b"\0", b"\1"))
    batch, problems = filled(index, list(range(60)))
    assert not problems
    assert [bytes(sample) for sample in batch] == [files[index.key(row)] for row in range(60)]


def test_one_lost_file_does_not_lose_the_others(
    index: Index, source: Path, home: Path, files: dict[str, bytes]
) -> None:
    home.rename(source.with_name("moved"))
    lost = next(row for row in range(60) if files[index.key(row)])
    (source / index.key(lost)).unlink()
    batch, problems = filled(index, list(range(60)))
    assert list(problems) == [lost]
    assert any("No such file" in text for text in problems[lost])
    for row in set(range(60)) - {lost}:
        assert batch[row] == files[index.key(row)]


def test_a_reader_counts_what_came_so_and_says_what_it_tried(
    index: Index, source: Path, home: Path, config: Config
) -> None:
    with Reader.open("digits", config=config) as reader:
        assert len(reader.read(range(60))) == 60
        stats = reader.stats()
        assert (stats.home_samples, stats.source_samples, stats.local_samples) == (60, 0, 0)
        assert stats.home_bytes == int(index.lengths.sum())
        assert stats.longest_wait_s > 0
        home.rename(source.with_name("moved"))
        source.rename(source.with_name("moved too"))
        with pytest.raises(SampleUnavailableError) as refused:
            reader.read([7])
        assert len(refused.value.tried) == 2
