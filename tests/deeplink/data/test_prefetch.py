"""Reading ahead by threads: in order, within its bytes, and nothing left when the pass ends, however it does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deeplink.data import Blocks, Order, Prefetcher, ResumableSampler, SamplerError
from tests.waiting import LIMIT_S


class Samples:
    """Samples of known lengths; reading waits where it is told to, and fails where it is told to."""

    version = "v"

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.blocks = Blocks(np.append(np.arange(0, len(lengths), 5), len(lengths)))
        self.begun: list[list[int]] = []
        self.asked: list[int] = []
        self.bad: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, rows: list[int]) -> list[int]:
        self.begun.append(rows)
        assert self.gate.wait(LIMIT_S)
        if self.bad in rows:
            raise OSError(f"sample {self.bad}")
        return rows

    def will_need(self, rows: np.ndarray) -> None:
        self.asked += rows.tolist()


def ahead_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("deeplink-ahead")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not ahead_threads()


def make(samples: Samples, batch_size: int = 4, **more: Any) -> tuple[ResumableSampler, Prefetcher]:
    sampler = ResumableSampler(samples, batch_size=batch_size)
    return sampler, Prefetcher(samples, sampler, **more)


@pytest.mark.parametrize("threads", [1, 4])
def test_batches_come_in_the_samplers_order(threads: int) -> None:
    samples = Samples([10] * 103)
    sampler, prefetcher = make(samples, threads=threads)
    expected = list(ResumableSampler(samples, batch_size=4))
    assert len(prefetcher) == len(expected)
    found = []
    for batch in prefetcher:
        found.append(batch)
        sampler.finished()
    assert found == expected
    assert sampler.epoch == 1


def test_no_more_bytes_are_ahead_than_allowed_the_one_in_use_counted_in() -> None:
    samples = Samples([10] * 200)
    _, prefetcher = make(samples, ahead_bytes=200)  # five batches of four
    taken = 0
    for _ in prefetcher:
        taken += 1
        assert len(samples.begun) <= taken + 4
    assert taken == 50


def test_a_batch_over_the_budget_is_read_alone_and_empty_samples_do_not_fill_the_memory() -> None:
    samples = Samples([1000] * 12)
    _, prefetcher = make(samples, ahead_bytes=1)
    for taken, _ in enumerate(prefetcher, start=1):
        assert len(samples.begun) == taken
    empty = Samples([0] * 4000)
    _, prefetcher = make(empty)
    passing = iter(prefetcher)
    next(passing)
    assert len(empty.begun) <= 65
    del passing


def test_an_error_comes_where_its_batch_would_have() -> None:
    samples = Samples([1] * 40)
    sampler = ResumableSampler(samples, batch_size=4, shuffle=False)
    samples.bad = 22
    found = []
    with pytest.raises(OSError, match="sample 22"):
        for batch in Prefetcher(samples, sampler):
            found.append(batch)  # noqa: PERF402 - what came before the error counts
    assert found == [[4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in range(5)]


def test_an_error_of_the_sampler_comes_after_the_batches_before_it() -> None:
    samples = Samples([1] * 40)
    sampler = ResumableSampler(samples, batch_size=4)
    passing = iter(Prefetcher(samples, sampler, ahead_bytes=8))
    found = [next(passing), next(passing)]
    iter(sampler)  # a second pass: the first may not go on
    with pytest.raises(SamplerError, match="earlier pass"):
        found.extend(passing)
    assert 2 < len(found) < 10


def test_breaking_off_ends_the_threads_and_begins_no_more_reads() -> None:
    samples = Samples([1] * 4000)
    _, prefetcher = make(samples, ahead_bytes=40)
    for _ in prefetcher:
        break
    assert len(samples.begun) <= 10
    assert not ahead_threads()


def test_an_interrupt_in_the_loop_ends_the_threads() -> None:
    samples = Samples([1] * 400)
    _, prefetcher = make(samples)

    def loop() -> None:
        for _ in prefetcher:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert not ahead_threads()


def test_reads_that_wait_are_bounded_and_done_at_once() -> None:
    samples = Samples([1] * 4000)
    samples.gate.clear()
    _, prefetcher = make(samples, threads=3)
    opener = threading.Timer(0.05, samples.gate.set)
    opener.start()
    passing = iter(prefetcher)
    next(passing)
    opener.join()
    del passing
    assert len(samples.begun) >= 3


def test_batches_are_collated_in_the_threads() -> None:
    samples = Samples([1] * 10)
    where = set()

    def collate(rows: list[int]) -> int:
        where.add(threading.current_thread().name)
        return len(rows)

    assert sum(make(samples, collate=collate)[1]) == 10
    assert all(name.startswith("deeplink-ahead") for name in where)


def test_disks_are_asked_for_the_next_window_while_one_is_used() -> None:
    samples = Samples([1] * 500)
    sampler = ResumableSampler(samples, batch_size=4, shuffle=Order.BLOCKS, window=10)
    seen = [row for batch in Prefetcher(samples, sampler) for row in batch]
    assert sorted(seen) == list(range(500))
    assert len(samples.asked) == len(set(samples.asked))
    assert set(samples.asked) <= set(seen[50:])
    assert len(samples.asked) > 350


LEFT_OPEN = """
import os
import numpy as np
from deeplink.data import Prefetcher, ResumableSampler

class Samples:
    version, lengths = "v", np.ones(400, int)
    def __len__(self): return 400
    def __getitems__(self, rows):
        os.write(1, b"read\\n")
        if len(rows) and first: first.pop()
        else: gate.wait(0.2)
        return rows

import threading
gate, first = threading.Event(), [1]
samples = Samples()
passing = iter(Prefetcher(samples, ResumableSampler(samples, batch_size=4), threads=1))
next(passing)
raise SystemExit(3)
"""


def test_a_program_that_ends_in_the_middle_of_a_pass_does_not_read_on() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 3, done.stderr
    assert 1 <= done.stdout.count(b"read") <= 4  # 64 were asked for
    assert not done.stderr


def test_impossible_numbers_are_refused() -> None:
    for more in ({"threads": 0}, {"ahead_bytes": 0}):
        with pytest.raises(ValueError, match="threads"):
            make(Samples([1] * 8), **more)
