"""The event log of a run, and its sinks: lines for people, heartbeats for the watchdog, the job's own journal.

None of it can hold up supervision: beats and journal are written by threads of their own, with bounded queues, and
what they cannot deliver they keep for the next time, or drop when it becomes too much.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from deeplink.clock import Clock, SystemClock
from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.journal import Journal
from deeplink.scheduler.watch.messages import beat_to_wire
from deeplink.scheduler.watch.watchdog_client import WatchdogClient
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deeplink.config import Config
    from deeplink.scheduler.watch.records import Beat, Incident, ProgressPoint

log = logging.getLogger(__name__)

BEAT_S = 1.0
CALL_S = 2.0
LAST_BEAT_S = 3.0
"""How long the end of a run waits for its last beat to be delivered."""
MOST_POINTS = 2_048
MOST_INCIDENTS = 256
"""Kept for a far end that is away, the newest."""
MOST_INCIDENTS_AT_ONCE = 16
"""Each may have a megabyte of stacks."""
MOST_LINES = 1_024


class EventSink:
    """Delivers the newest beat about once a second from a thread, and at once when something happened.

    Args:
        deliver: takes one beat, in bounded time; raises what it likes when it cannot. What was told with a beat is
            told again after a DeepLinkError, an OSError or an RpcError, and dropped where it was refused or
            anything else was raised: a beat that fails for ever would look like a launcher that is lost.
        name: for the thread and the log.
        clock: where durations come from.
    """

    def __init__(self, deliver: Callable[[Beat], None], name: str, clock: Clock | None = None) -> None:
        self._deliver, self._name, self._clock = deliver, name, clock or SystemClock()
        self._busy_since: float | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._beat: Beat | None = None
        self._given_at = 0.0
        self._points: deque[ProgressPoint] = deque(maxlen=MOST_POINTS)
        self._incidents: dict[str, Incident] = {}
        self._is_away = False
        self._lost_for = ""  # why something was dropped last
        self._thread = threading.Thread(target=self._run, name=f"deeplink-{name}", daemon=True)
        self._thread.start()

    def give(
        self, beat: Beat, points: Iterable[ProgressPoint], incidents: Iterable[Incident], *, now: bool
    ) -> None:
        """Take over what is to be told; does not wait."""
        with self._lock:
            self._beat, self._given_at = beat, self._clock.monotonic()
            self._points.extend(points)
            self._incidents.update((incident.id, incident) for incident in incidents)
            for oldest in list(self._incidents)[:-MOST_INCIDENTS]:
                del self._incidents[oldest]
        if now:
            self._news.set()

    def stuck_s(self) -> float:
        """Return for how long the delivery under way has not come back; 0 where none is."""
        since = self._busy_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def close(self) -> None:
        """Deliver what is left, if that goes quickly."""
        self._closing.set()
        self._news.set()
        self._thread.join(LAST_BEAT_S)

    def _run(self) -> None:
        is_last = has_more = False
        while has_more or not is_last:
            if not has_more:
                self._news.wait(BEAT_S)
            self._news.clear()
            is_last = self._closing.is_set()
            has_more = self._tell()

    def _tell(self) -> bool:
        """Deliver what is to be told, or the first part of it; True where that went well and more is left."""
        with self._lock:
            if self._beat is None:
                return False
            points, incidents = list(self._points), list(self._incidents.values())[:MOST_INCIDENTS_AT_ONCE]
            waited_s = self._clock.monotonic() - self._given_at
            beat = replace(self._beat, progress=tuple(points), incidents=tuple(incidents), waited_s=waited_s)
            self._points.clear()
        self._busy_since = self._clock.monotonic()
        try:
            self._deliver(beat)
        except Exception as problem:  # noqa: BLE001 - whatever is wrong with the far end, the job goes on
            self._complain(problem, beat)
            self._is_away = True
            if not _is_final(problem):
                with self._lock:
                    self._points = deque((*points, *self._points), maxlen=MOST_POINTS)
                return False
        else:
            self._is_away = False
        finally:
            self._busy_since = None
        with self._lock:
            for incident in incidents:
                if self._incidents.get(incident.id) == incident:
                    del self._incidents[incident.id]
            return bool(self._incidents) and not self._is_away

    def _complain(self, problem: Exception, beat: Beat) -> None:
        """Say what is wrong, once."""
        why = _said(problem)
        if _is_final(problem) and (beat.progress or beat.incidents):
            lost = f"{counted(len(beat.progress), 'report')} and {counted(len(beat.incidents), 'incident')}"
            trace = None if isinstance(problem, grpc.RpcError) else problem
            if why != self._lost_for:  # who refuses one report may refuse one each second, for weeks
                log.warning("%s: %s cannot be told: %s", self._name, lost, why, exc_info=trace)
            self._lost_for = why
        elif not self._is_away:
            log.warning("%s: %s", self._name, why)


def _is_final(problem: Exception) -> bool:
    """Whether telling the same again is no use: the far end refuses it, or it cannot even be put into words.

    Without it the next beat may be taken.
    """
    if isinstance(problem, grpc.RpcError):
        return problem.code() is grpc.StatusCode.INVALID_ARGUMENT
    return not isinstance(problem, (DeepLinkError, OSError))


def _said(problem: Exception) -> str:
    return (problem.details() if isinstance(problem, grpc.RpcError) else "") or str(problem) or repr(problem)


def to_watchdog(config: Config) -> Callable[[Beat], None] | None:
    """Return what sends the beats of one job to the site's watchdog; None where there is none."""
    if not config.watch:
        return None
    opened: list[WatchdogClient] = []

    def deliver(beat: Beat) -> None:
        if not opened:
            opened.append(WatchdogClient(config.watch, config.watch_token_file, beat.attempt))
        opened[0].call(lambda stub: stub.Beat(beat_to_wire(beat), timeout=CALL_S))

    return deliver


