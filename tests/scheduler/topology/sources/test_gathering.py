"""Names nobody vouches for, and levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.topology.network import Cable, Switch, TopologyCheck
from deeplink.scheduler.topology.sources.gathering import GraphBuilder, heights, is_name


@given(st.text(max_size=60))
def test_any_text_gives_names_or_says_why_not(text: str) -> None:
    gathering = GraphBuilder("file")
    names = gathering.names(text, 3)
    assert all(is_name(name) for name in names)
    assert names or gathering.findings or not text.strip(",")
    assert all(finding.line == 3 for finding in gathering.findings)


@pytest.mark.parametrize("text", ["n[0-99999999]", "n[0-3", "a b", "x" * 300, "n" + "9" * 5000, "n[0-1]!n0"])
def test_what_cannot_be_unfolded_is_noted(text: str) -> None:
    gathering = GraphBuilder("file")
    assert gathering.names(text, 1) == ()
    assert [finding.check for finding in gathering.findings] == [TopologyCheck.UNREADABLE]
    assert len(str(gathering.findings[0])) < 300


GRAPHS = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefx"), max_size=3), min_size=1, max_size=6
)


@given(GRAPHS)
def test_a_switch_is_above_all_it_names_or_in_a_loop(below: dict[str, list[str]]) -> None:
    levels, looped = heights(below)

    # As deep as the longest way down; a way longer than there are switches goes in a circle.
    def depth(name: str, left: int) -> int | None:
        if not left:
            return None
        under = [depth(child, left - 1) for child in below[name] if child in below]
        return None if None in under else 1 + max((one for one in under if one is not None), default=-1)

    for name in below:
        expected = depth(name, len(below) + 1)
        assert (name in looped) == (expected is None)
        if expected is not None:
            assert levels[name] == expected


def test_a_link_without_cables_is_none() -> None:
    gathering = GraphBuilder("file")
    gathering.connect("a", "b", host=False, cables=[])
    gathering.connect("a", "c", host=False, cables=[Cable()])
    assert [link.above for link in gathering.reading().network.links] == ["c"]


def test_what_a_few_letters_stand_for_is_bounded_in_all() -> None:
    gathering = GraphBuilder("file")
    counts = [len(gathering.names("n[0-65000]", line)) for line in range(20)]
    assert counts == [65_001] * 16 + [0] * 4
    assert [finding.line for finding in gathering.findings] == [16, 17, 18, 19]
    assert not gathering.afford(2**30, 20)
    assert gathering.names("n0", 21) == ("n0",)


def test_no_fabric_is_higher_than_it_can_be() -> None:
    gathering = GraphBuilder(
        "file", switches={f"s{level}": Switch(f"s{level}", level) for level in (0, 63, 64, 9999)}
    )
    reading = gathering.reading()
    assert [switch.level for switch in reading.network.switches.values()] == [0, 63, 63, 63]
    assert [finding.check for finding in reading.findings] == [TopologyCheck.TAKEN]
