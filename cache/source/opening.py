"""Opens the source that a path or a URL names: a folder, fsspec's URL, or files that hold many samples each."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.source.containers import SUFFIX, ContainerSource, TarContainer
from deeplink.cache.source.local_source import LocalSource
from deeplink.cache.source.source import EVERYTHING, ITERABLE, Source
from deeplink.core import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.cache.source.containers import ContainerFile
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


_COMPRESSED = re.compile(r".*\.(tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2|txz)")
TABLES = re.compile(r"(?P<files>.*(?P<suffix>\.parquet|\.arrow|\.feather))(?:#(?P<settings>.*))?")
_ANY = re.compile(r"[*?\[{]")


def open_source(url: str, cap: SourceCap | None = None) -> Source:
    """Return the source a local path or a URL names; nothing is read yet.

    Args:
        url: a folder, fsspec's URL, or files that hold many samples each.
        cap: counts and bounds all that is read from storage, also what only finds the samples in larger files.

    Raises:
        SourceError: no source can be meant by it.
    """
    if url == ITERABLE:
        from deeplink.cache.source.spool import spent  # noqa: PLC0415 - as below

        raise spent()
    if url in {"", "file://"}:  # a variable of a script that is not set: not the current folder
        raise SourceError(url, "no source is named")
    if "::" in url:
        return _remote(url, cap)
    path = url.removeprefix("file://")
    if "://" not in path and Path(path).is_dir():
        return _capped(LocalSource(path), cap)
    if _COMPRESSED.fullmatch(url):
        raise SourceError(
            url,
            "the files of a compressed tar cannot be read one by one",
            "Decompress it (gunzip, unzstd ...), and name the .tar.",
        )
    if url.endswith(SUFFIX):
        return _container_source(path, path, SUFFIX, TarContainer, cap)
    if table := TABLES.fullmatch(path):
        from deeplink.cache.source.tables import TableColumns, TableContainer  # noqa: PLC0415 - as below

        columns = TableColumns.parsed(path, table["settings"] or "")
        opened = partial(TableContainer, wanted=columns)
        return _container_source(path, table["files"], table["suffix"], opened, cap)
    return _capped(LocalSource(path), cap) if "://" not in path else _remote(path, cap)


def holds_many(url: str) -> bool:
    """Tell whether a sample of this source lies in a file with others: its file may have to be looked through."""
    return "::" in url or url.endswith(SUFFIX) or TABLES.fullmatch(url) is not None


def _capped(source: Source, cap: SourceCap | None) -> Source:
    return source if cap is None else CappedSource(source, cap)


def _remote(url: str, cap: SourceCap | None) -> Source:
    from deeplink.cache.source.remote import RemoteSource  # noqa: PLC0415 - fsspec: no agent needs it to start

    return _capped(RemoteSource(url), cap)


def _container_source(
    url: str,
    files: str,
    suffix: str,
    opened: Callable[[Source, str, int], ContainerFile],
    cap: SourceCap | None,
) -> ContainerSource:
    if "**" in files or re.search(r"\{[^}]*/", files):
        raise SourceError(
            url, "its files must lie equally deep: no ** and no slash in braces", "Name them by * and {}."
        )
    is_local = "://" not in files
    parts = (os.path.abspath(files) if is_local else files).split("/")  # noqa: PTH100 - keeps links and globs as they are
    # A URL's scheme and host are never a pattern; the last part is the file's own name.
    first = 1 if is_local else 3
    plain = next((at for at, part in enumerate(parts) if at >= first and _ANY.search(part)), len(parts) - 1)
    root = "/".join(parts[: min(plain, len(parts) - 1)])
    source = _capped(LocalSource(root or "/"), cap) if is_local else _remote(root, cap)
    shown = "/".join(parts) + url.removeprefix(files)
    return ContainerSource(shown, source, "/".join(parts[len(root.split("/")) :]), suffix, opened)
