"""The cap on source load: what goes through in any span of time is bounded, and it costs no more than it must."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from deeplink.cache.source.opening import SourceCap, TokenBucket, open_source
from deeplink.core.clock import ManualClock
from tests.cache.agents import make_tar

if TYPE_CHECKING:
    from pathlib import Path

TAKEN = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500)), min_size=1, max_size=40)


@example([(0.0, 0), (0.0, 0), (0.0, 21), (0.0, 0)], 10, 1)
@example([(0.0, 21), (0.0, 0), (0.0, 0), (0.0, 0)], 10, 1)
@given(TAKEN, st.integers(10, 1000), st.integers(1, 50))
def test_no_more_than_a_seconds_worth_is_ahead(taken: list[tuple[float, int]], rate: int, requests: int) -> None:
    bucket = TokenBucket(rate, requests)
    now, used = 0.0, []
    for pause, size in taken:
        now += pause
        wait = bucket.take(now, size)
        assert wait >= 0
        now += wait
        used.append((now, size))
    for first, (start, _) in enumerate(used):
        for last in range(first, len(used)):
            span = used[last][0] - start
            # The last of them is let through before it is paid for.
            assert sum(size for _, size in used[first:last]) <= rate * (span + 1.0) + 1e-6
            assert last - first <= requests * (span + 1.0) + 1e-6


def test_no_limit_means_no_wait() -> None:
    bucket = TokenBucket(0, 0)
    assert all(bucket.take(1.0, 1 << 40) == 0 for _ in range(100))


def test_a_capped_source_reads_at_its_rate_and_counts(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(b"x" * 100)
    clock = ManualClock()
    cap = SourceCap(TokenBucket(bytes_per_s=100, requests_per_s=1000), clock)
    source = open_source(str(tmp_path), cap)
    began = clock.monotonic()
    for number in range(10):
        assert source.read(f"{number}", 100) == b"x" * 100
    assert source.read_range("0", 50, 50) == b"x" * 50
    # 950 bytes are paid for when the last is read; a second's worth was free.
    assert clock.monotonic() - began >= 8
    load = cap.load()
    assert (load.bytes, load.requests) == (1050, 11)
    assert load.waited_s > 0


def test_looking_through_a_tar_counts(tmp_path: Path) -> None:
    files = {f"{number:03d}": b"x" * 10_000 for number in range(100)}
    make_tar(tmp_path / "a.tar", files)
    cap = SourceCap(TokenBucket(bytes_per_s=0, requests_per_s=0), ManualClock())
    source = open_source(f"{tmp_path}/a.tar", cap)
    assert source.read("a/007", 10_000) == files["007"]
    assert cap.load().bytes > 5_000 * len(files)  # most of it
    found = cap.load().bytes
    assert source.read("a/008", 10_000) == files["008"]
    assert cap.load().bytes == found + 10_000
