"""What a job left in its folder: events, its launcher's journal, decisions. Bounded reads; nothing is guessed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.placement.hint import decision as record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deeplink.scheduler.placement.hint.decision import Recorded
    from deeplink.scheduler.recovery.records import Incident, JobRecord, NodeRecord, ProgressPoint

NOTES = "notes.jsonl"
EVENTS = "events.jsonl"
JOURNAL = "journal.sqlite"
TAIL_BYTES = 512 << 10
"""So much of the events is read, from the end."""
RECENT_S = 120.0
MOST_POINTS = 20_000
MOST_INCIDENTS = 20
_MOST_UNIX = 253_402_300_800  # the end of the year 9999
Event = dict[str, Any]


def note(folder: Path, event: str, unix: float, **facts: object) -> None:
    """Add a note in the form of an event to a job's folder; a job without one gets none."""
    line = f"{json.dumps({'event': event, 'unix': unix, **facts}, separators=(',', ':'))}\n".encode()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with suppress(FileNotFoundError), opened(folder / NOTES, flags) as notes:
        os.write(notes, line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a job's folder holds."""

    folder: Path
    record: JobRecord | None = None  # what its launcher told of its attempts; None where there is no journal yet
    points: tuple[ProgressPoint, ...] = ()  # rank 0's newest reports, in order
    nodes: tuple[NodeRecord, ...] = ()  # the nodes as its launcher last saw them
    incidents: tuple[Incident, ...] = ()  # the newest first
    events: tuple[Event, ...] = ()  # the newest ones, in order
    decision: Recorded | None = None  # the newest one about where it should run; None where none was made
    problems: tuple[str, ...] = ()  # what could not be read, and why

    @property
    def empty(self) -> bool:
        """Whether DeepLink knows nothing of the job."""
        return self.record is None and not self.events and self.decision is None

    def last(self, *names: str) -> Event | None:
        """Return the newest event of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)


def ranks_of(event: Event | None) -> dict[str, range]:
    """Return which ranks each node of an attempt runs, by the event of its start; none where it does not tell."""
    nodes, each = (event or {}).get("nodes"), (event or {}).get("ranks")
    if not isinstance(nodes, list) or not isinstance(each, list) or len(nodes) != len(each):
        return {}
    found, first = {}, 0
    for node, count in zip(nodes, each, strict=True):
        if not isinstance(count, int) or count < 1:
            return {}
        found[str(node)] = range(first, first + count)
        first += count
    return found


def folders(state: Path) -> dict[int, Path]:
    """Return the folders of all jobs that left one, by job id; none where the state folder cannot be read."""
    try:
        return {
            int(path.name): path for path in (state / "jobs").iterdir() if path.name.isdigit() and path.is_dir()
        }
    except OSError:
        return {}


def read_folder(folder: Path, job: int, *, of_array: Path | None = None) -> Left:
    """Return what a job left; an empty answer where it left nothing."""
    problems: list[str] = []
    found: dict[str, Any] = {}
    try:
        found["events"] = read_events(folder)
    except OSError as problem:
        problems.append(f"{folder / EVENTS}: {problem.strerror}")
    for place in (folder, of_array):
        try:
            decisions = record.read(place) if place else []
        except OSError as problem:
            problems.append(f"{folder / record.NAME}: {problem.strerror}")
            continue
        if decisions and not found.get("decision"):
            found["decision"] = decisions[-1]
    try:
        found |= _journal(folder / JOURNAL, job)
    except JournalMissingError:
        pass
    except (DeepLinkError, OSError, ValueError) as problem:
        problems.append(str(problem))
    return Left(folder=folder, problems=tuple(problems), **found)


def _journal(path: Path, job: int) -> Mapping[str, Any]:
    with Journal(path, read_only=True) as journal:
        known = journal.job(job)
        points: tuple[ProgressPoint, ...] = ()
        if known is not None:
            newest = max((attempt.last_step_unix for attempt in known.attempts), default=0.0)
            if newest:
                points = journal.points(job, after_unix=newest - RECENT_S, limit=MOST_POINTS)
        return {
            "record": known,
            "points": tuple(point for point in points if point.rank == 0),
            "nodes": journal.nodes(),
            "incidents": journal.incidents(job=job, limit=MOST_INCIDENTS),
        }


def read_events(folder: Path) -> tuple[Event, ...]:
    """Return the newest events of a job, its user's notes among them, in order; none where it left none."""
    return tuple(in_order([*_end_of(folder / EVENTS), *_end_of(folder / NOTES)]))


def in_order(lines: Iterable[bytes]) -> list[Event]:
    """Return the events of lines from several files, the oldest first."""
    found = (parsed(line) for line in lines)
    return sorted((event for event in found if event is not None), key=lambda event: float(event["unix"]))


def _end_of(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).split(b"\n")
    except FileNotFoundError:
        return []


def parsed(line: bytes) -> Event | None:
    """Return the event of a line; None for half a line, or something else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if (
        isinstance(event, dict)
        and isinstance(event.get("event"), str)
        and isinstance(event.get("unix"), int | float)
        and 0 <= event["unix"] < _MOST_UNIX
    ):
        return event
    return None
