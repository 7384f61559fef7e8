from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.types import Attempt, AttemptFormatError, Member, NodeName, format_members, parse_members

NUMBERS = st.integers(0, 2**31)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_an_attempt_reads_back_what_it_wrote(job: int, restart: int, relaunch: int) -> None:
    attempt = Attempt(job, restart, relaunch)
    assert Attempt.parse(str(attempt)) == attempt


def test_within_a_job_later_attempts_compare_greater() -> None:
    assert Attempt(7, 0, 9) < Attempt(7, 1, 0) < Attempt(7, 1, 1)


@pytest.mark.parametrize("text", ["", "1", "1.2", "1.2.3.4", "a.b.c", "1.-2.3", "1. 2.3", "1.²2.3", "+1.2.3"])
def test_a_text_that_is_no_attempt_is_refused(text: str) -> None:
    with pytest.raises(AttemptFormatError) as caught:
        Attempt.parse(text)
    assert caught.value.text == text


def test_members_read_back_what_was_written() -> None:
    members = (Member(NodeName("n0"), "10.0.0.1:4000"), Member(NodeName("n1"), "[::1]:4000"))
    assert parse_members(format_members(members)) == members


@pytest.mark.parametrize("text", ["n0", "n0=", "=1.2.3.4:5", "n0=a:1,n0=b:2"])
def test_bad_members_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_members(text)
