"""Whether the watchdog itself is well: its loop goes round, its journal takes writes, its channels take messages.

The answer is metrics, for a rule that watches them, and calls of a URL that somebody else misses when they stay
away (healthchecks.io and its like): nobody can tell of his own death.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.watch.notify.delivery import NotSentError
from deeplink.scheduler.watch.notify.delivery_queue import sender
from deeplink.scheduler.watch.notify.message import Notification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.clock import Clock
    from deeplink.metrics import WatchMetrics
    from deeplink.scheduler.watch.journal import Journal
    from deeplink.scheduler.watch.notify.channels import Channel

log = logging.getLogger(__name__)

BEAT_S = 10.0
CALL_S = 60.0
LOOP_LATE_S = 30.0
CHANNEL_LATE_S = 300.0
CLOSE_S = 1.0


@dataclass(slots=True, kw_only=True)
class DeadmanSwitch:
    """One round each BEAT_S: writes to the journal, judges, calls. One thread only.

    Args:
        channels: names of the channels that are told of incidents.
        calls: heartbeat channels, each with what calls it.
    """

    journal: Journal
    clock: Clock
    metrics: WatchMetrics
    channels: Sequence[str]
    calls: Sequence[tuple[str, Callable[[Notification], None]]]
    host: str
    _called: float = field(default=float("-inf"))
    _failing: set[str] = field(default_factory=set)
    _wrong: str = ""
    _full: bool = False

    def beat(self) -> None:
        """Go round once."""
        self.write()
        if self.clock.monotonic() - self._called < CALL_S:
            return
        wrong, before = self.trouble(), self._wrong
        self._wrong = wrong
        if wrong:
            if wrong != before:
                log.warning("%s", wrong)
            return
        self._called = self.clock.monotonic()
        for name, call in self.calls:
            self._call(name, call)

    def write(self) -> None:
        """Find out whether the journal takes writes."""
        try:
            self.journal.beat(self.host, self.clock.unix())
        except DeepLinkError as problem:
            if not self._full:  # once for each time that it fails
                log.warning("%s", problem)
            self._full = True
        else:
            self._full = False
            self.metrics.journal_time.set(self.clock.unix())

    def trouble(self) -> str:
        """Return what stands still, in words; empty while all is well."""
        now = self.clock.unix()
        late = []
        if now - self._value("deeplink_watch_loop_time_seconds") > LOOP_LATE_S:
            late.append("the loop")
        if now - self._value("deeplink_watch_journal_time_seconds") > LOOP_LATE_S:
            late.append("the journal")
        late += [
            f"channel {name}"
            for name in self.channels
            if now - self._value("deeplink_watch_notify_time_seconds", channel=name) > CHANNEL_LATE_S
        ]
        return f"not well, and no heartbeat is sent: {', '.join(late)} stood still" if late else ""

    def _value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def _call(self, name: str, call: Callable[[Notification], None]) -> None:
        try:
            call(self._message())
        except NotSentError as problem:
            self.metrics.notify_messages.labels(name, "failed").inc()
            if name not in self._failing:
                log.warning("%s", problem)
            self._failing.add(name)
        else:
            self.metrics.notify_messages.labels(name, "sent").inc()
            self._failing.discard(name)

    def _message(self) -> Notification:
        now = self.clock.unix()
        text = f"deeplink watch on {self.host} is well, {time.strftime('%H:%M:%S', time.localtime(now))}"
        name = hashlib.sha256(f"{self.host} {now}".encode()).hexdigest()[:32]
        return Notification(name, text, text, {"id": name, "text": text, "host": self.host, "unix": now})


@contextmanager
def beating(
    channels: Sequence[Channel], journal: Journal, clock: Clock, metrics: WatchMetrics, host: str
) -> Iterator[None]:
    """Keep the journal's metric true, and call the heartbeat channels, until the end of the block."""
    pulse = DeadmanSwitch(
        journal=journal,
        clock=clock,
        metrics=metrics,
        channels=[channel.name for channel in channels if not channel.heartbeat],
        calls=[(channel.name, sender(channel)) for channel in channels if channel.heartbeat],
        host=host,
    )
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(BEAT_S):  # first the loop has to come round
            try:
                pulse.beat()
            except Exception:
                log.exception("the watchdog's pulse")

    pulse.write()
    thread = threading.Thread(target=run, name="deeplink-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(CLOSE_S)
