"""What a job left: events, its launcher's journal, decisions, output. Bounded reads; nothing is guessed."""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.placement.hint import decision as record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from deeplink.scheduler.placement.hint.decision import Recorded
    from deeplink.scheduler.recovery.records import (
        Incident,
        JobRecord,
        NodeRecord,
        ProgressPoint,
        RankTimes,
    )
    from deeplink.scheduler.slurm.parse import JobRow

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
    rank_times: tuple[RankTimes, ...] = ()  # the newest ones
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
        times: tuple[RankTimes, ...] = ()
        if known is not None:
            newest = max((attempt.last_step_unix for attempt in known.attempts), default=0.0)
            if newest:
                times = journal.rank_times(job, after_unix=newest - RECENT_S)
                points = journal.points(job, after_unix=newest - RECENT_S, limit=MOST_POINTS)
        return {
            "record": known,
            "points": tuple(point for point in points if point.rank == 0),
            "rank_times": times,
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


BLOCK = 64 << 10
MOST_BYTES = 256 << 20
"""So much of a file is looked at for lines that are wanted, from its end."""
MOST_LINE = 1 << 20
"""A line that is longer is taken apart."""

_PATTERN = re.compile(r"%([0-9]*)([A-Za-z%])")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})|\\([nrt])")
_LABEL = re.compile(rb"\s*([0-9]{1,9}): ")
_MARK = re.compile(rb"(?m)^deeplink: attempt ([0-9]+\.[0-9]+\.[0-9]+): ")


def named(text: str) -> str:
    r"""Return the name of a file, with the bytes that Slurm's answer has as escapes (`command.text_of`).

    >>> named(r"caf\xe9\t.out"), named("slurm-7.out")
    ('caf\udce9\t.out', 'slurm-7.out')
    """
    return _ESCAPED.sub(_letter, text)


def _letter(found: re.Match[str]) -> str:
    byte, short, long, control = found.groups()
    if control:
        return {"n": "\n", "r": "\r", "t": "\t"}[control]
    code = int(byte or short or long, 16)
    if byte:
        return os.fsdecode(bytes([code]))
    return chr(code) if code <= sys.maxunicode else found[0]


def expanded(pattern: str, row: JobRow) -> str:
    """Return the name of a batch job's output file (sbatch(1), FILENAME PATTERN).

    Bytes of it that are no text are there as `os.fsdecode` has them. A pattern that only a step or a task fills in
    stays as it is, and so does one that no one knows.
    """
    pattern = named(pattern)
    if "\\" in pattern:  # sbatch: then no pattern is replaced
        return pattern.replace("\\", "")
    array, underscore, task = row.label.partition("_")
    if underscore and pattern.endswith(f"/slurm-{row.id}.out"):
        # So squeue 22.05 tells sbatch's default (measured); of a task of an array the file is called otherwise.
        return f"{pattern.rpartition('/')[0]}/slurm-{array}_{task}.out"
    host = (row.batch_host or "").partition(".")[0]
    values = {
        "%": "%",
        "A": array if underscore else str(row.id),
        "a": task if underscore else "4294967294",
        "J": str(row.id),
        "j": str(row.id),
        "N": host or None,
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": row.user,
        "x": named(row.name),
    }

    def value(found: re.Match[str]) -> str:
        made = values.get(found[2])
        if made is None:
            return found[0]
        width = min(int(found[1] or 0), 10)
        return made.zfill(width) if made.isdigit() else made

    return _PATTERN.sub(value, pattern)


def of_rank(first: int, last: int) -> Callable[[bytes], bool]:
    """Return what tells the lines of some ranks by the label that `srun --label` puts before them."""

    def keep(line: bytes) -> bool:
        found = _LABEL.match(line)
        return found is not None and first <= int(found[1]) <= last

    return keep


def labelled(lines: list[bytes]) -> bool:
    """Whether any line bears the number of a rank."""
    return any(_LABEL.match(line) for line in lines)


def _marks(path: Path) -> tuple[list[tuple[str, int]], int]:
    """Return the lines that `deeplink run` writes where an attempt's part begins, and the file's size."""
    # The search is the kernel's and C's: gigabytes take about a second.
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return [], 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return [(found[1].decode(), found.start()) for found in _MARK.finditer(text)], len(text)


def section(path: Path, attempt: str) -> tuple[int, int] | None:
    """Return where an attempt's part of a file begins and ends; None where there is no such attempt."""
    marks, size = _marks(path)
    begin = next((at for name, at in marks if name == attempt), None)
    if begin is None:
        return None
    return begin, next((at for name, at in marks if at > begin and name != attempt), size)


def attempts_in(path: Path) -> list[str]:
    """Return the attempts whose parts a file has, in order."""
    return list(dict.fromkeys(name for name, _ in _marks(path)[0]))


@dataclass(slots=True)
class Tail:
    """The end of a file, and what comes after it."""

    path: Path
    keep: Callable[[bytes], bool] | None = None
    at: int = 0
    inode: int = 0
    _half: bytes = b""
    begun_anew: bool = field(default=False)

    def last(self, count: int, *, begin: int = 0, end: int | None = None) -> list[bytes]:
        """Return the last lines (fewer where there are fewer, or none wanted further up), and go on from there."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            stop = found.st_size if end is None else end
            self.at, self.inode = stop, found.st_ino
            lines: list[bytes] = []
            for line in _backwards(file.fileno(), max(begin, stop - MOST_BYTES), stop):
                if len(lines) >= count:
                    break
                if self.keep is None or self.keep(line):
                    lines.append(line)
        if self.keep is not None and lines and not lines[0].endswith(b"\n") and end is None:
            self._half = lines.pop(0)  # goes on with what is written next
        return lines[::-1]

    def more(self) -> list[bytes]:
        """Return what was appended since; a file that was replaced or begun again is read from its start."""
        self.begun_anew = False
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.at:
                self.begun_anew = self.inode != 0
                self.at, self.inode, self._half = 0, found.st_ino, b""
            data = os.pread(file.fileno(), 16 * BLOCK, self.at)
        self.at += len(data)
        if self.keep is None:
            return [data] if data else []
        *whole, self._half = (self._half + data).split(b"\n")
        if len(self._half) > MOST_LINE:
            whole.append(self._half)
            self._half = b""
        return [line + b"\n" for line in whole if self.keep(line)]

    def rest(self) -> list[bytes]:
        """Return the half line at the end, when nothing will come any more."""
        half, self._half = self._half, b""
        return [half] if half and self.keep is not None and self.keep(half) else []


def _backwards(file: int, begin: int, end: int) -> Iterator[bytes]:
    """Yield the lines between two places from the last to the first, each with its newline if it has one."""
    place, tail = end, b""  # the beginning of a line that goes on with what was read before
    while place > begin:
        size = min(BLOCK, place - begin)
        place -= size
        parts = (os.pread(file, size, place) + tail).split(b"\n")
        lines = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
        yield from reversed(lines[1:])
        tail = lines[0]
        if len(tail) > MOST_LINE:
            yield tail
            tail = b""
    if tail:
        yield tail
