"""Traces of jobs as CSV: Philly's columns, or any with submit time, duration and a number of GPUs or nodes."""

from __future__ import annotations

import csv
import gzip
import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING

from benchmarks.simulate.errors import DirtyTraceError, TraceError
from deeplink.core.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_SUBMIT = ("submit", "timestamp", "submit_time", "submitted")
_DURATION = ("duration", "duration_s", "run_time", "runtime")
_GPUS = ("gpus", "num_gpus", "gpu_num")
_NODES = ("nodes", "num_nodes", "node_num")
_CLUSTER = ("cluster", "vc", "partition")
_REMEDY = "A first line names the columns: submit or timestamp, duration, gpus or num_gpus or nodes."
_GZIP = b"\x1f\x8b"
SHARE_SKIPPED = 100
"""One row of so many may be left out where nobody said how many."""
LONGEST_S = 1e12
"""No time is longer: 30,000 years. Greater ones are another unit, and lose the seconds besides."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace.

    Attributes:
        number: its place in order of submission, from 0.
        submit_s: when it was submitted, in seconds since the trace began.
        duration_s: how long it ran.
        gpus: GPUs it had; 0 where the trace tells of nodes alone.
        nodes: nodes it had; 0 where the trace tells of GPUs alone.
    """

    number: int
    submit_s: float
    duration_s: float
    gpus: int
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds.

    Attributes:
        jobs: in order of submission.
        faults: what is wrong with each row that was left out, with its line.
    """

    jobs: tuple[TraceJob, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    submit: str
    duration: str
    gpus: str | None
    nodes: str | None
    cluster: str | None


def read_trace(
    path: Path, *, cluster: str | None = None, limit: int | None = None, skip: int | None = None
) -> Trace:
    """Read a trace from a CSV file, packed by gzip or not.

    Args:
        path: the file.
        cluster: only jobs of this virtual cluster.
        limit: only so many, the first by submission.
        skip: so many rows may be left out; one of `SHARE_SKIPPED` where None.

    Raises:
        TraceError: it is no such file, or has no such jobs.
        DirtyTraceError: too many rows make no sense.
        OSError: it cannot be read.
    """
    with _opened(path) as file:
        try:
            return parse_trace(file, str(path), cluster=cluster, limit=limit, skip=skip)
        except (EOFError, gzip.BadGzipFile) as problem:
            raise TraceError(str(path), f"it is no whole gzip file ({problem})", "Copy it again.") from problem


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        data = gzip.GzipFile(fileobj=raw) if packed else raw
        yield io.TextIOWrapper(data, encoding="utf-8-sig", errors="replace", newline="")


def parse_trace(
    lines: Iterable[str],
    where: str,
    *,
    cluster: str | None = None,
    limit: int | None = None,
    skip: int | None = None,
) -> Trace:
    """Read a trace from its lines; arguments and errors as `read_trace`."""
    reader = csv.reader(lines)
    header = [name.strip().lower() for name in _next(reader, where) or ()]
    columns = _columns(header, where)
    found: list[tuple[float, float, int, int]] = []
    faults: list[str] = []
    rows = 0
    most = math.inf if skip is None else skip
    begins = reader.line_num + 1
    while (row := _next(reader, where)) is not None:
        line, begins = begins, reader.line_num + 1
        if not any(map(str.strip, row)):
            continue
        rows += 1
        try:
            values = _values(header, row)
            if cluster is None or (columns.cluster and values[columns.cluster] == cluster):
                found.append(_job(values, columns))
        except ValueError as problem:
            faults.append(f"line {line}: {printable(str(problem))}")
            # A quote that is not closed makes one row of many lines: each of them may have been a job.
            faults += [f"line {more}: within what was quoted in line {line}" for more in range(line + 1, begins)]
            rows += begins - line - 1
            if len(faults) > most:
                raise DirtyTraceError(where, rows, faults) from problem
    if skip is None and len(faults) * SHARE_SKIPPED > rows:
        raise DirtyTraceError(where, rows, faults)
    if not found:
        whose = f" of {printable(cluster)!r}" if cluster is not None else ""
        raise TraceError(where, f"it has no job{whose}", _REMEDY)
    found.sort(key=lambda one: one[0])
    first = found[0][0]
    jobs = [
        TraceJob(number, submit - first, duration, gpus, nodes)
        for number, (submit, duration, gpus, nodes) in enumerate(found[:limit])
    ]
    return Trace(tuple(jobs), tuple(faults))


def _next(reader: Iterator[list[str]], where: str) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as problem:
        raise TraceError(where, f"it is no CSV ({problem})", _REMEDY) from problem


def _columns(header: list[str], where: str) -> _Columns:
    def named(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in header), None)

    submit, duration, gpus, nodes = named(_SUBMIT), named(_DURATION), named(_GPUS), named(_NODES)
    if len(set(header)) < len(header):
        raise TraceError(where, "two of its columns have the same name", _REMEDY)
    if submit is None or duration is None or not (gpus or nodes):
        lacks = [
            what
            for what, there in (("submit", submit), ("duration", duration), ("gpus or nodes", gpus or nodes))
            if there is None
        ]
        raise TraceError(where, f"it lacks the columns {', '.join(lacks)}", _REMEDY)
    return _Columns(submit, duration, gpus, nodes, named(_CLUSTER))


def _values(header: list[str], row: list[str]) -> dict[str, str]:
    if len(row) != len(header):
        raise ValueError(f"{counted(len(row), 'field')}, where the first line names {len(header)}")
    return dict(zip(header, map(str.strip, row), strict=True))


def _job(values: Mapping[str, str], columns: _Columns) -> tuple[float, float, int, int]:
    submit = _moment(values[columns.submit])
    duration = _number(values[columns.duration], columns.duration)
    if duration <= 0:
        raise ValueError(f"a {columns.duration} of {duration:g}")
    gpus = _count(values[columns.gpus], columns.gpus) if columns.gpus else 0
    nodes = _count(values[columns.nodes], columns.nodes) if columns.nodes else 0
    if not gpus and not nodes:
        raise ValueError("neither GPUs nor nodes")
    return submit, duration, gpus, nodes


def _moment(text: str) -> float:
    try:
        float(text)
    except ValueError:
        pass
    else:
        return _number(text, "the time of submission")
    try:
        told = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time of submission") from None
    # Philly's trace names no zone. Only what lies between two times counts, and UTC has no summer.
    return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


def _number(text: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, no number") from None
    if not math.isfinite(value):
        raise ValueError(f"{column} is {text!r}, no finite number")
    if abs(value) > LONGEST_S:
        raise ValueError(f"{column} is {text!r}, more than {LONGEST_S:g}")
    return value


def _count(text: str, column: str) -> int:
    value = _number(text, column) if text else 0.0
    if value < 0 or value != int(value) or value > 1_000_000:  # noqa: PLR2004
        raise ValueError(f"{column} is {text!r}, no number of things")
    return int(value)
