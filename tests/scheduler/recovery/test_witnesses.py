"""Thresholds as a site sets them, for launcher and watchdog alike."""

from __future__ import annotations

from dataclasses import fields

import pytest

from deeplink.core.config import ConfigError
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.recovery.relaunch import RelaunchPolicy
from deeplink.scheduler.recovery.witnesses import Thresholds, with_thresholds
from tests.house import ROOT


def test_a_site_sets_some_and_the_rest_stay() -> None:
    policy = with_thresholds(WatchPolicy(resume=True), "silence_s=5, most_at_once=4")
    assert (policy.silence_s, policy.most_at_once, policy.brake_s, policy.resume) == (5.0, 4, 60.0, True)
    assert with_thresholds(RelaunchPolicy(), "brake_s=120").brake_s == 120.0
    assert with_thresholds(RelaunchPolicy(), "") == RelaunchPolicy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("silence=5", "'silence' is no threshold; is silence_s meant?"),
        ("limits=5", "'limits' is no threshold"),
        ("silence_s", "silence_s=: a positive number is needed"),
        ("silence_s=-1", "a positive number is needed"),
        ("silence_s=nan", "a positive number is needed"),
        ("most_at_once=1.5", "a positive number is needed"),
    ],
)
def test_what_is_none_is_refused_with_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="recovery") as refused:
        with_thresholds(WatchPolicy(), text)
    assert said in str(refused.value)
    assert "verdicts.md" in refused.value.remedy


def test_they_are_fewer_than_fifteen_and_each_has_its_reason_in_the_page() -> None:
    names = [one.name for one in fields(Thresholds)]
    assert len(names) < 15
    page = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in page] == []
