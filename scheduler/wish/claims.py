"""Nodes that this user's submissions of the last seconds will get: Slurm does not show them as taken yet."""

from __future__ import annotations

import fcntl
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deeplink.publish import write_unsynced
from deeplink.types import NodeName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import IO

    from deeplink.clock import Clock

KEPT_S = 10.0
"""A job whose nodes are free starts within seconds (batch_sched_delay, by default 3 s)."""
LOCK_WAIT_S = 2.0
_LOOK_S = 0.02


class Claims:
    """What is claimed, while the lock is held. Without it, or where the folder takes no writes, nothing is.

    Args:
        folder: where claims are kept.
        clock: for their age.
        cluster: tells this cluster's claims from another one's.
    """

    def __init__(self, folder: Path, clock: Clock, cluster: str) -> None:
        self._path = folder / "wishes.json"
        self._clock, self._cluster = clock, cluster
        self._mine: dict[str, Any] | None = None

    def taken(self) -> frozenset[NodeName]:
        """Return the nodes that other submissions will get."""
        return frozenset(NodeName(node) for claim in self._others() for node in claim["nodes"])

    def add(self, nodes: Iterable[NodeName]) -> None:
        """Claim nodes. What cannot be written is not claimed: Slurm keeps two jobs apart anyway."""
        self._mine = {"unix": self._clock.unix(), "cluster": self._cluster, "nodes": list(nodes)}
        self._write([*self._others(), self._mine])

    def release(self) -> None:
        """Take the claim back: nothing was submitted."""
        if self._mine is not None:
            mine, self._mine = self._mine, None
            self._write([claim for claim in self._read() if claim != mine])

    def _others(self) -> list[dict[str, Any]]:
        now = self._clock.unix()
        return [
            claim
            for claim in self._read()
            if claim["cluster"] == self._cluster and 0.0 <= now - claim["unix"] < KEPT_S and claim != self._mine
        ]

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = json.loads(self._path.read_bytes())
            return [
                {"unix": float(one["unix"]), "cluster": str(one["cluster"]), "nodes": list(map(str, one["nodes"]))}
                for one in found
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def _write(self, claims: list[dict[str, Any]]) -> None:
        try:
            write_unsynced(self._path, json.dumps(claims).encode())
        except OSError:
            return


@contextmanager
def locked(folder: Path, clock: Clock) -> Iterator[bool]:
    """Hold the lock on claims; tell whether it could be had in time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "wishes.lock").open("w", encoding="utf-8")
    except OSError:
        yield False
        return
    with file:
        yield _had(file, clock)


def _had(file: IO[str], clock: Clock) -> bool:
    until = clock.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if clock.monotonic() >= until:
                return False
            clock.sleep(_LOOK_S)
        else:
            return True
