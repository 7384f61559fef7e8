"""Tells the channels what the journal holds and they were not told: a thread each, so that none waits for another.

What waits is in the journal, not in memory: the loop that records incidents never waits for a channel, a watchdog
that is killed goes on where it was, and what was told is not told again (unless it was killed between the two).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.incident_json import HOUR_S, Gravity, IncidentNews, cost, gravity
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.recovery.records import BLAMELESS, IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.notify.channels import Pacer, Turn
from deeplink.scheduler.watch.notify.delivery import (
    DAY_S,
    MOST_DOCUMENTS,
    NewsContext,
    Notification,
    NotSentError,
    digest,
    latest,
    line,
    message,
    notification,
    sender,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.metrics import WatchMetrics
    from deeplink.core.types import Attempt
    from deeplink.scheduler.journal.journal import Journal
    from deeplink.scheduler.recovery.records import Incident
    from deeplink.scheduler.watch.notify.channels import Channel


log = logging.getLogger(__name__)
incident_log = logging.getLogger(f"{__name__}.incidents")
incident_log.setLevel(logging.INFO)  # every incident is a line, also where nobody asked for more

SOONEST_S = 0.5
LOOK_S = 15.0  # a channel looks for news so often even when no one says that there is some
LONGEST_PAUSE_S = 60.0
GIVE_UP_S = 3_600.0  # news that could not be told for so long are not told any more
MOST_NEWS = 500
CLOSE_S = 2.0
LATE_S = 3_600.0  # a watchdog that begins so long after the digest was due leaves it out
MOST_DAYS_S, MOST_DIGESTED = 7 * DAY_S, 2_000
PULSE, BEAT_S, CALL_S = "~pulse", 10.0, 60.0
LOOP_LATE_S, CHANNEL_LATE_S = 30.0, 300.0
COUNTED = "~metrics"
"""What the journal calls the channel of metrics and log lines: no name that a site's channel may have."""
COUNT_S, NODES_S, LAST_S = 10.0, 60.0, 7 * 86_400.0
MOST_NODES, MOST_ATTEMPTS, MOST_READ = 200, 1_000, 5_000
_LEVELS = {Gravity.INFO: logging.INFO, Gravity.WARNING: logging.WARNING, Gravity.CRITICAL: logging.ERROR}
_NOT_THE_NODE = BLAMELESS | {IncidentKind.SWITCH_SUSPECT, IncidentKind.AGENTS_SILENT, IncidentKind.NODE_BACK}
_KNOWN = frozenset(kind.value for kind in IncidentKind)

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
        """Begin with all messages of a burst."""
        self._pacer = Pacer(self.channel.pace)

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
            before = self.journal.beat(f"digest {self.channel.name}", unix)
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


@dataclass(slots=True, kw_only=True)
class DeadmanSwitch:
    """Calls while the loop goes round, the journal takes writes and the channels messages. One thread only."""

    journal: Journal
    clock: Clock
    metrics: WatchMetrics
    channels: Sequence[str]
    calls: Mapping[str, Callable[[Notification], None]]
    host: str
    _called: float = field(init=False)
    _failing: set[str] = field(default_factory=set)
    _wrong: str = ""
    _full: bool = False

    def __post_init__(self) -> None:
        """Call nobody at once: first the loop has to come round."""
        self._called = self.clock.monotonic() - CALL_S + BEAT_S

    def tell(self) -> float:
        """Go round once."""
        self.write()
        if self.clock.monotonic() - self._called >= CALL_S:
            self._judge()
        return BEAT_S

    def _judge(self) -> None:
        wrong, before = self.trouble(), self._wrong
        self._wrong = wrong
        if wrong:
            if wrong != before:
                log.warning("%s", wrong)
            return
        self._called = self.clock.monotonic()
        for name, call in self.calls.items():
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
        return notification(f"{self.host} {now}", text, text, self.host, unix=now)


