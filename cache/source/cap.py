"""A cap on what is read from sources: bytes and requests per second, over all threads of a process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.source.source import EVERYTHING, Source
from deeplink.core import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.source.selection import Selection
    from deeplink.cache.source.source import Listing
    from deeplink.core.clock import Clock
    from deeplink.core.config import Config

_BURST_S = 1.0


@dataclass(slots=True)
class TokenBucket:
    """Two rates, 0 for no limit; `take` says how long to wait. State only: time is passed in.

    Taking comes before waiting: later callers queue behind earlier ones, and a request that is larger than a
    second's worth is let through and paid for afterwards.
    """

    bytes_per_s: float
    requests_per_s: float
    _bytes_free_at: float = float("-inf")
    _requests_free_at: float = float("-inf")

    def take(self, now: float, size: int, requests: int = 1) -> float:
        """Take so much; return the seconds to wait before it is used."""
        wait = 0.0
        if self.bytes_per_s:
            wait = max(wait, self._bytes_free_at - now)
        if self.requests_per_s:
            wait = max(wait, self._requests_free_at - now)
        # Each is counted from when it is used: waiting for one rate saves up nothing of the other.
        saved_from = now + wait - _BURST_S
        if self.bytes_per_s:
            self._bytes_free_at = max(self._bytes_free_at, saved_from) + size / self.bytes_per_s
        if self.requests_per_s:
            self._requests_free_at = max(self._requests_free_at, saved_from) + requests / self.requests_per_s
        return wait


@dataclass(frozen=True, slots=True)
class SourceLoad:
    """What was read from sources since the process started."""

    bytes: int
    requests: int
    waited_s: float  # that the cap cost


class SourceCap:
    """The cap of a process, and the count of what went through it. Safe to use from several threads."""

    def __init__(self, bucket: TokenBucket, clock: Clock, wait: Callable[[float], object] | None = None) -> None:
        self._bucket, self._clock = bucket, clock
        self._wait = wait or clock.sleep
        self._lock = threading.Lock()
        self._load = SourceLoad(0, 0, 0.0)

    def spend(self, size: int, requests: int = 1) -> None:
        """Return when so much may be read."""
        with self._lock:
            delay = self._bucket.take(self._clock.monotonic(), size, requests)
            load = self._load
            self._load = SourceLoad(load.bytes + size, load.requests + requests, load.waited_s + max(delay, 0.0))
        metrics.SOURCE_BYTES.inc(size)
        metrics.SOURCE_REQUESTS.inc(requests)
        if delay > 0:
            metrics.SOURCE_WAIT_SECONDS.inc(delay)
            self._wait(delay)

    def load(self) -> SourceLoad:
        """Return what was read so far."""
        with self._lock:
            return self._load


def source_cap(config: Config, clock: Clock) -> SourceCap:
    """Return the configured cap."""
    return SourceCap(TokenBucket(config.source_bytes_per_s, config.source_requests_per_s), clock)


class CappedSource(Source):
    """A source whose reads keep to a cap."""

    def __init__(self, source: Source, cap: SourceCap) -> None:
        self._source, self._cap = source, cap
        self.url, self.local, self.batched = source.url, source.local, source.batched

    @override
    def check(self) -> None:
        self._cap.spend(0)
        self._source.check()

    @override
    def listing(self, wanted: Selection = EVERYTHING) -> Listing:
        self._cap.spend(0)
        return self._source.listing(wanted)

    @override
    def stat(self, key: str) -> tuple[int, int]:
        self._cap.spend(0)
        return self._source.stat(key)

    @override
    def read(self, key: str, size: int) -> bytes:
        self._cap.spend(size)
        return self._source.read(key, size)

    @override
    def read_range(self, key: str, start: int, length: int) -> bytes:
        self._cap.spend(length)
        return self._source.read_range(key, start, length)

    @override
    def read_many(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        if not self.batched:
            return super().read_many(names, sizes)
        self._cap.spend(sum(sizes), requests=len(names))
        return self._source.read_many(names, sizes)
