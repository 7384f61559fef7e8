"""When samples come from the small files because these are faster; measured on a clock that the test moves."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.packer import pack
from deeplink.cache.read.fallback import RawComparison
from deeplink.cache.read.local import LocalReader
from deeplink.cache.reader import Reader
from deeplink.cache.source.opening import holds_many
from deeplink.core.clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from deeplink.cache.read.batch import Batch
    from deeplink.core.config import Config


def compared(comparison: RawComparison, clock: ManualClock, ours_s: float, raw_s: float) -> str:
    """Read 256 samples that take so long each, and as many at the source."""
    clock.sleep(20.0)
    assert comparison.is_due(256, 256 * ours_s)
    return comparison.compared(raw_s)


def test_three_comparisons_in_a_row_are_needed() -> None:
    clock = ManualClock()
    comparison = RawComparison(clock, allowed=True)
    assert not compared(comparison, clock, 0.008, 0.001)
    assert not compared(comparison, clock, 0.008, 0.001)
    assert not compared(comparison, clock, 0.008, 0.006)  # not so much faster: it begins again
    assert not compared(comparison, clock, 0.008, 0.001)
    assert not compared(comparison, clock, 0.008, 0.001)
    assert not comparison.is_aside()
    assert compared(comparison, clock, 0.008, 0.001) == "8.0 ms a sample where its small files take 1.0 ms"
    assert comparison.is_aside()
    comparison.end_aside()
    assert not comparison.is_aside()
    assert [bool(compared(comparison, clock, 0.008, 0.001)) for _ in range(3)] == [False, False, True]
    clock.sleep(599.0)
    assert comparison.is_aside()
    clock.sleep(2.0)
    assert not comparison.is_aside()


def test_the_source_is_left_alone_where_reading_is_fast_or_was_compared_just_now() -> None:
    clock = ManualClock()
    comparison = RawComparison(clock, allowed=True)
    assert not comparison.is_due(10_000, 1.0)
    assert not comparison.is_due(100, 1.0)
    assert comparison.is_due(200, 1.0)
    comparison.compared(1.0)
    assert not comparison.is_due(300, 3.0)
    clock.sleep(10.0)
    assert comparison.is_due(300, 3.0)
    forbidden = RawComparison(clock, allowed=False)
    assert not forbidden.is_due(300, 300.0)


@pytest.fixture
def slow(source: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """A store on which each sample takes 10 ms."""
    clock = ManualClock()
    fill = LocalReader.fill

    def slowly(self: LocalReader, rows: np.ndarray, batch: Batch) -> np.ndarray:
        clock.sleep(0.01 * len(rows))
        return fill(self, rows, batch)

    monkeypatch.setattr(LocalReader, "fill", slowly)
    pack(str(source), "digits", config=config)
    return clock


def read_all(reader: Reader, files: dict[str, bytes], passes: int) -> None:
    keys = list(reader.index.keys())
    for _ in range(passes):
        found = reader.batch(range(len(files))).views()
        assert [bytes(one) for one in found] == [files[key] for key in keys]


def test_a_reader_whose_store_is_slower_says_so_once_and_reads_the_files(
    slow: ManualClock, config: Config, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader("digits", Catalog(config.catalog).open("digits"), config, slow)
    with reader, caplog.at_level(logging.WARNING):
        passes = 0
        while not reader.stats().source_samples:
            read_all(reader, files, 8)
            slow.sleep(10.0)
            passes += 8
            assert passes < 1000
        local = reader.stats().local_samples
        # Each comparison read some of the files; they are neither what was served, nor unseen.
        assert reader.stats().compared_samples >= 3 * min(64, len(files))
        assert reader.stats().compared_bytes > 0
        assert local + reader.stats().source_samples == passes * len(files)
        read_all(reader, files, 2)
        assert reader.stats().local_samples == local
        assert reader.stats().source_samples >= 2 * len(files)
        slow.sleep(601.0)
        read_all(reader, files, 1)
        assert reader.stats().local_samples == local + len(files)
    said = [record.getMessage() for record in caplog.records if "small files take" in record.getMessage()]
    assert len(said) == 1
    assert "step_aside" in said[0]


def test_the_switch_forbids_it(slow: ManualClock, config: Config, files: dict[str, bytes]) -> None:
    forbidden = dataclasses.replace(config, step_aside=False)
    with Reader("digits", Catalog(config.catalog).open("digits"), forbidden, slow) as reader:
        for _ in range(60):
            read_all(reader, files, 4)
            slow.sleep(10.0)
        assert reader.stats().source_samples == reader.stats().compared_samples == 0


@pytest.mark.parametrize(
    ("url", "holds"),
    [("/data/x", False), ("s3://b/x", False), ("/data/x-{0..9}.tar", True), ("x.parquet#key=k", True)],
)
def test_files_that_hold_many_samples_are_not_read_to_compare(url: str, holds: bool) -> None:
    assert holds_many(url) == holds


def test_a_source_that_is_gone_is_no_way_aside(
    slow: ManualClock, source: Path, config: Config, files: dict[str, bytes]
) -> None:
    source.rename(source.with_name("moved"))
    with Reader("digits", Catalog(config.catalog).open("digits"), config, slow) as reader:
        for _ in range(60):
            read_all(reader, files, 4)
            slow.sleep(10.0)
        assert reader.stats().local_samples == 240 * len(files)
