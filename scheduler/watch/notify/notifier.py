"""Tells the channels what the journal holds and they were not told: a thread each, so that none waits for another.

What waits is in the journal, not in memory: the loop that records incidents never waits for a channel, a watchdog
that is killed goes on where it was, and what was told is not told again (unless it was killed between the two).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.incident_json import IncidentNews, gravity
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.watch.notify.channels import Pacer, Turn
from deeplink.scheduler.watch.notify.daily_digest import DAY_S, digest, latest
from deeplink.scheduler.watch.notify.delivery import (
    MOST_DOCUMENTS,
    NewsContext,
    Notification,
    NotSentError,
    message,
    sender,
)
from deeplink.scheduler.watch.notify.incident_metrics import IncidentCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.watch.notify.channels import Channel


log = logging.getLogger(__name__)

SOONEST_S = 0.5
LOOK_S = 15.0  # a channel looks for news so often even when no one says that there is some
LONGEST_PAUSE_S = 60.0
GIVE_UP_S = 3_600.0  # news that could not be told for so long are not told any more
MOST_NEWS = 500
CLOSE_S = 2.0
LATE_S = 3_600.0  # a watchdog that begins so long after the digest was due leaves it out
MOST_DAYS_S, MOST_DIGESTED = 7 * DAY_S, 2_000

Key = tuple[str, str]


@dataclass(slots=True, kw_only=True)
class Teller:
    """Tells one channel. One thread only; `tell` is one round."""

    channel: Channel
    journal: Journal
    send: Callable[[Notification], None]
    clock: Clock
    metrics: WatchMetrics
    host: str
    cluster: Callable[[], str] = str  # its name, where the channel does not say; empty where unknown
    _pacer: Pacer = field(init=False)
    _failures: int = 0
    _full: str = ""
    _not_before: float = 0.0
    _first: dict[Key, float] = field(default_factory=dict)
    _unnoted: dict[Key, str] = field(default_factory=dict)
    _held_s: float = LOOK_S  # until something has lasted long enough to be told
    _digested: float = 0.0  # when the newest digest was due, Unix time
    _digest: Notification | None = None

    def __post_init__(self) -> None:
        """Begin to keep account of what the channel was told."""
        self._pacer = Pacer(self.channel.pace)

    @property
    def name(self) -> str:
        """The channel's."""
        return self.channel.name

    def tell(self) -> float:
        """Send what may be sent; return how many seconds there is nothing to do unless there is news."""
        name = self.channel.name
        while True:
            self._note_left()
            self._look_at_clock()
            waiting = self._waiting()
            self.metrics.notify_waiting.labels(name).set(len(waiting))
            now = self.clock.monotonic()
            if now < self._not_before and (waiting or self._digest):
                return min(LOOK_S, self._not_before - now)
            if not waiting:
                if self._digest and not self._sent(self._digest):
                    continue
                self._digest = None
                self._well()
                return min(LOOK_S, self._held_s)
            turn = self._pacer.turn(waiting, now)
            if not turn.batch:
                self._well()  # it is we who hold them
                return _until(turn)
            self._try(turn.batch)

    def _waiting(self) -> list[IncidentNews]:
        """News to be told, in order; what the channel does not want, or no one can tell it, is struck off."""
        now = self.clock.monotonic()
        found = [
            news
            for news in self.journal.unsent(self.channel.name, limit=MOST_NEWS)
            if news.key not in self._unnoted
        ]
        self._first = {news.key: self._first.get(news.key, now) for news in found}
        wanted: list[IncidentNews] = []
        unix, self._held_s = self.clock.unix(), LOOK_S
        for news in found:
            lasts_s = self._lasts_s(news, unix)
            if not self.channel.wanted.wants(news):
                self._unnoted[news.key] = "not wanted"
            elif lasts_s > 0 and news.incident.outcome is IncidentOutcome.OPEN:
                self._held_s = max(SOONEST_S, min(self._held_s, lasts_s))
            elif lasts_s > 0:
                self._unnoted[news.key] = "healed"  # the digest tells of it
            elif self._failures and now - self._first[news.key] >= GIVE_UP_S:
                self._unnoted[news.key] = "given up"
                self.metrics.notify_messages.labels(self.channel.name, "given_up").inc()
                log.warning("channel %s: %s could not be told, given up", self.channel.name, news)
            else:
                wanted.append(news)
        if self._unnoted:
            self._note_left()
        return wanted

    def _lasts_s(self, news: IncidentNews, unix: float) -> float:
        """Return how much longer it must last to be told, or had to; 0 where it is told now."""
        incident, after_s = news.incident, self.channel.after_s.get(gravity(news.incident), 0.0)
        if incident.outcome is IncidentOutcome.FAILED or news.opened_told:
            return 0.0
        ended = incident.outcome is not IncidentOutcome.OPEN
        until = max(incident.recovered_unix, incident.detected_unix) if ended else unix
        return max(0.0, after_s - max(0.0, until - incident.detected_unix))

    def _try(self, batch: Sequence[IncidentNews]) -> None:
        if self._sent(message(batch, self.host, self._background(batch))):
            self._pacer.sent(batch, self.clock.monotonic())
            self._unnoted.update((news.key, "sent") for news in batch)
            self._well()

    def _background(self, batch: Sequence[IncidentNews]) -> NewsContext:
        numbers = {news.incident.attempt.job for news in batch[:MOST_DOCUMENTS] if news.incident.attempt}
        jobs = {number: job for number in numbers if (job := self.journal.job(number))}
        return NewsContext(cluster=self.channel.cluster or self.cluster(), page=self.channel.page, jobs=jobs)

    def _look_at_clock(self) -> None:
        """Make the day's digest once its time has come; what it could not be told in time is left out."""
        if self.channel.digest is None:
            return
        unix = self.clock.unix()
        due = latest(self.channel.digest, unix)
        if due <= self._digested:
            return
        if not self._digested and unix - due > LATE_S:
            self._digested = due  # begun later in the day: the next one is tomorrow's
            return
        # Written down before it is sent: whoever goes on after us sends no second one.
        try:
            before = self.journal.beat(f"digest {self.name}", unix)
        except JournalError:
            return  # it is tried again; the rest is told meanwhile
        self._digested = due
        if before < due:
            since = max(before, due - MOST_DAYS_S) if before else due - DAY_S
            incidents = self.journal.incidents(since_unix=since, until_unix=unix, limit=MOST_DIGESTED)
            wanted = [one for one in incidents if self.channel.wanted.grave(one)]
            known = self._background([IncidentNews(one) for one in wanted])
            self._digest = digest(wanted, self.host, known, since, unix) if wanted else None

    def _sent(self, notification: Notification) -> bool:
        name = self.channel.name
        try:
            self.send(notification)
        except NotSentError as problem:
            self._failures += 1
            pause = min(LONGEST_PAUSE_S, max(problem.after_s, 2.0 ** min(self._failures - 1, 10)))
            self._not_before = self.clock.monotonic() + pause
            self.metrics.notify_messages.labels(name, "failed").inc()
            if self._failures == 1:  # once for each time that it fails, not for each try
                log.warning("%s; it is tried again", problem)
            else:
                log.info("%s; tried again in %.0f s", problem, pause)
            return False
        if self._failures:
            log.info("channel %s: messages are taken again", name)
        self._failures = 0
        self.metrics.notify_messages.labels(name, "sent").inc()
        return True

    def _note_left(self) -> None:
        # In memory until the journal has it: a full disk must not make us say the same again and again, nor keep
        # us from saying the rest, which can still be read. There is no more than the journal holds.
        if not self._unnoted:
            return
        try:
            self.journal.note_sent(self.channel.name, dict(self._unnoted), self.clock.unix())
        except JournalError as problem:
            if not self._full:  # once for each time that it fails
                log.warning("channel %s: what was told is not noted yet: %s", self.channel.name, problem)
            self._full = str(problem)
        else:
            self._unnoted.clear()
            self._full = ""

    def _well(self) -> None:
        self.metrics.notify_time.labels(self.channel.name).set(self.clock.unix())


