"""Checks on their schedule, in real threads; what hangs hangs alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.core import metrics
from deeplink.core.clock import SystemClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import GOOD, Complaint, Look, comment, drain
from deeplink.scheduler.node.settings import CheckTiming, Off, read_switch
from deeplink.scheduler.node.watching import HealthCheck, HealthWatch, closed, found_by, looked_at
from tests.waiting import LIMIT_S, until

QUICK = CheckTiming(interval_s=0.02, deadline_s=LIMIT_S, bad=2, good=2)
HANGS = replace(QUICK, deadline_s=0.2)
"""For what is to be late: on a busy machine, what is not may be as late."""


class Probe:
    """A check that says what it is told to."""

    def __init__(
        self, name: str, look: Look = GOOD, timing: CheckTiming = QUICK, hangs: Severity | None = None
    ) -> None:
        self.says, self.looks, self.threads = look, 0, 0
        self.go = threading.Event()
        self.go.set()
        self.most_at_once = 0
        self.check = HealthCheck(
            name=name,
            look=self.look,
            timing=timing,
            hung=None if hangs is None else lambda _: Look((Complaint("hangs", hangs, "x"),), "x"),
        )

    def look(self) -> Look:
        self.threads += 1
        self.most_at_once = max(self.most_at_once, self.threads)
        self.go.wait(LIMIT_S)
        self.threads -= 1
        self.looks += 1
        return self.says


@contextmanager
def watching(*probes: Probe, switch: Callable[[], Off] = Off) -> Iterator[HealthWatch]:
    watch = HealthWatch([probe.check for probe in probes], switch=switch, clock=SystemClock())
    watch.start()
    try:
        yield watch
    finally:
        for probe in probes:
            probe.go.set()
        watch.stop()


def severities(watch: HealthWatch) -> dict[str, Severity]:
    return {finding.check: finding.severity for finding in watch.findings()}


def test_findings_begin_and_end_and_what_ended_is_remembered() -> None:
    probe = Probe("disk", Look((drain("space", "full"),)))
    changes = []
    with watching(probe) as watch:
        watch.changed = lambda: changes.append(1)
        until(lambda: severities(watch) == {"disk": Severity.ERROR})
        assert watch.news(0)[1] == []
        gauge = metrics.HEALTH_FINDINGS.labels("disk", "drain")
        assert gauge._value.get() == 1
        probe.says = GOOD
        until(lambda: not watch.findings())
        (ended,) = watch.news(0)[1]
        assert (ended.finding.check, ended.finding.text, ended.key[:2]) == ("disk", "full", ("disk", "space"))
        assert watch.news(ended.number)[1] == []
        assert gauge._value.get() == 0
        assert len(changes) >= 1


def test_none_is_told_as_lasting_and_as_over_at_once() -> None:
    probe = Probe("disk", timing=CheckTiming(interval_s=0.001, bad=1, good=1))
    with watching(probe) as watch:
        for turn in range(40):
            probe.says = GOOD if turn % 2 else Look((drain("space", "full"),))
            looks = probe.looks
            while probe.looks < looks + 2:
                found, ended = watch.news(0)
                assert not found.keys() & {one.key for one in ended}


def test_one_that_hangs_holds_up_no_other_is_told_and_found_again() -> None:
    hung = Probe("mount", timing=HANGS, hangs=Severity.WARNING)
    hung.go.clear()
    fine = Probe("memory")
    with watching(hung, fine) as watch:
        until(lambda: severities(watch).get("mount") is Severity.WARNING)
        before = fine.looks
        until(lambda: fine.looks > before + 3)
        assert hung.most_at_once == 1
        hung.go.set()
        until(lambda: not watch.findings())


def test_one_that_hangs_and_whose_hanging_says_nothing_is_unknown() -> None:
    hung = Probe("gpu", timing=HANGS)
    hung.go.clear()
    with watching(hung) as watch:
        until(lambda: severities(watch) == {"gpu": Severity.UNKNOWN})


def test_one_that_fails_itself_is_unknown() -> None:
    broken = Probe("site")
    check = HealthCheck(name="site", look=lambda: 1 / 0, timing=QUICK)  # type: ignore[arg-type, return-value]
    broken.check = check
    with watching(broken) as watch:
        until(lambda: severities(watch) == {"site": Severity.UNKNOWN})
        assert "ZeroDivisionError" in watch.findings()[0].text


def test_the_switch_ends_findings_and_looks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deeplink.scheduler.node.watching.SWITCH_S", 0.05)
    sick, other = Probe("gpu", Look((drain("x", "bad"),))), Probe("disk", Look((comment("y", "bad"),)))
    file = tmp_path / "health-off"
    with watching(sick, other, switch=lambda: read_switch([file])) as watch:
        until(lambda: set(severities(watch)) == {"gpu", "disk"})
        file.write_text("gpu  # broken driver\n")
        until(lambda: set(severities(watch)) == {"disk"})
        looks = sick.looks
        until(lambda: other.looks > 5)
        assert sick.looks <= looks + 1
        file.write_text("")
        until(lambda: not watch.findings())
        file.unlink()
        until(lambda: set(severities(watch)) == {"gpu", "disk"})


def test_a_switch_that_is_set_at_the_start_lets_no_look_begin(tmp_path: Path) -> None:
    file = tmp_path / "health-off"
    file.touch()
    probe = Probe("gpu")
    with watching(probe, switch=lambda: read_switch([file])) as watch:
        assert watch.off.everything
        time.sleep(0.1)
    assert probe.looks == 0


def test_absent_and_turned_off_checks_are_left_out() -> None:
    absent = HealthCheck(name="gpu", look=lambda: GOOD, timing=QUICK, absent="no GPU")
    off = HealthCheck(name="disk", look=lambda: GOOD, timing=CheckTiming(off=True))
    assert HealthWatch([absent, off], clock=SystemClock()).checks == {}


def test_the_gravest_come_first_and_not_all_of_many() -> None:
    many = Look((drain("worst", "x"), *(comment(f"s{n}", "x") for n in range(30))))
    probe = Probe("network", many)
    with watching(probe) as watch:
        until(lambda: len(watch.news(0)[0]) == 31)
        findings = watch.findings()
    assert findings[0].severity is Severity.ERROR
    assert len(findings) == 16


def test_stopping_waits_once_for_all_that_cannot_be_ended() -> None:
    freed, tidied = threading.Event(), threading.Event()

    def wait() -> None:
        freed.wait(LIMIT_S)

    stuck = [HealthCheck(name=f"c{n}", look=lambda: GOOD, timing=QUICK, close=wait) for n in range(8)]
    last = HealthCheck(name="last", look=lambda: GOOD, timing=QUICK, close=tidied.set)
    watch = HealthWatch([*stuck, last], clock=SystemClock())
    watch.start()
    try:
        watch.stop()
        assert tidied.wait(LIMIT_S)
        assert not freed.is_set()
    finally:
        freed.set()


def test_checks_are_closed_also_where_no_thread_can_be_begun() -> None:
    tidied: list[str] = []
    checks = [
        HealthCheck(name=name, look=lambda: GOOD, timing=QUICK, close=lambda name=name: tidied.append(name))  # type: ignore[misc]
        for name in "ab"
    ]
    before = threading.stack_size(1 << 46)  # no machine has so much room for one
    try:
        closed(checks, 20)
    finally:
        threading.stack_size(before)
    assert tidied == ["a", "b"]


def test_looking_once_ends_in_time_whatever_hangs() -> None:
    hung = Probe("disk", hangs=Severity.ERROR, timing=CheckTiming(deadline_s=0.3))
    hung.go.clear()
    bad = Probe("gpu", Look((drain("x", "bad"),)), timing=CheckTiming(most=Severity.WARNING))
    dark = Probe("site", Look((), "no answer"))
    looked = looked_at([hung.check, bad.check, dark.check], SystemClock(), 10.0)
    hung.go.set()
    found = found_by(looked, 5.0)
    assert [(one.check, one.severity) for one in found] == [
        ("disk", Severity.ERROR),
        ("gpu", Severity.WARNING),
        ("site", Severity.UNKNOWN),
    ]
    assert {one.check.name: one.took_s is None for one in looked} == {"disk": True, "gpu": False, "site": False}
