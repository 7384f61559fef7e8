"""The catalogue of checks, and the guide that says what they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.sitecheck.doctor_checks import CHECKS, CheckGroup, check_named, judge
from tests.scheduler.sitecheck.sites import site

GUIDE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_names_are_unique_and_every_check_says_why_it_is_there() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert check.about.startswith("Tell ")
        assert "\n\n" in check.about, f"{check.name} says what, but not why"


def test_every_check_finds_something_and_puts_its_name_to_it() -> None:
    findings = judge(site())
    assert {finding.check for finding in findings} == {check.name for check in CHECKS}
    groups = [check_named(finding.check).group for finding in findings]
    assert groups == sorted(groups, key=list(CheckGroup).index)


def test_a_check_that_there_is_none_of() -> None:
    with pytest.raises(DeepLinkError) as caught:
        check_named("kill-on-bad-exits")
    assert "kill-on-bad-exit," in caught.value.remedy


def test_the_guide_has_each_check_and_no_other() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [check.name for check in CHECKS]