def to_journal(path: Path, clock: Clock) -> Callable[[Beat], None]:
    """Return what writes beats to the job's own journal, which is opened when first needed."""
    opened: list[Journal] = []

    def deliver(beat: Beat) -> None:
        if not opened:
            opened.append(Journal(path, shared_file_system=True))
        opened[0].record_beat(beat, clock.unix())

    return deliver


class _Scribe:
    """Writes lines to a file and to standard error from a thread: either may hang with the storage it is on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue(maxsize=MOST_LINES)
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="deeplink-events", daemon=True)
        self._thread.start()

    def write(self, line: str, said: str) -> None:
        """Take a line for the file and one for people over; does not wait, and drops them when too many do."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((line, said))

    def close(self) -> None:
        """Write what is left, if that goes quickly."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(LAST_BEAT_S)

    def _run(self) -> None:
        while (taken := self._lines.get()) is not None:
            line, said = taken
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            except OSError as problem:
                if not self._complained:
                    log.warning("%s: %s", self._path, problem)
                self._complained = True
            if said:
                with contextlib.suppress(OSError):  # nobody reads our standard error: the ranks still matter
                    sys.stderr.write(f"{said}\n")
                    sys.stderr.flush()


class EventLog:
    """Events of one run, told to everybody concerned.

    Args:
        folder: the job's state folder.
        clock: where the times come from.
        couriers: who gets beats.
        as_json: tell people JSON lines instead of sentences.
    """

    def __init__(
        self, folder: Path, clock: Clock, couriers: Iterable[EventSink], *, as_json: bool = False
    ) -> None:
        self._scribe = _Scribe(folder / "events.jsonl")
        self._clock, self._couriers, self._as_json = clock, list(couriers), as_json

    def event(self, name: str, sentence: str = "", **facts: object) -> None:
        """Write an event down; say the sentence, if there is one, on standard error. Does not wait."""
        record = {"event": name, "unix": self._clock.unix(), "monotonic": self._clock.monotonic(), **facts}
        line = json.dumps(record, separators=(",", ":"))
        said = f"deeplink: {sentence}" if sentence else ""
        self._scribe.write(line, line if self._as_json else said)

    def beat(
        self,
        beat: Beat,
        *,
        points: Iterable[ProgressPoint] = (),
        incidents: Iterable[Incident] = (),
        now: bool = False,
    ) -> None:
        """Hand the newest beat to the couriers."""
        for courier in self._couriers:
            courier.give(beat, points, incidents, now=now)

    def stuck_s(self) -> float:
        """Return for how long a courier has not come back: calls are bounded (CALL_S), so its storage hangs."""
        return max((courier.stuck_s() for courier in self._couriers), default=0.0)

    def close(self) -> None:
        """Let the last of it be delivered."""
        for courier in self._couriers:
            courier.close()
        self._scribe.close()
