"""Counts where reads were served from, and how long remote ones were waited for."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass

from deeplink import process_metrics

log = logging.getLogger(__name__)

_STALL_S = 0.5
"""What a batch from other nodes never takes when all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStats:
    """How reads were served by this process since it opened the reader.

    Attributes:
        local_samples, local_bytes: from this node's store.
        peer_samples, peer_bytes: from other members.
        source_samples, source_bytes: from the source, or the packed home.
        failures: tries that failed: a damaged shard, a silent member, wrong bytes.
        healed: samples that a try failed for and that were served all the same.
        requests: batches asked of other members, second requests not among them.
        second_requests: asked of another member because the first had not begun to answer in its usual time.
        overtaken: requests given up because second ones had brought everything.
        busy: requests that a member refused because it had too much to do; others served them, or it did later.
        stalls: batches that waited longer than half a second for what is not on this node.
        longest_wait_s: the longest of such waits, seconds, a stall or not.
    """

    local_samples: int = 0
    local_bytes: int = 0
    peer_samples: int = 0
    peer_bytes: int = 0
    source_samples: int = 0
    source_bytes: int = 0
    failures: int = 0
    healed: int = 0
    requests: int = 0
    second_requests: int = 0
    overtaken: int = 0
    busy: int = 0
    stalls: int = 0
    longest_wait_s: float = 0.0


class ReadTotals:
    """The counts of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._longest_wait_s = 0.0
        process_metrics.of_process.count_in(self)

    def count(self, **counts: int) -> None:
        """Add to fields of `ReadStats`."""
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number

    def waited(self, seconds: float, samples: int) -> None:
        """Note that so many samples from elsewhere took so long."""
        is_stall = seconds > _STALL_S
        if is_stall:
            log.warning("%d samples that are not on this node took %.1f s", samples, seconds)
        with self._lock:
            self._longest_wait_s = max(self._longest_wait_s, seconds)
            self._counts["stalls"] += is_stall

    def stats(self) -> ReadStats:
        """Return what was counted so far."""
        with self._lock:
            return ReadStats(**self._counts, longest_wait_s=self._longest_wait_s)

    def vitals(self) -> dict[str, float]:
        """Return how many samples came from where, for the reports of training; nothing before the first."""
        found = self.stats()
        counts = {
            process_metrics.LOCAL_SAMPLES: found.local_samples,
            process_metrics.PEER_SAMPLES: found.peer_samples,
            process_metrics.SOURCE_SAMPLES: found.source_samples,
        }
        return {name: float(count) for name, count in counts.items()} if any(counts.values()) else {}
