"""Node sets, held against what Slurm itself recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.slurm.nodeset import NodeSetError, at_most, fold, fold_for_files, unfold

RECORDED = Path(__file__).parents[2] / "data" / "slurm" / "22.05.8" / "1-busy"


def test_unfolding_agrees_with_scontrol() -> None:
    assert list(unfold("n[0-2,5,7]")) == (RECORDED / "scontrol-show-hostnames.txt").read_text().split()


def test_folding_agrees_with_scontrol() -> None:
    assert fold(["n5", "n0", "n2", "n1"]) == (RECORDED / "scontrol-show-hostlistsorted.txt").read_text().strip()


@given(st.sets(st.from_regex(r"[a-z]{1,3}-?[0-9]{1,4}", fullmatch=True), max_size=30))
def test_folding_and_unfolding_lose_nothing(names: set[str]) -> None:
    assert set(unfold(fold(names))) == names


@pytest.mark.parametrize("text", ["@all", "n[0-", "a!b", "n0 n1", "n&m", "*"])
def test_what_is_no_node_set_is_refused(text: str) -> None:
    with pytest.raises(NodeSetError) as caught:
        unfold(text)
    assert caught.value.text == text


def test_a_name_that_is_none_cannot_be_folded() -> None:
    with pytest.raises(NodeSetError):
        fold(["n0", ""])


NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(-?[a-z])?[0-9]{0,3}|[0-9]{1,4}", fullmatch=True)


@given(st.sets(NAMES, min_size=1, max_size=30))
def test_what_is_folded_for_files_unfolds_to_the_same(names: set[str]) -> None:
    folded = fold_for_files(names)
    assert set(unfold(folded)) == names
    # Slurm's files take one folded part in a name, at its end, and not as the whole name.
    for word in re.sub(r"\[[^]]*\]", lambda found: found[0].replace(",", ";"), folded).split(","):
        assert word.count("[") == word.count("]") <= 1
        assert not word.startswith("[")
        assert word.endswith("]") or "]" not in word


def test_a_run_of_padded_names_is_one_range() -> None:
    assert fold_for_files(f"n{number:03}" for number in range(1, 65)) == "n[001-064]"
    assert fold_for_files(f"n{number}" for number in range(8, 12)) == "n[8-11]"
    assert fold_for_files(["n1"]) == "n1"


@given(st.from_regex(r"[a-z]{1,2}(\[[0-9](-[0-9]{1,2})?(,[0-9](-[0-9]{1,2})?)?\])?(,[a-z][0-9])?", fullmatch=True))
def test_the_bound_on_a_set_is_one(text: str) -> None:
    try:
        count = len(unfold(text))
    except NodeSetError:
        return
    assert count <= at_most(text)


def test_an_endless_set_is_seen_without_unfolding_it() -> None:
    assert at_most("n[0-999999999999]") > 10**11
    assert at_most("r[0-999]n[0-999]") == 10**6
    assert at_most(f"n[0-{'9' * 5000}]") > 10**9
    assert at_most("n[0-3],m,o[1,2]") == 7
    assert at_most("n" + "[0-9]" * 200_000) > 10**9  # and at once


def test_an_endless_set_is_not_unfolded() -> None:
    assert len(unfold("n[0-65532]")) == 65_533
    with pytest.raises(NodeSetError, match="so many"):
        unfold("n[1-99999999]")
