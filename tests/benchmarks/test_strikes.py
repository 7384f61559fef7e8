"""The faults of a storm are the same for the same seed, and each is held against exactly one incident."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.watchdog.facts import Told
from benchmarks.watchdog.strikes import KINDRED, Strike, Struck, complaints, matched, strikes
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.testbed.lab.faults import FAULTS


def test_every_kind_of_strike_is_a_fault() -> None:
    assert KINDRED.keys() <= FAULTS.keys()
    assert all(kindred.kinds or kindred.brief for kindred in KINDRED.values())


@given(st.integers(0, 1 << 30), st.floats(60, 7200))
def test_a_seed_is_a_storm(seed: int, seconds: float) -> None:
    coming = strikes(seconds, seed)
    assert coming == strikes(seconds, seed)
    times = [strike.at_s for strike in coming]
    assert times == sorted(times)
    assert all(0 < at <= seconds + 0.1 for at in times)
    for strike in coming:
        low, high = KINDRED[strike.fault].hold_s
        assert low <= strike.hold_s <= high


def test_an_hour_has_every_fault_and_another_seed_is_another_storm() -> None:
    assert {strike.fault for strike in strikes(3600, 7)} == KINDRED.keys()
    assert strikes(3600, 7) != strikes(3600, 8)


STRIKE = Strike(at_s=30, fault="node-killed", hold_s=20, pick=1)
STRUCK = Struck(strike=STRIKE, target="n3", job=5, began_unix=1000, hit_unix=1001, over_unix=1020)
TOLD = Told(
    by="watchdog",
    id="5.0.0-node-dead-n3",
    kind="node-dead",
    node="n3",
    attempt="5.0.0",
    began_unix=1000,
    detected_unix=1003,
    action="drain-down",
    outcome=IncidentOutcome.RECOVERED,
    evidence="",
)


def test_one_incident_of_two_tellers_is_one_under_whichever_id() -> None:
    both = [TOLD, dataclasses.replace(TOLD, by="launcher", id="5.0.0-node-silent-n3", kind="node-silent")]
    found, left = matched([STRUCK], both)
    assert (len(found[0]), left) == (1, [])
    assert complaints([STRUCK], both) == []


def test_a_job_that_had_said_its_last_word_cannot_have_been_hit() -> None:
    assert complaints([STRUCK], [], {5: 1000.9}) == []
    assert complaints([STRUCK], [TOLD], {5: 1000.9}) == []
    assert len(complaints([STRUCK], [], {5: 1001.1})) == len(complaints([STRUCK], [], {6: 1000.9})) == 1


def test_no_incident_two_of_them_and_one_too_many_are_told() -> None:
    assert "no incident" in complaints([STRUCK], [])[0]
    second = dataclasses.replace(TOLD, id="5.0.1-node-dead-n3", attempt="5.0.1", detected_unix=1010)
    assert "2 incidents" in complaints([STRUCK], [TOLD, second])[0]
    for other in (
        dataclasses.replace(TOLD, kind="ranks-hung"),
        dataclasses.replace(TOLD, attempt="6.0.0"),
        dataclasses.replace(TOLD, detected_unix=900),
        dataclasses.replace(TOLD, detected_unix=1200),
    ):
        said = complaints([STRUCK], [TOLD, dataclasses.replace(other, id="x")])
        assert len(said) == 1
        assert "without a fault" in said[0]


def test_what_was_left_out_has_no_incident() -> None:
    assert complaints([dataclasses.replace(STRUCK, missed="all was not well")], []) == []


HICCUPS = {"disk-full", "disk-readonly", "slow-rank", "node-drained", "folder-squatted"}


@pytest.mark.parametrize("fault", sorted(KINDRED))
def test_no_fault_goes_without_one_and_a_hiccup_may(fault: str) -> None:
    unseen = dataclasses.replace(STRUCK, strike=dataclasses.replace(STRIKE, fault=fault), job=0)
    said = complaints([unseen], [])
    assert len(said) == (fault not in HICCUPS)
    assert all("no incident" in line for line in said)
    if not KINDRED[fault].kinds:
        assert "without a fault" in complaints([unseen], [TOLD])[0]
        return
    told = dataclasses.replace(TOLD, kind=str(min(KINDRED[fault].kinds)), attempt="")
    assert complaints([unseen], [told]) == []
    assert "2 incidents" in complaints([unseen], [told, dataclasses.replace(told, id="z")])[0]


def test_of_two_faults_the_later_one_explains() -> None:
    later = dataclasses.replace(STRUCK, began_unix=1002)
    found, left = matched([STRUCK, later], [TOLD])
    assert (found[0], found[1], left) == ([], [TOLD], [])


def test_a_node_that_is_called_sick_without_a_fault_is_told() -> None:
    sick = dataclasses.replace(TOLD, id="y", kind="node-sick", attempt="", evidence="disk (drain): read-only")
    assert "without a fault" in complaints([], [sick])[0]
