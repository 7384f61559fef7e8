from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import Attempt, AttemptFormatError, Member, NodeName, format_members, parse_members

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


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.text(max_size=12)), min_size=1, max_size=5))
def test_members_and_whatever_their_switches_are_called_read_back(said: list[tuple[int, str]]) -> None:
    members = tuple(Member(NodeName(f"n{i}"), f"h:{i + 1}", *one) for i, one in enumerate(said))
    found = parse_members(format_members(members))
    if len({member.domain for member in members}) > 1:
        assert found == members
    else:  # where all fail together it is not said, as before there were domains
        assert "@" not in format_members(members)
        assert [member.name for member in found] == [member.name for member in members]


def test_domains_are_written_where_they_differ_and_behind_a_weight_for_old_readers_to_refuse() -> None:
    members = tuple(
        Member(NodeName(f"n{i}"), "h:1", 1, name) for i, name in enumerate(("MF0;sw1:SX/U1", "a, b", ""))
    )
    assert format_members(members) == "n0=h:1*1@MF0;sw1:SX/U1,n1=h:1*1@a%2C%20b,n2=h:1*1"
    assert format_members(members[:1]) == "n0=h:1"


@pytest.mark.parametrize(
    "text", ["n0=h:1@leaf0", "n0=h:1*2@", "n0=h:1*2@a b", "n0=h:1*2@a@b", "n0=h:1*@a", "n0=h:1*2@%zz"]
)
def test_a_list_with_odd_domains_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"domain|weight"):
        parse_members(text)


def test_a_domain_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        parse_members("n0=h:1*2@%ff")


@pytest.mark.parametrize("text", ["n0", "n0=", "=1.2.3.4:5", "n0=a:1,n0=b:2"])
def test_bad_members_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_members(text)
