"""Severities, in order and by the words of health checks."""

from __future__ import annotations

import pytest

from deeplink.core.finding import HEALTH, Severity


def test_severities_are_in_order() -> None:
    assert [severity.word for severity in sorted(Severity)] == ["unknown", "ok", "note", "warning", "error"]
    assert [severity.action for severity in sorted(HEALTH)] == ["unknown", "observe", "comment", "drain"]


@pytest.mark.parametrize("severity", sorted(HEALTH))
def test_a_health_check_s_words_lead_back_to_the_severity(severity: Severity) -> None:
    assert Severity.of_action(severity.action) is severity


@pytest.mark.parametrize("word", ["", "ok", "error", "DRAIN", "reboot"])
def test_a_word_of_a_newer_version_is_taken_for_unknown(word: str) -> None:
    assert Severity.of_action(word) is Severity.UNKNOWN
