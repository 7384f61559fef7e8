"""What heals by itself is left to the day's digest; what lasts is told, with whose job it is and where to look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.incident_json import IncidentNews
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, IncidentOutcome, Phase
from deeplink.scheduler.watch.notify.channels import AFTER_S, Channel, Pacer, Program
from deeplink.scheduler.watch.notify.delivery import DAY_S, Notification, NotSentError, latest
from deeplink.scheduler.watch.notify.notifier import Teller
from tests.scheduler.watch.notify.things import dead, news, recovered

PATIENT = Channel(name="there", way=Program(argv=("true",)), after_s=AFTER_S)
DAILY = replace(PATIENT, digest=(8, 0), page="https://console.example", cluster="tiny")
LASTS_S = AFTER_S[next(iter(AFTER_S))]


class Taken:
    """The far end: keeps what it is sent, or fails."""

    def __init__(self) -> None:
        self.failing = False
        self.messages: list[Notification] = []

    def send(self, message: Notification) -> None:
        if self.failing:
            raise NotSentError("there", "it answered 500")
        self.messages.append(message)

    @property
    def states(self) -> list[str]:
        return [one["outcome"] for message in self.messages for one in message.document["incidents"]]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "j.sqlite") as opened:
        opened.open_channel("there")
        yield opened


def teller(journal: Journal, far: Taken, clock: ManualClock, channel: Channel) -> Teller:
    metrics = WatchMetrics(CollectorRegistry())
    return Teller(channel=channel, journal=journal, send=far.send, clock=clock, metrics=metrics, host="head")


def at(daytime: str, day: int = 14) -> ManualClock:
    """A clock of 2023-11, when the incidents of these tests are."""
    local = time.mktime(time.strptime(f"2023-11-{day:02d} {daytime}", "%Y-%m-%d %H:%M"))
    return ManualClock(now=0.0, epoch=local)


def test_what_heals_at_once_is_not_told_and_what_lasts_is(journal: Journal) -> None:
    far, clock = Taken(), ManualClock(now=0.0, epoch=dead(1).detected_unix)
    ours = teller(journal, far, clock, PATIENT)
    journal.record_incident(dead(1))
    journal.record_incident(dead(2, "n2"))
    wait_s = ours.tell()
    assert not far.messages
    journal.record_incident(recovered(dead(1)))
    clock.now += 119.0
    assert ours.tell() == pytest.approx(1.0)
    assert wait_s > 1.0
    clock.now += 1.0
    ours.tell()
    assert far.states == ["open"]
    journal.record_incident(replace(recovered(dead(2, "n2")), recovered_unix=clock.unix()))
    ours.tell()
    assert far.states == ["open", "recovered"]
    assert journal.unsent("there") == ()


def test_a_job_that_failed_is_told_at_once(journal: Journal) -> None:
    far = Taken()
    ours = teller(journal, far, ManualClock(epoch=dead(1).detected_unix), PATIENT)
    journal.record_incident(dead(1, outcome=IncidentOutcome.FAILED))
    ours.tell()
    assert far.states == ["failed"]


def test_a_message_says_whose_job_it_is_on_which_cluster_and_where_to_look(journal: Journal) -> None:
    far = Taken()
    ours = teller(journal, far, ManualClock(epoch=dead(1).detected_unix), replace(DAILY, after_s={}))
    beat = Beat(attempt=Attempt(1, 0, 0), phase=Phase.RUNNING, user="ada", job_name="digits")
    journal.record_beat(beat, dead(1).began_unix)
    journal.record_incident(dead(1))
    ours.tell()
    (message,) = far.messages
    number = journal.incidents()[0].number
    assert message.subject.startswith("DeepLink tiny: node-dead on n1 job 1")
    assert "(digits of ada)" in message.text
    assert f"https://console.example/#/incidents/{number}" in message.text
    (told,) = message.document["incidents"]
    assert (told["job_name"], told["user"]) == ("digits", "ada")
    assert told["url"].endswith(f"/#/incidents/{number}")


def test_the_day_is_told_once_with_what_healed_also_by_who_goes_on(journal: Journal) -> None:
    far, clock = Taken(), at("07:59", 15)
    ours = teller(journal, far, clock, DAILY)
    journal.record_incident(recovered(dead(1)))  # on the 14th, in the evening
    ours.tell()
    assert not far.messages, "it healed by itself"
    clock.now += 120.0
    far.failing = True
    ours.tell()
    far.failing = False
    clock.now += 120.0
    for _ in range(3):
        ours.tell()
    teller(journal, far, clock, DAILY).tell()  # another watchdog
    (message,) = far.messages
    assert "1 incident: 1 recovered, 0 failed, 0 open" in message.text
    assert "By node: n1: 1" in message.text
    assert message.document["digest"]["incidents"] == 1
    clock.now += DAY_S
    ours.tell()
    assert len(far.messages) == 1, "on that day nothing happened"


def test_a_watchdog_that_begins_in_the_afternoon_tells_no_day(journal: Journal) -> None:
    far, clock = Taken(), at("15:00", 15)
    journal.record_incident(recovered(dead(1)))
    ours = teller(journal, far, clock, DAILY)
    ours.tell()
    assert not far.messages
    clock.now += DAY_S - 7 * 3_600 + 60  # the next morning
    ours.tell()
    assert not far.messages, "that is more than a day ago"


@pytest.mark.parametrize(("now", "due"), [("08:00", "08:00"), ("23:59", "08:00"), ("07:59", None)])
def test_when_the_digest_was_due(now: str, due: str | None) -> None:
    wanted = at(due, 15).unix() if due else at("08:00", 14).unix()
    assert latest((8, 0), at(now, 15).unix()) == wanted


def test_news_of_one_job_are_one_message() -> None:
    told = Pacer(PATIENT.pace).turn([news(17, "n1"), news(17, "n2"), news(18, "n3")], 0.0).batch
    assert [one.incident.node for one in told] == ["n1", "n2"]
    assert IncidentNews(dead(18, "n3")) not in told
