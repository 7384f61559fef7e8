"""What a channel is told of a journal: once, in order, also after failures and restarts; nobody waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.incident_json import NewsFilter
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.recovery.records import Beat, IncidentOutcome, Phase, ProgressPoint
from deeplink.scheduler.watch.notify.channels import Channel, ChannelRate, Program, Webhook
from deeplink.scheduler.watch.notify.delivery import Notification, NotSentError
from deeplink.scheduler.watch.notify.notifier import GIVE_UP_S, LONGEST_PAUSE_S, LOOK_S, Teller, notifying
from tests.scheduler.watch.notify.servers import Heard, web
from tests.scheduler.watch.notify.things import dead, recovered
from tests.waiting import until

NOWHERE = Channel(name="there", way=Program(argv=("true",)))


class Far:
    """The far end: takes messages, or fails as it is told."""

    def __init__(self) -> None:
        self.failing, self.after_s = False, 0.0
        self.tries = 0
        self.taken: list[list[str]] = []

    def send(self, message: Notification) -> None:
        self.tries += 1
        if self.failing:
            raise NotSentError("there", "it answered 500", self.after_s)
        self.taken.append([f"{one['id']} {one['outcome']}" for one in message.document["incidents"]])


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite") as opened:
        yield opened


def value(metrics: WatchMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"deeplink_watch_notify_{name}", {"channel": "there", **labels})


def teller(journal: Journal, far: Far, clock: ManualClock, channel: Channel = NOWHERE) -> Teller:
    journal.open_channel(channel.name)
    metrics = WatchMetrics(CollectorRegistry())
    return Teller(channel=channel, journal=journal, send=far.send, clock=clock, metrics=metrics, host="head")


def test_each_state_of_an_incident_is_told_once(journal: Journal) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    assert ours.tell() == LOOK_S
    journal.record_incident(dead(1))
    for _ in range(3):
        journal.record_incident(dead(1))  # seen again, and again
        assert ours.tell() == LOOK_S
    journal.record_incident(recovered(dead(1)))
    ours.tell()
    assert far.taken == [["1.0.0-node-dead-n1 open"], ["1.0.0-node-dead-n1 recovered"]]
    assert value(ours.metrics, "messages_total", result="sent") == 2.0


def test_what_was_there_before_is_not_news_and_a_new_channel_begins_anew(journal: Journal) -> None:
    journal.record_incident(dead(1))
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(2, "n2"))
    ours.tell()
    other = teller(journal, far, clock, Channel(name="other", way=NOWHERE.way))
    other.tell()
    assert far.taken == [["2.0.0-node-dead-n2 open"]]


def test_an_incident_that_is_over_before_it_is_told_is_told_once(journal: Journal) -> None:
    far = Far()
    ours = teller(
        journal, far, ManualClock(), Channel(name="there", way=NOWHERE.way, wanted=NewsFilter(closed=False))
    )
    journal.record_incident(recovered(dead(1)))
    journal.record_incident(dead(2, "n2"))
    ours.tell()
    journal.record_incident(recovered(dead(2, "n2")))
    ours.tell()
    assert far.taken == [["1.0.0-node-dead-n1 recovered"], ["2.0.0-node-dead-n2 open"]]
    assert journal.unsent("there") == ()


def test_a_job_that_failed_and_trains_again_after_all_is_told_of(journal: Journal) -> None:
    far, clock = Far(), ManualClock(epoch=dead(1).detected_unix)
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1, outcome=IncidentOutcome.FAILED))
    ours.tell()
    again = Attempt(1, 1, 0)
    step = ProgressPoint(attempt=again, step=3, unix=dead(1).detected_unix + 60)
    journal.record_beat(Beat(attempt=again, phase=Phase.RUNNING, progress=(step,)), clock.unix())
    ours.tell()
    assert far.taken == [["1.0.0-node-dead-n1 failed"], ["1.0.0-node-dead-n1 recovered"]]


def test_another_watchdog_goes_on_where_this_one_was_killed(journal: Journal) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1))
    ours.tell()
    journal.record_incident(dead(2, "n2"))  # and killed, before it was told
    again = teller(journal, far, clock)
    again.tell()
    assert far.taken == [["1.0.0-node-dead-n1 open"], ["2.0.0-node-dead-n2 open"]]


def test_a_far_end_that_fails_is_tried_again_in_order_with_growing_pauses(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1))
    journal.record_incident(dead(2, "n2"))
    far.failing = True
    pauses = []
    well = value(ours.metrics, "time_seconds")
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            before, tries = clock.now, far.tries
            while far.tries == tries:
                clock.now += ours.tell()
            pauses.append(clock.now - before)
    assert far.tries == 9
    assert value(ours.metrics, "time_seconds") == well, "the dead man's switch stands still"
    assert value(ours.metrics, "waiting") == 2.0
    assert len(caplog.messages) == 1, "said once, not for each try"
    assert max(pauses) <= LONGEST_PAUSE_S + LOOK_S
    far.failing = False
    clock.now += LONGEST_PAUSE_S
    ours.tell()
    assert far.taken == [["1.0.0-node-dead-n1 open"], ["2.0.0-node-dead-n2 open"]]
    assert value(ours.metrics, "waiting") == 0.0
    assert value(ours.metrics, "time_seconds") == clock.unix()


def test_a_far_end_that_asks_for_a_pause_gets_it_within_bounds(journal: Journal) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1))
    far.failing, far.after_s = True, 40.0
    ours.tell()
    clock.now += 39
    ours.tell()
    assert far.tries == 1
    clock.now += 2
    far.after_s = 1e6
    ours.tell()
    clock.now += LONGEST_PAUSE_S
    ours.tell()
    assert far.tries == 3


def test_what_could_not_be_told_for_an_hour_is_given_up_and_said(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1))
    far.failing = True
    ours.tell()
    clock.now += GIVE_UP_S - 10
    ours.tell()
    journal.record_incident(dead(2, "n2"))
    clock.now += 20
    with caplog.at_level(logging.WARNING):
        ours.tell()
    assert "1.0.0-node-dead-n1 open could not be told" in caplog.text
    far.failing = False
    clock.now += LONGEST_PAUSE_S
    ours.tell()
    assert far.taken == [["2.0.0-node-dead-n2 open"]]
    assert value(ours.metrics, "messages_total", result="given_up") == 1.0


def test_a_storm_while_the_far_end_was_away_is_one_message(journal: Journal) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock, Channel(name="there", way=NOWHERE.way, pace=ChannelRate(burst=2)))
    far.failing = True
    for job in range(1, 31):
        journal.record_incident(dead(job, f"n{job}"))
        ours.tell()
    far.failing = False
    clock.now += LONGEST_PAUSE_S
    ours.tell()
    (only,) = far.taken
    assert only == [f"{job}.0.0-node-dead-n{job} open" for job in range(1, 31)]


def test_where_the_journal_takes_no_writes_each_is_told_once_all_the_same(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    journal.record_incident(dead(1))
    journal.record_incident(dead(2, "n2"))
    with caplog.at_level(logging.WARNING):
        journal._db.execute("PRAGMA query_only = ON")  # what a full disk, or one gone read-only, comes to
        for _ in range(3):
            ours.tell()
            clock.now += 60
        with pytest.raises(JournalError):
            journal.record_incident(dead(3, "n3"))
        journal._db.execute("PRAGMA query_only = OFF")
        assert len(journal.unsent("there")) == 2
        ours.tell()
    assert far.taken == [[f"{dead(1).id} open"], [f"{dead(2, 'n2').id} open"]]
    assert journal.unsent("there") == ()
    assert len([one for one in caplog.records if "not noted yet" in one.message]) == 1


def test_channels_outlive_a_journal_that_fails_for_a_while(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(name="program", way=Program(argv=("/bin/sh", "-c", f"cat >> {tmp_path}/told")))
    with notifying([channel], journal, SystemClock(), WatchMetrics(CollectorRegistry()), "head") as notifier:
        journal._db.execute("ALTER TABLE notices RENAME TO elsewhere")  # neither read nor written
        notifier.wake()
        until(lambda: "channel program: " in caplog.text)
        with pytest.raises(JournalError):
            journal.unsent("program")
        journal._db.execute("ALTER TABLE elsewhere RENAME TO notices")
        journal.record_incident(dead(1))
        until(lambda: journal.unsent("program") == ())
    assert (tmp_path / "told").read_text().count("\n") == 1


def test_what_is_told_does_not_gather_in_the_journal(journal: Journal) -> None:
    far, clock = Far(), ManualClock()
    ours = teller(journal, far, clock)
    for job in range(1, 41):
        journal.record_incident(recovered(dead(job, f"n{job}")))
        ours.tell()
        clock.now += 60
    assert len(far.taken) == 40
    (left,) = journal._db.execute("SELECT count(*) FROM notices").fetchone()
    assert left == 0


def test_a_channel_that_hangs_holds_up_neither_the_journal_nor_the_others(
    journal: Journal, tmp_path: Path
) -> None:
    slow = Heard(answers=[0] * 1000)
    with web(slow), web(Heard()) as quick:
        channels = [
            Channel(name="slow", way=Webhook(url=slow.url), timeout_s=10.0),
            Channel(name="quick", way=Webhook(url=quick.url)),
            Channel(name="program", way=Program(argv=("/bin/sh", "-c", f"cat >> {tmp_path}/told"))),
        ]
        metrics = WatchMetrics(CollectorRegistry())
        with notifying(channels, journal, SystemClock(), metrics, "head"):
            began = time.monotonic()
            for job in range(1, 4):
                journal.record_incident(dead(job, f"n{job}"))
            assert time.monotonic() - began < channels[0].timeout_s
            until(lambda: len(quick.documents) == 3 and slow.documents)
            until(lambda: len(journal.unsent("program")) == 0)
            assert [one["incidents"][0]["id"] for one in quick.documents] == [
                dead(j, f"n{j}").id for j in (1, 2, 3)
            ]
            assert (tmp_path / "told").read_text().count("\n") == 3
            assert len(journal.unsent("slow")) == 3
            slow.closing.set()
    assert not [one for one in threading.enumerate() if one.name == "deeplink-notify-quick"]


@pytest.mark.slow
def test_a_server_that_comes_back_is_told_what_it_missed_also_by_the_next_watchdog(journal: Journal) -> None:
    heard = Heard(answers=[500, 503])
    metrics = WatchMetrics(CollectorRegistry())
    with web(heard):
        pass  # a port of which nobody answers any more
    channels = [Channel(name="there", way=Webhook(url=heard.url))]
    with notifying(channels, journal, SystemClock(), metrics, "head"):
        journal.record_incident(dead(1))
        until(lambda: (value(metrics, "messages_total", result="failed") or 0) >= 1)
    with web(heard, heard.port), notifying(channels, journal, SystemClock(), metrics, "head"):
        until(lambda: journal.unsent("there") == ())
    assert [one["incidents"][0]["id"] for one in heard.documents] == [dead(1).id] * 3
