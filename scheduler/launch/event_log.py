"""The event log of a run, and its sinks: lines for people, heartbeats for the watchdog, the job's own journal.

None of it can hold up supervision: beats and journal are written by threads of their own, with bounded queues, and
what they cannot deliver they keep for the next time, or drop when it becomes too much.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
from collections import deque
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import grpc

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import beat_to_wire
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deeplink.core.config import Config
    from deeplink.scheduler.recovery.records import Beat, Incident, ProgressPoint, RankTimes

log = logging.getLogger(__name__)

BEAT_S = 1.0
CALL_S = 2.0
LAST_BEAT_S = 3.0  # How long the end of a run waits for its last beat to be delivered
MOST_POINTS = 2_048
MOST_RANK_TIMES = 32
MOST_INCIDENTS = 256  # Kept for a far end that is away, the newest
MOST_INCIDENTS_AT_ONCE = 16  # Each may have a megabyte of stacks
MOST_LINES = 1_024


class EventSink:
    """Delivers the newest heartbeat about once a second from a thread, and at once when something happened."""

    def __init__(self, deliver: Callable[[Beat], None], name: str, clock: Clock | None = None) -> None:
        self._deliver, self._name, self._clock = deliver, name, clock or SystemClock()
        self._busy_since: float | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._beat: Beat | None = None
        self._given_at = 0.0
        self._points: deque[ProgressPoint] = deque(maxlen=MOST_POINTS)
        self._rank_times: deque[RankTimes] = deque(maxlen=MOST_RANK_TIMES)
        self._incidents: dict[str, Incident] = {}
        self._is_away = False
        self._lost_for = ""  # why something was dropped last
        self._thread = threading.Thread(target=self._run, name=f"deeplink-{name}", daemon=True)
        self._thread.start()

    def give(self, beat: Beat, *, now: bool) -> None:
        """Take over what is to be delivered; does not wait."""
        with self._lock:
            self._beat, self._given_at = beat, self._clock.monotonic()
            self._points.extend(beat.progress)
            self._rank_times.extend(beat.rank_times)
            self._incidents.update((incident.id, incident) for incident in beat.incidents)
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
            has_more = self._deliver_next()

    def _deliver_next(self) -> bool:
        """Deliver what was given, or the first part of it; True where that went well and more is left."""
        with self._lock:
            if self._beat is None:
                return False
            beat = replace(
                self._beat,
                progress=tuple(self._points),
                rank_times=tuple(self._rank_times),
                incidents=tuple(self._incidents.values())[:MOST_INCIDENTS_AT_ONCE],
                waited_s=self._clock.monotonic() - self._given_at,
            )
            self._points.clear()
            self._rank_times.clear()
        self._busy_since = self._clock.monotonic()
        try:
            self._deliver(beat)
        except Exception as problem:  # noqa: BLE001 - whatever is wrong with the far end, the job goes on
            is_final = _is_final(problem)
            self._complain(problem, beat, is_final=is_final)
            self._is_away = True
            if not is_final:
                with self._lock:
                    self._points = deque((*beat.progress, *self._points), maxlen=MOST_POINTS)
                    self._rank_times = deque((*beat.rank_times, *self._rank_times), maxlen=MOST_RANK_TIMES)
                return False
        else:
            self._is_away = False
        finally:
            self._busy_since = None
        with self._lock:
            for incident in beat.incidents:
                if self._incidents.get(incident.id) == incident:
                    del self._incidents[incident.id]
            return bool(self._incidents) and not self._is_away

    def _complain(self, problem: Exception, beat: Beat, *, is_final: bool) -> None:
        """Say what is wrong, once."""
        why = (problem.details() if isinstance(problem, grpc.RpcError) else "") or str(problem) or repr(problem)
        if is_final and (beat.progress or beat.incidents):
            lost = f"{counted(len(beat.progress), 'report')} and {counted(len(beat.incidents), 'incident')}"
            if why != self._lost_for:  # what refuses one report may refuse one each second, for weeks
                trace = None if isinstance(problem, grpc.RpcError) else problem
                log.warning("%s: %s cannot be told: %s", self._name, lost, why, exc_info=trace)
            self._lost_for = why
        elif not self._is_away:
            log.warning("%s: %s", self._name, why)


def _is_final(problem: Exception) -> bool:
    """Whether delivering the same again is no use: the far end refuses it, or it cannot even be put into words."""
    # Without it the next heartbeat may be taken.
    if isinstance(problem, grpc.RpcError):
        return problem.code() is grpc.StatusCode.INVALID_ARGUMENT
    return not isinstance(problem, (DeepLinkError, OSError))


def to_watchdog(config: Config) -> Callable[[Beat], None] | None:
    """Return what sends the heartbeats of one job to the site's watchdog; None where there is none."""
    if not config.watch:
        return None
    opened: list[WatchdogClient] = []

    def deliver(beat: Beat) -> None:
        if not opened:
            opened.append(WatchdogClient(config.watch, config.watch_token_file, beat.attempt))
        opened[0].call(lambda stub: stub.Beat(beat_to_wire(beat), timeout=CALL_S))

    return deliver


