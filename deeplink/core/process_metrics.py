"""Counters of this process that go with each progress report: bytes read, saves.

Code that has such numbers offers them here, and pays nothing until `numbers` asks. Names begin with `deeplink_`,
so that no curve takes them for a metric of the user's.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "deeplink_"
LOCAL_SAMPLES = "deeplink_local_samples"
PEER_SAMPLES = "deeplink_peer_samples"
HOME_SAMPLES = "deeplink_home_samples"
SOURCE_SAMPLES = "deeplink_source_samples"
"""Samples read since the process began: from this node's store, other nodes, the packed home, the source."""
CHECKPOINT_STEP = "deeplink_checkpoint_step"
CHECKPOINT_UNIX = "deeplink_checkpoint_unix"
"""Step and time of the last checkpoint that is whole."""
CHECKPOINT_EVERY = "deeplink_checkpoint_every"
"""Steps between the last two."""


class Countable(Protocol):
    """Something that counts."""

    def vitals(self) -> Mapping[str, float]:
        """Return its numbers now; quick, from any thread."""
        ...


class Vitals:
    """The numbers of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: weakref.WeakSet[Countable] = weakref.WeakSet()
        self._noted: dict[str, float] = {}

    def count_in(self, source: Countable) -> None:
        """Ask this one, too, for as long as it lives; what several count under one name is added up."""
        with self._lock:
            self._sources.add(source)

    def note(self, **numbers: float) -> None:
        """Keep the newest value of these numbers."""
        with self._lock:
            self._noted.update(numbers)

    def numbers(self) -> dict[str, float]:
        """Return all there are now."""
        with self._lock:
            sources, found = list(self._sources), dict(self._noted)
        for source in sources:
            for name, number in source.vitals().items():
                found[name] = found.get(name, 0) + number
        return found


of_process = Vitals()
