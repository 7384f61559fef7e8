"""Following a job from outside: the events its launcher writes, and the progress its journal keeps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.watch.journal import Journal, JournalError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deeplink.scheduler.watch.records import ProgressPoint

Event = dict[str, Any]


@dataclass(slots=True)
class JobFolderReader:
    """Reads what a job's state folder says, as it grows.

    Args:
        folder: `<Config.state>/jobs/<job id>`.
    """

    folder: Path
    events: list[Event] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> list[Event]:
        """Return the events that were written since the last call; also kept in `events`."""
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be being written
        self._offset += len(whole)
        fresh = [json.loads(line) for line in whole.splitlines()]
        self.events += fresh
        return fresh

    def newest_point(self) -> ProgressPoint | None:
        """Return the newest report of the training loop; None before the first."""
        try:
            with Journal(self.folder / "journal.sqlite", read_only=True) as journal:
                points = journal.points(int(self.folder.name))
        except JournalError:
            return None
        return max(points, key=lambda point: (point.attempt, point.step), default=None)

    def named(self, name: str) -> list[Event]:
        """Return the events of one name, oldest first."""
        return [event for event in self.events if event["event"] == name]


def share_of(placed: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Return how many shards each node holds, by node name.

    >>> share_of({"a": ("n0", "n1"), "b": ("n1",)})
    {'n0': 1, 'n1': 2}
    """
    held: dict[str, int] = {}
    for nodes in placed.values():
        for node in nodes:
            held[node] = held.get(node, 0) + 1
    return dict(sorted(held.items()))
