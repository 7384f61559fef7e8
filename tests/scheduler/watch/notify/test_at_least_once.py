"""Whatever happens in whatever order: each state of an incident is told once, and nothing true is left untold."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.watch.notify.channels import Channel, ChannelRate, Program
from deeplink.scheduler.watch.notify.delivery import Notification, NotSentError
from deeplink.scheduler.watch.notify.notifier import GIVE_UP_S, Teller
from tests.effort import examples
from tests.scheduler.watch.notify.things import DEAD, dead, recovered

CHANNEL = Channel(
    name="there", way=Program(argv=("true",)), pace=ChannelRate(burst=2, every_s=30.0, flaps=2, window_s=120.0)
)


class KilledError(BaseException):
    """The watchdog died here."""


class Telling(RuleBasedStateMachine):
    """Incidents begin and end, the far end fails and comes back, the watchdog is killed and started again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal(Path(self.folder.name) / "j.sqlite")
        self.clock = ManualClock()
        self.failing = self.dying = False
        self.jobs = 0
        self.states: dict[str, str] = {}
        self.told: Counter[str] = Counter()
        self.unsure: set[str] = set()
        self.failed_s = 0.0
        self.start()

    @override
    def teardown(self) -> None:
        self.failing = self.dying = False
        for _ in range(60):
            self.later(60.0)
        for name, state in self.states.items():
            assert self.told[f"{name} {state}"] >= 1, f"{name} {state} was never told"
        assert self.journal.unsent("there") == ()
        self.journal.close()
        self.folder.cleanup()

    def send(self, message: Notification) -> None:
        if self.failing:
            raise NotSentError("there", "it answered 500")
        keys = [f"{one['id']} {one['outcome']}" for one in message.document["incidents"]]
        self.told.update(keys)
        if self.dying:
            self.unsure.update(keys)  # sent, and not noted: may be sent again
            raise KilledError

    def start(self) -> None:
        self.journal.open_channel("there")
        self.teller = Teller(
            channel=CHANNEL,
            journal=self.journal,
            send=self.send,
            clock=self.clock,
            metrics=WatchMetrics(CollectorRegistry()),
            host="head",
        )

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def begins(self, node: str) -> None:
        self.jobs += 1
        # Hours apart: two jobs that lose one node at one time are one incident.
        began = DEAD.began_unix + 10_000.0 * self.jobs
        lost = dead(self.jobs, node, began_unix=began, detected_unix=began + 3.5)
        kept = self.journal.record_incident(lost)
        self.states[kept.id] = "open"

    @precondition(lambda self: "open" in self.states.values())
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(key for key, state in self.states.items() if state == "open")))
        known = self.journal.incident(name)
        assert known is not None
        self.journal.record_incident(recovered(known))
        self.states[name] = "recovered"

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def later(self, seconds: float) -> None:
        self.failed_s = self.failed_s + seconds if self.failing else 0.0
        self.clock.now += seconds
        try:
            self.teller.tell()
        except KilledError:
            self.start()

    @precondition(lambda self: self.failed_s < GIVE_UP_S / 2)
    @rule()
    def far_end_fails(self) -> None:
        self.failing = True

    @rule()
    def far_end_is_back(self) -> None:
        self.failing, self.failed_s = False, 0.0

    @rule(dying=st.booleans())
    def killed_while_sending(self, dying: bool) -> None:
        self.dying = dying

    @rule()
    def killed(self) -> None:
        self.start()

    @invariant()
    def nothing_is_told_twice(self) -> None:
        assert not {key: count for key, count in self.told.items() if count > 1 and key not in self.unsure}


# A thousand durable writes: on a disk that others write to each takes its time.
TestTelling = pytest.mark.slow(Telling.TestCase)
TestTelling.settings = settings(max_examples=examples(25), stateful_step_count=30)
