"""The dead man's switch: what stands still is seen, and nobody calls a heartbeat that is not true."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.watch.notify.delivery import Notification, NotSentError
from deeplink.scheduler.watch.notify.notifier import BEAT_S, CALL_S, DeadmanSwitch


class Watchdog:
    """The parts of a watchdog that its pulse looks at."""

    def __init__(self, path: Path) -> None:
        self.clock, self.metrics = ManualClock(), WatchMetrics(CollectorRegistry())
        self.journal = Journal(path / "j.sqlite")
        self.calls: list[float] = []
        self.refuse = False
        self.pulse = DeadmanSwitch(
            journal=self.journal,
            clock=self.clock,
            metrics=self.metrics,
            channels=["there"],
            calls={"beat": self.call},
            host="head",
        )

    def call(self, message: Notification) -> None:
        if self.refuse:
            raise NotSentError("beat", "it answered 500")
        assert message.document["host"] == "head"
        self.calls.append(self.clock.unix())

    def run(self, seconds: float, *, loop: bool = True, channel: bool = True) -> int:
        """Let time pass; return how often the heartbeat was called."""
        before = len(self.calls)
        for _ in range(round(seconds / BEAT_S)):
            self.clock.now += BEAT_S
            if loop:
                self.metrics.loop_time.set(self.clock.unix())
            if channel:
                self.metrics.notify_time.labels("there").set(self.clock.unix())
            self.pulse.tell()
        return len(self.calls) - before


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    made = Watchdog(tmp_path)
    yield made
    made.journal.close()


def test_while_all_is_well_it_is_called_every_minute(watchdog: Watchdog) -> None:
    assert watchdog.run(600) == round(600 / CALL_S)
    written = watchdog.metrics.registry.get_sample_value("deeplink_watch_journal_time_seconds")
    assert written == watchdog.clock.unix()


def test_a_loop_that_stalls_is_missed(watchdog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    watchdog.run(60)
    with caplog.at_level(logging.WARNING):
        watchdog.run(60, loop=False)
        assert watchdog.run(600, loop=False) == 0
    assert [message for message in caplog.messages if "the loop stood still" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert watchdog.run(120) >= 1


def test_a_channel_that_is_stuck_is_missed(watchdog: Watchdog) -> None:
    watchdog.run(60)
    watchdog.run(300, channel=False)
    assert watchdog.run(600, channel=False) == 0
    assert "channel there" in watchdog.pulse.trouble()


def test_a_journal_that_takes_no_writes_is_missed(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog.run(60)

    def refuse(*_: object) -> None:
        raise JournalError(watchdog.journal.path, "database or disk is full", "")

    monkeypatch.setattr(watchdog.journal, "beat", refuse)
    watchdog.run(60)
    assert watchdog.run(600) == 0
    assert "the journal" in watchdog.pulse.trouble()


def test_before_the_loop_came_round_nothing_is_called(watchdog: Watchdog) -> None:
    assert watchdog.run(120, loop=False) == 0


def test_a_heartbeat_that_is_not_taken_is_said_once_and_tried_again(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog.refuse = True
    with caplog.at_level(logging.WARNING):
        watchdog.run(300)
    assert len(caplog.messages) == 1
    watchdog.refuse = False
    assert watchdog.run(120) >= 1