@dataclass(slots=True, kw_only=True)
class IncidentCounter:
    """Counts each state of an incident once, and logs it, also over restarts of the watchdog. One thread only."""

    journal: Journal
    clock: Clock
    metrics: WatchMetrics
    _unnoted: dict[tuple[str, str], str] = field(default_factory=dict)
    _charged_s: dict[Attempt, float] = field(default_factory=dict)
    _nodes_at: float = float("-inf")

    def tell(self) -> float:
        """Count what is new; return in how many seconds to look again, unless there is news."""
        for news in self.journal.unsent(COUNTED, limit=MOST_NEWS):
            if news.key not in self._unnoted:
                self._unnoted[news.key] = "sent"
                self._count(news)
        if self._unnoted:
            self.journal.note_sent(COUNTED, dict(self._unnoted), self.clock.unix())
            self._unnoted.clear()
        opened = Counter(_kind(one) for one in self.journal.incidents(only_open=True, limit=MOST_READ))
        self.metrics.incidents_by_kind.clear()
        for kind, count in opened.items():
            self.metrics.incidents_by_kind.labels(kind).set(count)
        if self.clock.monotonic() - self._nodes_at >= NODES_S:
            self._nodes_at = self.clock.monotonic()
            self._count_nodes()
        return COUNT_S

    def _count(self, news: IncidentNews) -> None:
        incident, kind = news.incident, _kind(news.incident)
        incident_log.log(_LEVELS[gravity(incident)], "incident: %s", line(news))
        exemplar = {"attempt": incident.attempt_name[:64]} if incident.attempt else None
        if not news.opened_told:
            seconds = max(0.0, incident.detected_unix - incident.began_unix)
            self.metrics.detect_seconds.labels(kind).observe(seconds, exemplar)
        if incident.outcome is IncidentOutcome.OPEN:
            return
        self.metrics.incidents_ended.labels(kind, incident.outcome.value).inc()
        if incident.attempt is None:
            return
        if incident.outcome is IncidentOutcome.RECOVERED and incident.recovered_unix:
            seconds = max(0.0, incident.recovered_unix - incident.began_unix)
            self.metrics.resume_seconds.labels(kind).observe(seconds, exemplar)
        # An attempt stands still once, whatever was recorded of it: of its incidents the dearest counts.
        spent = cost(incident)
        lost_s = ((spent.standing_h or 0.0) + (spent.repeated_h or 0.0)) * HOUR_S
        before = self._charged_s.pop(incident.attempt, 0.0)
        self._charged_s[incident.attempt] = max(before, lost_s)
        self.metrics.lost_rank_seconds.labels(kind).inc(max(0.0, lost_s - before))
        if len(self._charged_s) > MOST_ATTEMPTS:
            del self._charged_s[next(iter(self._charged_s))]

    def _count_nodes(self) -> None:
        since = self.clock.unix() - LAST_S
        found = self.journal.incidents(since_unix=since, limit=MOST_READ)
        counts = Counter(one.node for one in found if one.node and one.kind not in _NOT_THE_NODE)
        self.metrics.node_incidents.clear()
        for node, count in counts.most_common(MOST_NODES):
            self.metrics.node_incidents.labels(node).set(count)


def _kind(incident: Incident) -> str:
    return incident.kind if incident.kind in _KNOWN else "other"  # a launcher may be newer, and say anything


class Notifier:
    """A thread for each teller. `tell` goes round once and returns in how many seconds again, without news."""

    def __init__(self, tellers: Mapping[str, Callable[[], float]]) -> None:
        self._stop = threading.Event()
        self._news = {name: threading.Event() for name in tellers}
        self._threads = [
            threading.Thread(target=self._run, args=(name, tell), name=f"deeplink-notify-{name}", daemon=True)
            for name, tell in tellers.items()
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Say that there is news; does not wait."""
        for news in self._news.values():
            news.set()

    def close(self) -> None:
        """Stop; a try under way has CLOSE_S to end, what was not told stays in the journal."""
        self._stop.set()
        self.wake()
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, name: str, tell: Callable[[], float]) -> None:
        news, trouble = self._news[name], ""
        while not self._stop.is_set():
            news.clear()
            try:
                wait_s, said = tell(), ""
            except DeepLinkError as problem:  # the journal cannot be read
                wait_s, said = LOOK_S, str(problem)
            except Exception as problem:
                # Whatever is wrong with one channel, the others go on, and its metric stands still.
                wait_s, said = LOOK_S, repr(problem)
                if said != trouble and not self._stop.is_set():
                    log.exception("channel %s", name)
                    trouble = said
            if said and said != trouble and not self._stop.is_set():  # at the end the journal is closed before us
                log.warning("channel %s: %s", name, said)
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
    """Until the end of the block tell of incidents in `journal` that begin or change, and that we are well."""
    told = [channel for channel in channels if not channel.heartbeat]
    tellers: dict[str, Callable[[], float]] = {}
    for channel in told:
        journal.open_channel(channel.name)  # before the first incident of this watchdog
        metrics.notify_time.labels(channel.name).set(clock.unix())
        teller = Teller(
            channel=channel,
            journal=journal,
            send=sender(channel),
            clock=clock,
            metrics=metrics,
            host=host,
            cluster=cluster,
        )
        tellers[channel.name] = teller.tell
    journal.open_channel(COUNTED)
    tellers[COUNTED] = IncidentCounter(journal=journal, clock=clock, metrics=metrics).tell
    tellers[PULSE] = DeadmanSwitch(
        journal=journal,
        clock=clock,
        metrics=metrics,
        channels=[channel.name for channel in told],
        calls={channel.name: sender(channel) for channel in channels if channel.heartbeat},
        host=host,
    ).tell
    notifier = Notifier(tellers)
    journal.listen(notifier.wake)
    try:
        yield notifier
    finally:
        notifier.close()