def to_journal(path: Path, clock: Clock) -> Callable[[Beat], None]:
    """Return what writes heartbeats to the job's own journal, which is opened when first needed."""
    opened = cache(lambda: Journal(path, shared_file_system=True))
    return lambda beat: opened().record_beat(beat, clock.unix())


class _Writer:
    """Writes lines to a file and to standard error from a thread: either may hang with the storage it is on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue(maxsize=MOST_LINES)
        self._thread = threading.Thread(target=self._run, name="deeplink-events", daemon=True)
        self._thread.start()

    def write(self, line: str, said: str) -> None:
        """Take over a line for the file and one for people; does not wait, and drops them when too many wait."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((line, said))

    def close(self) -> None:
        """Write what is left, if that goes quickly."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(LAST_BEAT_S)

    def _run(self) -> None:
        has_complained = False
        for line, said in iter(self._lines.get, None):
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            except OSError as problem:
                if not has_complained:
                    log.warning("%s: %s", self._path, problem)
                has_complained = True
            if said:
                with contextlib.suppress(OSError):  # nobody reads our standard error: the ranks still matter
                    sys.stderr.write(f"{said}\n")
                    sys.stderr.flush()


_HOW_LONG = re.compile(r" for \d[\d.]* s\b")


def gist_of_wait(because: str) -> str:
    """Return what stays the same of why nothing is done while that lasts, so that it is said once.

    >>> gist_of_wait("nothing heard of n7 for 2.6 s; asking Slurm whose the job is")
    'nothing heard of n7; asking Slurm whose the job is'
    """
    return _HOW_LONG.sub("", because).rpartition(":")[2]


class EventLog:
    """The events of one run, for its folder, for people, and for the sinks."""

    def __init__(self, folder: Path, clock: Clock, sinks: Iterable[EventSink], *, as_json: bool = False) -> None:
        self._writer = _Writer(folder / "events.jsonl")
        self._clock, self._sinks, self._as_json = clock, list(sinks), as_json
        self._waits_for = ""

    def event(self, name: str, sentence: str = "", **facts: object) -> None:
        """Write an event down; say the sentence, if there is one, on standard error. Does not wait."""
        record = {"event": name, "unix": self._clock.unix(), "monotonic": self._clock.monotonic(), **facts}
        line = json.dumps(record, separators=(",", ":"))
        said = f"deeplink: {sentence}" if sentence else ""
        self._writer.write(line, line if self._as_json else said)

    def waiting(self, because: str) -> None:
        """Say why nothing is done, once while that stays the same; empty: there is no such reason any more."""
        gist = gist_of_wait(because)
        if gist != self._waits_for:
            self._waits_for = gist
            if gist:
                self.event("waiting", because, because=because)

    def beat(self, beat: Beat, *, now: bool) -> None:
        """Hand the newest heartbeat to the sinks, with what has come since the one before; `now`: at once."""
        for sink in self._sinks:
            sink.give(beat, now=now)

    def stuck_s(self) -> float:
        """Return for how long a sink has not come back: calls are bounded (CALL_S), so its storage hangs."""
        return max((sink.stuck_s() for sink in self._sinks), default=0.0)

    def close(self) -> None:
        """Let the last of it be delivered."""
        for sink in self._sinks:
            sink.close()
        self._writer.close()