def _until(turn: Turn) -> float:
    return LOOK_S if turn.wait_s is None else min(LOOK_S, max(0.05, turn.wait_s))


class Telling(Protocol):
    """What is told of incidents."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    def tell(self) -> float:
        """Go round once; return in how many seconds again, unless there is news."""
        ...


class Notifier:
    """The threads of all channels."""

    def __init__(self, tellers: Sequence[Telling]) -> None:
        self._tellers = tellers
        self._news = [threading.Event() for _ in tellers]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(teller, news), name=f"deeplink-notify-{teller.name}", daemon=True
            )
            for teller, news in zip(tellers, self._news, strict=True)
        ]

    def start(self) -> None:
        """Begin to tell."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Say that there is news; does not wait."""
        for news in self._news:
            news.set()

    def close(self) -> None:
        """Stop; a try under way has CLOSE_S to end, what was not told stays in the journal."""
        self._stop.set()
        self.wake()
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, teller: Telling, news: threading.Event) -> None:
        trouble = ""
        while not self._stop.is_set():
            news.clear()
            try:
                wait_s, said = teller.tell(), ""
            except DeepLinkError as problem:  # the journal cannot be read
                wait_s, said = LOOK_S, str(problem)
            except Exception as problem:
                # Whatever is wrong with one channel, the others go on, and its metric stands still.
                wait_s, said = LOOK_S, repr(problem)
                if said != trouble and not self._stop.is_set():
                    log.exception("channel %s", teller.name)
                    trouble = said
            if said and said != trouble and not self._stop.is_set():  # at the end the journal is closed before us
                log.warning("channel %s: %s", teller.name, said)
            trouble = said
            news.wait(wait_s)


@contextmanager
def notifying(  # noqa: PLR0917 - what it is put together of
    channels: Sequence[Channel],
    journal: Journal,
    clock: Clock,
    metrics: WatchMetrics,
    host: str,
    cluster: Callable[[], str] = str,
) -> Iterator[Notifier]:
    """Tell the channels of incidents in `journal` that begin or change from now on, until the end of the block."""
    tellers = [
        Teller(
            channel=channel,
            journal=journal,
            send=sender(channel),
            clock=clock,
            metrics=metrics,
            host=host,
            cluster=cluster,
        )
        for channel in channels
        if not channel.heartbeat
    ]
    for teller in tellers:
        journal.open_channel(teller.channel.name)  # before the first incident of this watchdog
        metrics.notify_time.labels(teller.channel.name).set(clock.unix())
    counter = IncidentCounter(journal=journal, clock=clock, metrics=metrics)
    journal.open_channel(counter.name)
    notifier = Notifier([*tellers, counter])
    notifier.start()
    journal.listen(notifier.wake)
    try:
        yield notifier
    finally:
        notifier.close()


# Whether the watchdog itself is well: its loop goes round, its journal takes writes, its channels take
# messages.


BEAT_S = 10.0
CALL_S = 60.0
LOOP_LATE_S = 30.0
CHANNEL_LATE_S = 300.0
DEADMAN_CLOSE_S = 1.0


@dataclass(slots=True, kw_only=True)
class DeadmanSwitch:
    """One round each BEAT_S: writes to the journal, judges, calls. One thread only."""

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
        thread.join(DEADMAN_CLOSE_S)
